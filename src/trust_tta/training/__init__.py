"""Training from Python: `train` and `finetune`, the recipes they follow, and the data they learn from.

Loaded on first use, so that a recipe can be read and checked without waiting for PyTorch.
"""

from trust_tta.optional import stub_exports

__getattr__, __dir__, __all__ = stub_exports(__name__, __file__)  # the names of __init__.pyi
