from trust_tta.models.checkpoint import Checkpoint as Checkpoint
from trust_tta.models.checkpoint import load_checkpoint as load_checkpoint
from trust_tta.models.config import VMambaConfig as VMambaConfig
from trust_tta.models.factory import list_models as list_models
from trust_tta.models.factory import load as load
from trust_tta.models.networks import Network as Network
from trust_tta.models.pretrained import PRETRAINED as PRETRAINED
from trust_tta.models.pretrained import Pretrained as Pretrained
from trust_tta.models.typed import create_model as create_model
from trust_tta.models.upernet import slide as slide
from trust_tta.models.vmamba import VMamba as VMamba

__all__: list[str]
