"""Test-time adaptation methods: each wraps a model, adapts on a batch and returns its logits."""

from trust_tta.optional import stub_exports

__getattr__, __dir__, __all__ = stub_exports(__name__, __file__)  # the names of __init__.pyi
