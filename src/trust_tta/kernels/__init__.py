"""Layers on channel-last maps, by kernels of our own on a GPU and by PyTorch elsewhere; for networks and methods."""

BACKENDS = ("auto", "triton")  # a layer with another one is PyTorch's

# Ways to a result that can be left out one by one, here or for a measurement: the plain way takes over.
USED = frozenset({"mlp"})  # mlp: narrow MLPs in one kernel
