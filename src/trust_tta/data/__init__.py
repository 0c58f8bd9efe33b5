"""Data: opening, checking, fetching, streaming and corrupting.

The public names are imported when they are first used, so that corrupting and checking never wait for PyTorch.
"""

from trust_tta.optional import offer

__getattr__, __dir__, __all__ = offer(__name__)  # the names of the stub
