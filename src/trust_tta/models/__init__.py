"""Networks and their checkpoints: VMamba, its variants as data, and networks from outside the package."""

from trust_tta.optional import offer

__getattr__, __dir__, __all__ = offer(__name__)  # the names of the stub
