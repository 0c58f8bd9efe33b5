from trust_tta.training.data import TrainingData as TrainingData
from trust_tta.training.data import open_training_data as open_training_data
from trust_tta.training.recipe import FinetuneRecipe as FinetuneRecipe
from trust_tta.training.recipe import SegmentationRecipe as SegmentationRecipe
from trust_tta.training.recipe import TrainRecipe as TrainRecipe
from trust_tta.training.recipe import recipe_for as recipe_for
from trust_tta.training.runs import Trained as Trained
from trust_tta.training.runs import finetune as finetune
from trust_tta.training.runs import train as train

__all__: list[str]
