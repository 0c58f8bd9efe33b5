"""The adapted weights as one vector, and the optimizer that moves it.

A few hundred small tensors cost a few hundred kernels per update, a vector costs one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trust_tta.errors import ConfigError
from trust_tta.methods.state import Array, Spec, clone

MOST_STEPS = 2.0**24  # the optimizer counts its steps in float32


@dataclass(frozen=True)
class Descent:
    """The rule by which an optimizer moves the weights; `momentum` is also the decay of Adam's first moment."""

    optimizer: Literal["adam", "sgd"] = "adam"
    lr: float = 1e-4
    momentum: float = 0.9
    nesterov: bool = False


class Weights:
    """Named tensors with a vector (n,), at least float32, in which each element has its place.

    The tensors stay where they are: the vector is filled from them, worked on, and written back. `moments` is what
    the optimizer remembers; it is all zero before the first step.
    """

    def __init__(self, tensors: Mapping[str, nn.Parameter], rule: Descent) -> None:
        self.named, self.rule = dict(tensors), rule
        self.source = {name: tensor.detach().clone() for name, tensor in self.named.items()}
        self._build()

    def _build(self) -> None:
        self.tensors = list(self.named.values())
        dtype = reduce(torch.promote_types, (t.dtype for t in self.tensors), torch.float32)
        device = self.tensors[0].device if self.tensors else None
        self.vector = torch.zeros(sum(t.numel() for t in self.tensors), dtype=dtype, device=device)
        self.gradient = torch.zeros_like(self.vector)
        self.extra_gradient: Tensor | None = None
        self._places, self._gradient_places = self._views(self.vector), self._views(self.gradient)
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
        _copy(list(self.moments.values()), [moments[name] for name in self.moments])

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

    def after_step(self) -> Tensor:
        """As `read`, when the last change was a step: the vector, in the same dtype, still has them."""
        if any(t.dtype != self.vector.dtype for t in self.tensors):
            return self.read()
        return self.vector.clone()

    def write(self, vector: Tensor) -> None:
        """Give the tensors the values of a vector (n,)."""
        self.vector.copy_(vector)
        self._scatter()

    def set_named(self, values: Mapping[str, Tensor]) -> None:
        _copy(self.tensors, [values[name] for name in self.named])

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
        if pairs:
            places, given = zip(*pairs, strict=True)
            torch._foreach_copy_(list(places), list(given))
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
        self._build()
        self.load_moments(state["moments"])

    def _require_weights(self) -> torch.optim.Optimizer:
        if self.optimizer is None:
            raise ConfigError("this method adapts no weights, so that there is nothing to differentiate or update")
        return self.optimizer

    def _views(self, vector: Tensor) -> list[Tensor]:
        pieces = vector.split([t.numel() for t in self.tensors])
        return [piece.view(t.shape) for piece, t in zip(pieces, self.tensors, strict=True)]

    def _gather(self) -> None:
        _copy(self._places, [t.detach() for t in self.tensors])

    def _scatter(self) -> None:
        _copy(self.tensors, self._places)


def _copy(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    if targets:
        with torch.no_grad():
            torch._foreach_copy_(list(targets), list(values))


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
