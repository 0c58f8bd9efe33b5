"""Layers on channel-last maps, by kernels of our own on a GPU and by PyTorch elsewhere; for networks and methods."""

BACKENDS = ("auto", "triton")  # a layer with another one is PyTorch's
