"""The adapted weights as one vector, and the optimizer that moves it.

A few hundred small tensors cost a few hundred kernels per update, a vector costs one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from trust_tta.errors import ConfigError
from trust_tta.methods.state import Array, Spec, clone

MOST_STEPS = 2.0**24  # the optimizer counts its steps in float32
ALIGNED = 64  # bytes: kernels may compute otherwise, or not at all, where an address is no multiple of it


@dataclass(frozen=True)
class Descent:
    """The rule by which an optimizer moves the weights; `momentum` is also the decay of Adam's first moment."""

    optimizer: Literal["adam", "sgd"] = "adam"
    lr: float = 1e-4
    momentum: float = 0.9
    nesterov: bool = False


class Weights:
    """Named tensors with a vector (n,), at least float32, in which each element has its place.

    The tensors move into the vector, so that a change of one is a change of the other. Those that cannot, of another
    dtype or layout, and those that the caller has put elsewhere since, are copied before and after the vector is worked
    on. `moments` is what the optimizer remembers; it is all zero before the first step.
    """

    def __init__(self, tensors: Mapping[str, nn.Parameter], rule: Descent) -> None:
        self.named, self.rule = dict(tensors), rule
        self.source = {name: tensor.detach().clone() for name, tensor in self.named.items()}
        self._build(users=2)  # the caller's network has the same memory, and will follow

    def _build(self, *, users: int = 1) -> None:
        """Make the vector, and move in the tensors whose memory has no more than so many `users`."""
        self.tensors = list(self.named.values())
        dtype = reduce(torch.promote_types, (t.dtype for t in self.tensors), torch.float32)
        device = self.tensors[0].device if self.tensors else None
        self.vector = torch.zeros(sum(t.numel() for t in self.tensors), dtype=dtype, device=device)
        self.gradient = torch.zeros_like(self.vector)
        self.extra_gradient: Tensor | None = None
        self._places, self._gradient_places = self._views(self.vector), self._views(self.gradient)
        self._addresses = [place.data_ptr() for place in self._places]
        self._gather()
        for tensor, place in zip(self.tensors, self._places, strict=True):
            if _can_move(tensor, place, users):
                tensor.data = _own_storage(place)
        self._built_at = self._locate()
        self.optimizer = _make_optimizer(self.vector, self.rule) if self.tensors else None

    @property
    def origin(self) -> Tensor:
        """The weights of the beginning, (n,)."""
        return self.flatten(self.source.values())

    @property
    def moments(self) -> dict[str, Tensor]:
        """The optimizer's own tensors, by name."""
        return {} if self.optimizer is None else dict(self.optimizer.state[self.vector])

    def load_moments(self, moments: Mapping[str, Tensor]) -> None:
        _copy((moment, moments[name]) for name, moment in self.moments.items())

    def forget(self) -> None:
        """As before the first step."""
        for moment in self.moments.values():
            moment.zero_()

    def restore_source(self) -> None:
        """The weights of the beginning, bit for bit, and nothing remembered."""
        self.set_named(self.source)
        self.forget()

    def read(self) -> Tensor:
        """A copy (n,) of the tensors as they are now."""
        self._gather()
        return self.vector.clone()

    def write(self, vector: Tensor) -> None:
        """Give the tensors the values of a vector (n,)."""
        self.vector.copy_(vector)
        self._scatter()

    def set_named(self, values: Mapping[str, Tensor]) -> None:
        _copy((tensor, values[name]) for name, tensor in self.named.items())

    def flatten(self, values: Iterable[Tensor]) -> Tensor:
        """A new vector (n,) of values with the tensors' shapes."""
        return torch.cat([value.detach().reshape(-1).to(self.vector) for value in values])

    def by_name(self, vector: Tensor) -> dict[str, Tensor]:
        """Views of a vector (n,) with the tensors' names and shapes."""
        return dict(zip(self.named, self._views(vector), strict=True))

    def differentiate(self, loss: Tensor, *, extra: Tensor | None = None) -> Tensor:
        """Fill `gradient`, valid until the next pass; whether it and the loss are finite is for the device to know.

        `extra_gradient` is that of `extra`, which is not a weight; it must be finite as well.
        """
        self._require_weights()
        others = [] if extra is None else [extra]
        gradients = torch.autograd.grad(loss, [*self.tensors, *others], allow_unused=True)
        self.extra_gradient = None if extra is None else gradients[-1]
        gradients = gradients[: len(self.tensors)]
        pairs = [(place, g) for place, g in zip(self._gradient_places, gradients, strict=True) if g is not None]
        if len(pairs) < len(gradients):
            self.gradient.zero_()
        _copy(pairs)
        largest: Tensor = torch.linalg.vector_norm(self.gradient, float("inf"))
        finite = (largest + loss.detach()).isfinite()
        return finite if self.extra_gradient is None else finite & self.extra_gradient.isfinite().all()

    def step(self, finite: Tensor, *, start: Tensor | None = None) -> None:
        """One step along `gradient`, from the snapshot `start` or from where the weights are.

        The device itself skips the step where `finite` is false: nobody waits for it.
        """
        optimizer = self._require_weights()
        if start is None:
            self._gather()
        else:
            self.vector.copy_(start)
        self.vector.grad = self.gradient
        optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            self.vector.grad = None
            del optimizer.found_inf  # type: ignore[attr-defined]
        self._scatter()

    def moved(self) -> None:
        """Follow tensors that were moved to another device or dtype; the moments come along."""
        if self._locate() == self._built_at:
            return
        moments = self.moments
        self.source = {name: value.to(self.named[name].device) for name, value in self.source.items()}
        self._build()
        self.load_moments(moments)

    def state(self) -> dict[str, Any]:
        return {"adapted": clone(self.named), "optimizer": clone(self.moments)}

    def spec(self) -> dict[str, Spec]:
        moments: dict[str, Spec] = {name: _moment_spec(name, value) for name, value in self.moments.items()}
        return {"adapted": {name: Array.like(t) for name, t in self.named.items()}, "optimizer": moments}

    def vector_spec(self) -> Array:
        """What a vector (n,) of weights must be."""
        return Array.like(self.vector)

    def load(self, state: Mapping[str, Any]) -> None:
        self.set_named(state["adapted"])
        self.load_moments(state["optimizer"])

    def __getstate__(self) -> dict[str, Any]:
        """Views and optimizers do not survive a copy or a pickle: they are made anew."""
        kept = {name: getattr(self, name) for name in ("named", "rule", "source")}
        return {**kept, "moments": self.moments}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.named, self.rule, self.source = state["named"], state["rule"], state["source"]
        for tensor in self.named.values():
            tensor.data = tensor.data.clone()  # they may have come as shared memory
        self._build()
        self.load_moments(state["moments"])

    def _require_weights(self) -> torch.optim.Optimizer:
        if self.optimizer is None:
            raise ConfigError("this method adapts no weights, so that there is nothing to differentiate or update")
        return self.optimizer

    def _views(self, vector: Tensor) -> list[Tensor]:
        pieces = vector.split([t.numel() for t in self.tensors])
        return [piece.view(t.shape) for piece, t in zip(pieces, self.tensors, strict=True)]

    def _loose(self) -> list[tuple[Tensor, Tensor]]:
        """The tensors that do not lie in the vector, each with its place there."""
        if self._locate() == self._addresses and all(map(Tensor.is_contiguous, self.tensors)):
            return []
        found = zip(self.tensors, self._places, self._addresses, strict=True)
        return [(t, place) for t, place, address in found if t.data_ptr() != address or not t.is_contiguous()]

    def _locate(self) -> list[int]:
        return list(map(Tensor.data_ptr, self.tensors))

    def _gather(self) -> None:
        _copy((place, tensor) for tensor, place in self._loose())

    def _scatter(self) -> None:
        _copy(self._loose())
        torch.autograd.graph.increment_version(self.tensors)  # a backward that still needs the old ones will say so


