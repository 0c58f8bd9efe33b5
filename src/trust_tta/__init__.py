"""Test-time adaptation of vision state-space models: VMamba, TRUST and its baselines."""

from trust_tta.optional import stub_exports

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = stub_exports(__name__, __file__)  # the names of __init__.pyi
