"""Test-time adaptation methods: each wraps a model, adapts on a batch and returns its logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trust_tta.optional import offer

if TYPE_CHECKING:
    from trust_tta.methods.ablations import Augmentation as Augmentation
    from trust_tta.methods.ablations import Ensemble as Ensemble
    from trust_tta.methods.ablations import Repetition as Repetition
    from trust_tta.methods.base import Learner as Learner
    from trust_tta.methods.base import LearningOptions as LearningOptions
    from trust_tta.methods.base import Method as Method
    from trust_tta.methods.base import MethodOptions as MethodOptions
    from trust_tta.methods.clean import FisherWeights as FisherWeights
    from trust_tta.methods.clean import SourceStatistics as SourceStatistics
    from trust_tta.methods.clean import gather_fisher as gather_fisher
    from trust_tta.methods.clean import gather_source_statistics as gather_source_statistics
    from trust_tta.methods.cotta import Cotta as Cotta
    from trust_tta.methods.deyo import Deyo as Deyo
    from trust_tta.methods.dpcore import Dpcore as Dpcore
    from trust_tta.methods.eta import Eata as Eata
    from trust_tta.methods.eta import Eta as Eta
    from trust_tta.methods.eta import Rdumb as Rdumb
    from trust_tta.methods.foa import Foa as Foa
    from trust_tta.methods.heads import Neo as Neo
    from trust_tta.methods.heads import T3a as T3a
    from trust_tta.methods.lame import Lame as Lame
    from trust_tta.methods.losses import entropy as entropy
    from trust_tta.methods.norms import BnAlpha as BnAlpha
    from trust_tta.methods.norms import BnEma as BnEma
    from trust_tta.methods.ranking import rank_orders as rank_orders
    from trust_tta.methods.registry import find_method as find_method
    from trust_tta.methods.registry import list_methods as list_methods
    from trust_tta.methods.registry import method_options as method_options
    from trust_tta.methods.roid import Cmf as Cmf
    from trust_tta.methods.roid import Roid as Roid
    from trust_tta.methods.rotta import Rotta as Rotta
    from trust_tta.methods.sar import Sar as Sar
    from trust_tta.methods.shot import Shot as Shot
    from trust_tta.methods.source import BatchStatistics as BatchStatistics
    from trust_tta.methods.source import Source as Source
    from trust_tta.methods.state import Number as Number
    from trust_tta.methods.tent import Tent as Tent
    from trust_tta.methods.tide import Tide as Tide
    from trust_tta.methods.trust import Trust as Trust
    from trust_tta.methods.trust import TrustNaive as TrustNaive
    from trust_tta.methods.typed import create_method as create_method

__getattr__, __dir__, __all__ = offer(
    __name__,
    {
        "ablations": "Augmentation Ensemble Repetition",
        "base": "Learner LearningOptions Method MethodOptions",
        "clean": "FisherWeights SourceStatistics gather_fisher gather_source_statistics",
        "cotta": "Cotta",
        "deyo": "Deyo",
        "dpcore": "Dpcore",
        "eta": "Eata Eta Rdumb",
        "foa": "Foa",
        "heads": "Neo T3a",
        "lame": "Lame",
        "losses": "entropy",
        "norms": "BnAlpha BnEma",
        "ranking": "rank_orders",
        "registry": "create_method find_method list_methods method_options",
        "roid": "Cmf Roid",
        "rotta": "Rotta",
        "sar": "Sar",
        "shot": "Shot",
        "source": "BatchStatistics Source",
        "state": "Number",
        "tent": "Tent",
        "tide": "Tide",
        "trust": "Trust TrustNaive",
    },
)
