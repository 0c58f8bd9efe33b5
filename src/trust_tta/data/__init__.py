"""Data: reading (`reading`), checking (`check`), fetching (`fetch`), streaming (`streams`), corrupting (`corruptions`).

The modules are imported one by one, so that corrupting and checking never wait for PyTorch.
"""
