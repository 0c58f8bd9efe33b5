"""`create_method`, whose options the stub next to it declares for editors and mypy."""

from trust_tta.methods.registry import create_method as create_method
