"""Training from Python: `train` and `finetune`, the recipes they follow, and the data they learn from.

Loaded on first use, so that a recipe can be read and checked without waiting for PyTorch.
"""

from trust_tta.optional import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(  # typed in __init__.pyi
    __name__,
    {
        "TrainingData": "trust_tta.training.data",
        "open_training_data": "trust_tta.training.data",
        "FinetuneRecipe": "trust_tta.training.recipe",
        "SegmentationRecipe": "trust_tta.training.recipe",
        "TrainRecipe": "trust_tta.training.recipe",
        "recipe_for": "trust_tta.training.recipe",
        "Trained": "trust_tta.training.runs",
        "finetune": "trust_tta.training.runs",
        "train": "trust_tta.training.runs",
    },
)
