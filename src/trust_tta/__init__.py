"""Test-time adaptation of vision state-space models: VMamba, TRUST and its baselines."""

from trust_tta.optional import offer

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = offer(__name__)  # the names of the stub
