"""Test-time adaptation methods: each wraps a model, adapts on a batch and returns its logits."""
