"""Data: opening, checking, fetching, streaming and corrupting.

The public names are imported when they are first used, so that corrupting and checking never wait for PyTorch.
"""

from trust_tta.optional import stub_exports

__getattr__, __dir__, __all__ = stub_exports(__name__, __file__)  # the names of __init__.pyi