def _can_move(tensor: Tensor, place: Tensor, users: int) -> bool:
    """Whether a tensor can leave its memory for a place: kernels find the same, and nobody is left behind there."""
    if (tensor.dtype, tensor.device, tensor.stride()) != (place.dtype, place.device, place.stride()):
        return False
    storage = tensor.untyped_storage()
    alone = storage.nbytes() == tensor.nbytes and torch._C._storage_Use_Count(storage._cdata) <= users + 1  # with ours
    if tensor.device.type == "cpu":  # PyTorch says of all CUDA memory that processes share it
        alone = alone and not storage.is_shared()
    return alone and tensor.device.type in ("cpu", "cuda") and place.data_ptr() % ALIGNED == 0


def _own_storage(place: Tensor) -> Tensor:
    """The same memory as a storage for itself: to save a view is to save all that it is a view of."""
    return from_dlpack(place.view(-1)).view(place.shape)


def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Give the first of each pair the values of the second."""
    if both := list(zip(*pairs, strict=True)):
        with torch.no_grad():
            torch._foreach_copy_(list(both[0]), list(both[1]))


def _make_optimizer(vector: Tensor, rule: Descent) -> torch.optim.Optimizer:
    """A fused one, which skips the step when found_inf is set; its state is there from the beginning."""
    if rule.optimizer == "adam":
        adam = torch.optim.Adam([vector], lr=rule.lr, betas=(rule.momentum, 0.999), fused=True)
        step = torch.zeros((), dtype=torch.float32, device=vector.device)
        moments = {"exp_avg": torch.zeros_like(vector), "exp_avg_sq": torch.zeros_like(vector)}
        adam.state[vector] = {"step": step, **moments}
        return adam
    sgd = torch.optim.SGD([vector], lr=rule.lr, momentum=rule.momentum, nesterov=rule.nesterov, fused=True)
    sgd.state[vector] = {"momentum_buffer": torch.zeros_like(vector)} if rule.momentum else {}
    return sgd


def _moment_spec(name: str, value: Tensor) -> Array:
    if name == "step":
        return Array.like(value, least=0, most=MOST_STEPS, whole=True)
    return Array.like(value, least=0) if name == "exp_avg_sq" else Array.like(value)
