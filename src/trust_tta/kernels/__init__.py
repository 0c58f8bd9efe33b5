"""Layers on channel-last maps, by kernels of our own where they are faster than PyTorch's; for networks and methods."""

BACKENDS = ("auto", "triton", "cpu")  # a layer with another one is PyTorch's
