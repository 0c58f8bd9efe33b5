"""`create_method` with the options of every method. Written by `make typed`: do not edit."""

from collections.abc import Sequence
from typing import Any, Literal, TypedDict, TypeVar, Unpack, overload

from torch import nn

from trust_tta.methods.ablations import Augmentation, Ensemble, Repetition
from trust_tta.methods.base import Method
from trust_tta.methods.cotta import Cotta
from trust_tta.methods.deyo import Deyo
from trust_tta.methods.dpcore import Dpcore
from trust_tta.methods.eta import Eata, Eta, Rdumb
from trust_tta.methods.foa import Foa
from trust_tta.methods.lame import Lame
from trust_tta.methods.neo import Neo
from trust_tta.methods.norms import BnAlpha, BnEma
from trust_tta.methods.roid import Cmf, Roid
from trust_tta.methods.rotta import Rotta
from trust_tta.methods.sar import Sar
from trust_tta.methods.shot import Shot
from trust_tta.methods.source import BatchStatistics, Source
from trust_tta.methods.source_data import FisherWeights, SourceStatistics
from trust_tta.methods.t3a import T3a
from trust_tta.methods.tent import Tent
from trust_tta.methods.tide.method import Tide
from trust_tta.methods.trust import Trust, TrustNaive
from trust_tta.orders import OrderLike

_M = TypeVar("_M", bound=Method)

class _MethodKeywords(TypedDict, total=False):
    statistics: Literal["batch", "stream", "source"]
    predict: Literal["before", "after"]

class _SourceKeywords(_MethodKeywords, total=False): ...

class _LearningKeywords(_MethodKeywords, total=False):
    lr: float
    steps: int
    episodic: bool
    optimizer: Literal["adam", "sgd"]
    momentum: float
    nesterov: bool
    parameters: Literal["auto", "ss2d", "scan", "bn", "all"]
    stochastic_depth: bool

class _TentKeywords(_LearningKeywords, total=False):
    entropy: Literal["softmax", "come"]

class _EtaKeywords(_LearningKeywords, total=False):
    margin: float
    d_margin: float | None
    weighting: bool
    entropy: Literal["softmax", "come"]

class _SarKeywords(_LearningKeywords, total=False):
    rho: float
    margin: float
    reset_threshold: float
    skip_last: bool
    entropy: Literal["softmax", "come"]

class _ShotKeywords(_LearningKeywords, total=False):
    beta: float
    confidence: float

class _LameKeywords(_MethodKeywords, total=False):
    affinity: Literal["rbf", "knn", "linear"]
    k: int
    strength: float
    iterations: int
    force_symmetry: bool

class _FoaKeywords(_MethodKeywords, total=False):
    source_statistics: SourceStatistics | None
    prompts: int
    population: int
    sigma: float
    weight: float
    seed: int
    fitness: Literal["unshifted", "shifted"]
    initial: Literal["random", "zero"]
    episodic: bool

class _NaiveKeywords(_LearningKeywords, total=False):
    loss: Literal["labels", "confusion"]

class _OrderKeywords(_LearningKeywords, total=False):
    orders: Sequence[OrderLike | tuple[OrderLike, float]] | None
    k: int

class _TrustKeywords(_OrderKeywords, total=False):
    mode: Literal["sequential", "replicate", "split"]
    split_statistics: Literal["part", "batch"]
    merge: Literal["mean", "entropy", "slerp", "slerp_released"]
    evaluate_order: OrderLike
    loss: Literal["labels", "confusion"]
    views: Literal["none", "mirror"]

class _RepetitionKeywords(_LearningKeywords, total=False):
    k: int

class _AugmentationKeywords(_RepetitionKeywords, total=False):
    kind: Literal["rotation", "crop", "jitter"]
    strength: float
    per: Literal["view", "batch"]
    orders: Sequence[OrderLike | tuple[OrderLike, float]] | None
    seed: int

class _TideKeywords(_LearningKeywords, total=False):
    source_mixing: bool
    domain_clusters: bool
    views: Literal["mirror", "none"]
    source_decay: float
    correct_prior: bool
    step_scaling: bool

class _OfficialKeywords(_EtaKeywords, total=False): ...

class _EataKeywords(_OfficialKeywords, total=False):
    fisher: FisherWeights | None
    fisher_alpha: float

class _WeightedKeywords(_LearningKeywords, total=False):
    temperature: float
    momentum_probs: float
    batch_size: int | None
    seed: int

class _RoidKeywords(_WeightedKeywords, total=False):
    momentum_src: float

class _CmfKeywords(_WeightedKeywords, total=False):
    alpha: float
    gamma: float
    q: float

class _CottaKeywords(_LearningKeywords, total=False):
    head: bool
    decay: float
    restore: float
    threshold: float
    augmentations: int
    symmetric: bool
    seed: int

class _RottaKeywords(_LearningKeywords, total=False):
    alpha: float
    nu: float
    memory_size: int
    update_frequency: int
    lambda_t: float
    lambda_u: float
    seed: int

