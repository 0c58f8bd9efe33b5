"""Test-time adaptation methods: each wraps a model, adapts on a batch and returns its logits."""

from trust_tta.optional import offer

__getattr__, __dir__, __all__ = offer(__name__)  # the names of the stub
