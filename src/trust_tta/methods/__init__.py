"""Test-time adaptation methods: each wraps a model, adapts on a batch and returns its logits."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trust_tta.methods.ablations import Augmentation, Ensemble, Repetition
    from trust_tta.methods.base import Learner, LearningOptions, Method, MethodOptions
    from trust_tta.methods.clean import FisherWeights, SourceStatistics, gather_fisher, gather_source_statistics
    from trust_tta.methods.cotta import Cotta
    from trust_tta.methods.deyo import Deyo
    from trust_tta.methods.dpcore import Dpcore
    from trust_tta.methods.eta import Eata, Eta, Rdumb
    from trust_tta.methods.foa import Foa
    from trust_tta.methods.heads import Neo, T3a
    from trust_tta.methods.lame import Lame
    from trust_tta.methods.losses import entropy
    from trust_tta.methods.norms import BnAlpha, BnEma
    from trust_tta.methods.ranking import rank_orders
    from trust_tta.methods.registry import find_method, list_methods, method_options
    from trust_tta.methods.roid import Cmf, Roid
    from trust_tta.methods.rotta import Rotta
    from trust_tta.methods.sar import Sar
    from trust_tta.methods.shot import Shot
    from trust_tta.methods.source import BatchStatistics, Source
    from trust_tta.methods.state import Number
    from trust_tta.methods.tent import Tent
    from trust_tta.methods.tide import Tide
    from trust_tta.methods.trust import Trust, TrustNaive
    from trust_tta.methods.typed import create_method

__all__ = [
    "Augmentation",
    "BatchStatistics",
    "BnAlpha",
    "BnEma",
    "Cmf",
    "Cotta",
    "Deyo",
    "Dpcore",
    "Eata",
    "Ensemble",
    "Eta",
    "FisherWeights",
    "Foa",
    "Lame",
    "Learner",
    "LearningOptions",
    "Method",
    "MethodOptions",
    "Neo",
    "Number",
    "Rdumb",
    "Repetition",
    "Roid",
    "Rotta",
    "Sar",
    "Shot",
    "Source",
    "SourceStatistics",
    "T3a",
    "Tent",
    "Tide",
    "Trust",
    "TrustNaive",
    "create_method",
    "entropy",
    "find_method",
    "gather_fisher",
    "gather_source_statistics",
    "list_methods",
    "method_options",
    "rank_orders",
]

# Where the names above are that are no methods; loaded on first use, as the methods are.
_HOMES = {
    "FisherWeights": "clean",
    "Learner": "base",
    "LearningOptions": "base",
    "Method": "base",
    "MethodOptions": "base",
    "Number": "state",
    "SourceStatistics": "clean",
    "create_method": "registry",
    "entropy": "losses",
    "find_method": "registry",
    "gather_fisher": "clean",
    "gather_source_statistics": "clean",
    "list_methods": "registry",
    "method_options": "registry",
    "rank_orders": "ranking",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'trust_tta.methods' has no attribute {name!r}")
    from trust_tta.methods.registry import METHODS

    places = (place.partition(":") for place in METHODS.values())
    found = {attribute: module for module, _, attribute in places}
    return getattr(importlib.import_module(found.get(name) or f"trust_tta.methods.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
