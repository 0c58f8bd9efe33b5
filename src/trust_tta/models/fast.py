"""`tt.fast`: prediction-only forward passes, by CUDA graphs on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from trust_tta.errors import ConfigError
from trust_tta.models.base import Orders
from trust_tta.ops.cuda_graphs import GraphedNetwork
from trust_tta.ops.linear import allowed_tf32
from trust_tta.preprocessing import network_input

MAX_PIXELS = 1 << 24  # of a batch for which model(images) captures a CUDA graph


class Fast(nn.Module):
    """Prediction-only wrapper of the network `model`: the same logits, no gradients.

    On a CUDA device, forward passes of this package's networks are captured as CUDA graphs from the second batch of a
    shape on, and replayed. In-place updates of weights take effect; other changes of the network (modules, tensors,
    backends) lead to a new capture. In training mode, with hooks, and where a capture fails, the network is called
    directly; so it is on a CPU. Calls are serialized between threads.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.training = False
        self._lock = threading.Lock()
        self._parts: list[nn.Module] = []
        self._children: list[Hashable] = []
        self._fingerprint: list[Any] = []
        self._graphed: GraphedNetwork | None = None

    @torch.no_grad()
    def forward(self, images: Any, order: Orders = None) -> Tensor:
        """Logits of images or pixels, as of `model(images, order=order)`."""
        images = network_input(self.model, images)
        choose = getattr(self.model, "scan_directions", None)
        if choose is None or images.dim() != 4:
            arguments = {} if order is None else {"order": order}
            return self.model(images, **arguments)
        directions = choose(order, len(images))
        logits = self.replay(images, directions)
        return self.model(images, directions=directions) if logits is None else logits

    def replay(self, images: Tensor, directions: Tensor) -> Tensor | None:
        """Replays a captured graph on images (n, ...); captures it on first use. None where it cannot be captured."""
        if not images.is_cuda:
            return None
        with self._lock:
            if not self._can_be_captured():
                return None
            if self._graphed is None:
                self._graphed = GraphedNetwork(self.model, ())
            return self._graphed(images, directions)

    def _can_be_captured(self) -> bool:
        """Whether the forward pass may be captured; drops graphs of a network that has changed."""
        children = [child for module in self._parts for child in module._modules.values()]
        if not self._parts or children != self._children:
            self._parts = [self.model, *list(self.model.modules())[1:]]  # the first may be a weak reference
            self._children = [child for module in self._parts for child in module._modules.values()]
        fingerprint: list[Any] = [*map(id, self._parts), *allowed_tf32(), torch.backends.cudnn.enabled]
        fingerprint.append(torch.are_deterministic_algorithms_enabled())
        for module in self._parts:
            if module.training or module._forward_hooks or module._forward_pre_hooks:
                return False
            for tensors in (module._parameters, module._buffers):
                fingerprint += [None if t is None else (t.data_ptr(), t.shape, t.dtype) for t in tensors.values()]
            fingerprint.append(module.__dict__.get("backend"))
        if fingerprint != self._fingerprint:
            self._fingerprint, self._graphed = fingerprint, None
        return True

    @property
    def preprocessing(self) -> Any:
        return getattr(self.model, "preprocessing", None)

    @property
    def classes(self) -> Any:
        return getattr(self.model, "classes", None)

    def train(self, mode: bool = True) -> Fast:
        """No effect: the wrapped network keeps its mode."""
        return self

    def __reduce__(self) -> tuple[type[Fast], tuple[nn.Module]]:
        """Copies and pickles hold neither CUDA graphs nor the lock."""
        return Fast, (self.model,)


def may_replay(images: Any) -> bool:
    """Whether model(images) may replay a CUDA graph: no gradients, no tracing, no tensor subclass or mode.

    Large batches keep the device busy anyway; their graphs would only take memory.
    """
    if type(images) is not Tensor or not images.is_cuda or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    if images.dim() != 4 or images[:, 0].numel() > MAX_PIXELS:
        return False
    watched = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
    return not watched and torch._C._functorch.peek_interpreter_stack() is None and not torch.jit._trace.is_tracing()


def fast(model: nn.Module) -> Fast:
    """Wrap a network for prediction only: the same logits, faster on a GPU.

    >>> import torch
    >>> from trust_tta import create_model
    >>> model = create_model("vmamba_nano", checkpoint="vmamba_nano_cifar10")
    >>> images = torch.zeros(2, 3, 32, 32)
    >>> bool((fast(model)(images) == model(images)).all())
    True
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"the model is a {type(model).__name__}; give a torch.nn.Module")
    if hasattr(model, "adapt") and hasattr(model, "reset"):
        raise ConfigError(
            f"{type(model).__name__} is a method, which is fast by itself; give the network, or call the method"
        )
    return model if isinstance(model, Fast) else Fast(model)
