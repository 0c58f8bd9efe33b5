"""Networks and their checkpoints: VMamba, its variants as data, and networks from outside the package."""

from trust_tta.optional import stub_exports

__getattr__, __dir__, __all__ = stub_exports(__name__, __file__)  # the names of __init__.pyi
