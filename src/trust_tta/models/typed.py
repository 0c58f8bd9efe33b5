"""`create_model`, whose names and networks the stub next to it declares for editors and mypy."""

from trust_tta.models.factory import create_model as create_model