class _DeyoKeywords(_LearningKeywords, total=False):
    margin: float
    weight_margin: float
    plpd: float
    destroy: Literal["patch", "occlusion", "pixel"]
    patches: int
    row: int | None
    column: int | None
    size: int | None
    skip_last: bool
    seed: int

class _RdumbKeywords(_OfficialKeywords, total=False):
    reset_every: int

class _NeoKeywords(_MethodKeywords, total=False):
    alpha: float | None

class _T3aKeywords(_MethodKeywords, total=False):
    supports: int

class _DpcoreKeywords(_MethodKeywords, total=False):
    source_statistics: SourceStatistics | None
    prompts: int
    seed: int
    lr: float
    weight_decay: float
    steps: int
    new_steps: int
    rho: float
    tau: float
    alpha: float
    episodic: bool

class _BnAlphaKeywords(_MethodKeywords, total=False):
    alpha: float

class _BnEmaKeywords(_MethodKeywords, total=False):
    momentum: float | None

@overload
def create_method(name: Literal["source"], model: nn.Module, **options: Unpack[_SourceKeywords]) -> Source: ...
@overload
def create_method(name: Literal["bn"], model: nn.Module, **options: Unpack[_MethodKeywords]) -> BatchStatistics: ...
@overload
def create_method(name: Literal["tent"], model: nn.Module, **options: Unpack[_TentKeywords]) -> Tent: ...
@overload
def create_method(name: Literal["eta"], model: nn.Module, **options: Unpack[_EtaKeywords]) -> Eta: ...
@overload
def create_method(name: Literal["sar"], model: nn.Module, **options: Unpack[_SarKeywords]) -> Sar: ...
@overload
def create_method(name: Literal["shot"], model: nn.Module, **options: Unpack[_ShotKeywords]) -> Shot: ...
@overload
def create_method(name: Literal["lame"], model: nn.Module, **options: Unpack[_LameKeywords]) -> Lame: ...
@overload
def create_method(name: Literal["foa"], model: nn.Module, **options: Unpack[_FoaKeywords]) -> Foa: ...
@overload
def create_method(name: Literal["trust_naive"], model: nn.Module, **options: Unpack[_NaiveKeywords]) -> TrustNaive: ...
@overload
def create_method(name: Literal["trust"], model: nn.Module, **options: Unpack[_TrustKeywords]) -> Trust: ...
@overload
def create_method(name: Literal["ensemble"], model: nn.Module, **options: Unpack[_OrderKeywords]) -> Ensemble: ...
@overload
def create_method(
    name: Literal["repetition"], model: nn.Module, **options: Unpack[_RepetitionKeywords]
) -> Repetition: ...
@overload
def create_method(
    name: Literal["augmentation"], model: nn.Module, **options: Unpack[_AugmentationKeywords]
) -> Augmentation: ...
@overload
def create_method(name: Literal["tide"], model: nn.Module, **options: Unpack[_TideKeywords]) -> Tide: ...
@overload
def create_method(name: Literal["eata"], model: nn.Module, **options: Unpack[_EataKeywords]) -> Eata: ...
@overload
def create_method(name: Literal["roid"], model: nn.Module, **options: Unpack[_RoidKeywords]) -> Roid: ...
@overload
def create_method(name: Literal["cmf"], model: nn.Module, **options: Unpack[_CmfKeywords]) -> Cmf: ...
@overload
def create_method(name: Literal["cotta"], model: nn.Module, **options: Unpack[_CottaKeywords]) -> Cotta: ...
@overload
def create_method(name: Literal["rotta"], model: nn.Module, **options: Unpack[_RottaKeywords]) -> Rotta: ...
@overload
def create_method(name: Literal["deyo"], model: nn.Module, **options: Unpack[_DeyoKeywords]) -> Deyo: ...
@overload
def create_method(name: Literal["rdumb"], model: nn.Module, **options: Unpack[_RdumbKeywords]) -> Rdumb: ...
@overload
def create_method(name: Literal["neo"], model: nn.Module, **options: Unpack[_NeoKeywords]) -> Neo: ...
@overload
def create_method(name: Literal["t3a"], model: nn.Module, **options: Unpack[_T3aKeywords]) -> T3a: ...
@overload
def create_method(name: Literal["dpcore"], model: nn.Module, **options: Unpack[_DpcoreKeywords]) -> Dpcore: ...
@overload
def create_method(name: Literal["bn_alpha"], model: nn.Module, **options: Unpack[_BnAlphaKeywords]) -> BnAlpha: ...
@overload
def create_method(name: Literal["bn_ema"], model: nn.Module, **options: Unpack[_BnEmaKeywords]) -> BnEma: ...
@overload
def create_method(name: type[_M], model: nn.Module, **options: Any) -> _M: ...
@overload
def create_method(name: str, model: nn.Module) -> Method: ...
