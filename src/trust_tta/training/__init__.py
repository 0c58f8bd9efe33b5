"""Training from Python: `train` and `finetune`, the recipes they follow, and the data they learn from.

Loaded on first use, so that a recipe can be read and checked without waiting for PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trust_tta.training.data import TrainingData, open_training_data
    from trust_tta.training.pixels import PixelTrainingData, open_pixel_data
    from trust_tta.training.recipe import FinetuneRecipe, PixelRecipe, TrainRecipe, recipe_for
    from trust_tta.training.runs import Trained, finetune, train

__all__ = [
    "FinetuneRecipe",
    "PixelRecipe",
    "PixelTrainingData",
    "TrainRecipe",
    "Trained",
    "TrainingData",
    "finetune",
    "open_pixel_data",
    "open_training_data",
    "recipe_for",
    "train",
]

_MODULES = {
    "data": ("TrainingData", "open_training_data"),
    "pixels": ("PixelTrainingData", "open_pixel_data"),
    "recipe": ("FinetuneRecipe", "PixelRecipe", "TrainRecipe", "recipe_for"),
    "runs": ("Trained", "finetune", "train"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'trust_tta.training' has no attribute {name!r}")
    return getattr(importlib.import_module(f"trust_tta.training.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
