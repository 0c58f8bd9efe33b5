__version__: str
from trust_tta import models as models
from trust_tta.data.corruptions.apply import corrupt as corrupt
from trust_tta.errors import TrustError as TrustError
from trust_tta.live.guard import Guard as Guard
from trust_tta.live.stream import Stream as Stream
from trust_tta.methods.base import Method as Method
from trust_tta.methods.ranking import rank_orders as rank_orders
from trust_tta.methods.registry import list_methods as list_methods
from trust_tta.methods.typed import create_method as create_method
from trust_tta.models.checkpoint import load_checkpoint as load_checkpoint
from trust_tta.models.config import VMambaConfig as VMambaConfig
from trust_tta.models.factory import list_models as list_models
from trust_tta.models.factory import load as load
from trust_tta.models.fast import fast as fast
from trust_tta.models.typed import create_model as create_model
from trust_tta.models.vmamba import VMamba as VMamba
from trust_tta.ops.functional import selective_scan as selective_scan
from trust_tta.orders import ScanOrder as ScanOrder

__all__: list[str]
