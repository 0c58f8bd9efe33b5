"""Training from Python: `train` and `finetune`, the recipes they follow, and the data they learn from.

Loaded on first use, so that a recipe can be read and checked without waiting for PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trust_tta.optional import offer

if TYPE_CHECKING:
    from trust_tta.training.data import TrainingData as TrainingData
    from trust_tta.training.data import open_training_data as open_training_data
    from trust_tta.training.pixels import PixelTrainingData as PixelTrainingData
    from trust_tta.training.pixels import open_pixel_data as open_pixel_data
    from trust_tta.training.recipe import FinetuneRecipe as FinetuneRecipe
    from trust_tta.training.recipe import PixelRecipe as PixelRecipe
    from trust_tta.training.recipe import TrainRecipe as TrainRecipe
    from trust_tta.training.recipe import recipe_for as recipe_for
    from trust_tta.training.runs import Trained as Trained
    from trust_tta.training.runs import finetune as finetune
    from trust_tta.training.runs import train as train

__getattr__, __dir__, __all__ = offer(
    __name__,
    {
        "data": "TrainingData open_training_data",
        "pixels": "PixelTrainingData open_pixel_data",
        "recipe": "FinetuneRecipe PixelRecipe TrainRecipe recipe_for",
        "runs": "Trained finetune train",
    },
)
