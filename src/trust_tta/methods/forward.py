"""The forward pass of a network: traversal order, coarse segmentation logits, CUDA graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from trust_tta.errors import ConfigError, ShapeError, TrustWarning, users_level
from trust_tta.ops.cuda_graphs import GraphedNetwork
from trust_tta.ops.segmentation_logits import CoarseLogits, Logits
from trust_tta.orders import OrderLike

_global_rng = Lock()  # PyTorch's random generator is shared by all threads


class NetworkForward:
    """Images (n, c, h, w) to logits, replayed as a CUDA graph where the device and the network allow it.

    Networks with `forward_coarse` give `CoarseLogits`. `parameters`: those that need gradients. `cache_stem`: see
    `GraphedNetwork`.
    """

    def __init__(self, network: nn.Module, parameters: Sequence[Tensor] = (), *, cache_stem: bool = False) -> None:
        self.network = network
        self.coarse = hasattr(network, "forward_coarse")
        called = CoarseNetwork(network) if self.coarse else network
        self.graphed = GraphedNetwork(called, parameters, cache_stem=cache_stem)
        self.gives_probabilities: Tensor | None = None  # () bool on the device, of the first output
        self.output_checked = False

    def __call__(self, images: Tensor, order: OrderLike | None = None, *, capture: bool = True) -> Logits:
        """Logits in the given traversal order, or the network's own; `capture=False` never uses a CUDA graph."""
        directions: Tensor | None = None
        choose: Callable[[OrderLike | None, int], Tensor] | None = getattr(self.network, "scan_directions", None)
        if choose is not None:
            directions = choose(order, len(images))
        elif order is not None:
            raise ConfigError(f"{type(self.network).__name__} has no traversal orders, and order={order} was asked for")
        logits = take_logits(self.network, self.graphed(images, directions, capture=capture))
        if self.gives_probabilities is None:
            values = logits.detach().float()
            self.gives_probabilities = (values >= 0).all() & ((values.sum(1) - 1).abs() < 0.01).all()
        return CoarseLogits(logits, (images.shape[2], images.shape[3])) if self.coarse else logits

    def check_first_output(self) -> None:
        """Warn once where the network returns probabilities (n, classes, ...); the host waits for the first output."""
        if self.gives_probabilities is None:
            return
        self.output_checked = True
        if bool(self.gives_probabilities):
            warnings.warn(
                f"{type(self.network).__name__} returned probabilities; methods take logits and apply a softmax of "
                "their own: remove the network's",
                TrustWarning,
                stacklevel=users_level(),
            )


def take_logits(network: nn.Module, output: Any) -> Tensor:
    """The logits in a network's output; where it is a dict or a tuple, `network.output_key` says which entry."""
    key = getattr(network, "output_key", None)
    if key is not None:
        try:
            output = _entry(output, key)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{type(network).__name__} has output_key={key!r}, but its output is {_kind(output)}; set it to the "
                "key, field or index of the logits, or remove it where the output is a tensor"
            ) from error
    if not isinstance(output, Tensor):
        raise ConfigError(
            f"{type(network).__name__} returned {_kind(output)}; set model.output_key to the key, field or index of "
            "the logits, as model.output_key = 'logits'"
        )
    if output.dim() not in (2, 4):
        raise ShapeError(
            f"{type(network).__name__} returned shape {tuple(output.shape)}; logits (n, classes) or (n, classes, h, w) "
            "are wanted"
        )
    if output.shape[1] < 2:
        raise ShapeError(
            f"{type(network).__name__} returned one output z for each image; methods need the logits of two classes or "
            "more: return torch.cat([torch.zeros_like(z), z], 1) where z is the input of a sigmoid"
        )
    return output


def _entry(output: Any, key: Any) -> Any:
    """The entry of a mapping or a sequence, or the field of an object."""
    try:
        return output[key]
    except TypeError:
        return getattr(output, key)


def _kind(output: Any) -> str:
    name = type(output).__name__
    if isinstance(output, Mapping):
        return f"a {name} with the keys {', '.join(map(repr, output))}"
    names = [field.name for field in fields(output)] if is_dataclass(output) else getattr(output, "_fields", ())
    if names:
        return f"an object of the class {name} with the fields {', '.join(map(repr, names))}"
    if isinstance(output, tuple | list):
        return f"a {name} of {len(output)} entries"
    return "None" if output is None else f"an object of the class {name}"


class CoarseNetwork(nn.Module):
    """A segmentation network up to the logits of its head: images (n, c, h, w) -> (n, classes, h', w')."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, **order: Any) -> Tensor:
        return self.network.forward_coarse(images, **order)


@contextmanager
def stochastic_depth_on(model: nn.Module, *, seed: int) -> Iterator[None]:
    """Enable stochastic depth, drawn from `seed`; the caller's random generator is not advanced."""
    switch = getattr(model, "set_stochastic_depth", None)
    if switch is None:
        raise ConfigError(f"{type(model).__name__} has no stochastic depth; set stochastic_depth=False")
    switch(True)
    try:
        with _global_rng, torch.random.fork_rng():
            torch.manual_seed(seed)
            yield
    finally:
        switch(False)
