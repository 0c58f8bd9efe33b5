"""The adapted parameters as one flat vector, and the optimizer that updates it.

A few hundred small tensors cost a few hundred kernels per update; one vector costs one.
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

MAX_STEPS = 2.0**24  # the optimizer counts its steps in float32
ALIGNMENT = 64  # bytes: some kernels need, or are faster with, aligned addresses


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer's settings; `momentum` is also the decay of Adam's first moment."""

    optimizer: Literal["adam", "sgd"] = "adam"
    lr: float = 1e-4
    momentum: float = 0.9
    nesterov: bool = False


class FlatParameters:
    """Named parameters that share memory with one vector (n,) of at least float32.

    The parameters become views of the vector. Those that cannot (another dtype or layout), and those that the user has
    reallocated since, are copied into and out of the vector around each operation. `source_vector` (n,): the initial
    values. `optimizer_state`: the tensors that `torch.optim` keeps, by the same names; zero before the first step.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig) -> None:
        self.named, self.config = dict(parameters), config
        self._build(users=2)  # the user's network has the same memory, and is re-bound afterwards
        self.source_vector = self.vector.clone()

    def _build(self, *, users: int = 1) -> None:
        """Allocate the vector, and alias parameters whose memory has at most `users` users to it."""
        self.tensors = list(self.named.values())
        dtype = reduce(torch.promote_types, (t.dtype for t in self.tensors), torch.float32)
        device = self.tensors[0].device if self.tensors else None
        self.vector = torch.zeros(sum(t.numel() for t in self.tensors), dtype=dtype, device=device)
        self.gradient = torch.zeros_like(self.vector)
        self._views, self._gradient_views = self._split(self.vector), self._split(self.gradient)
        self._addresses = [view.data_ptr() for view in self._views]
        self._sync(to_vector=True)
        for tensor, view in zip(self.tensors, self._views, strict=True):
            if _can_alias(tensor, view, users):
                # A storage of its own over the same memory: saving a view would save the whole vector.
                tensor.data = from_dlpack(view.view(-1)).view(view.shape)
        self._built_at = [t.data_ptr() for t in self.tensors]
        self.optimizer_state: dict[str, Tensor] = {}
        if self.tensors and self.config.optimizer == "adam":
            self.optimizer_state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            self.optimizer_state["exp_avg"] = torch.zeros_like(self.vector)
            self.optimizer_state["exp_avg_sq"] = torch.zeros_like(self.vector)
        elif self.tensors and self.config.momentum:
            self.optimizer_state["momentum_buffer"] = torch.zeros_like(self.vector)

    @property
    def source(self) -> dict[str, Tensor]:
        """The initial values, by name."""
        return {name: value.to(self.named[name].dtype) for name, value in self.unflatten(self.source_vector).items()}

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        _copy((tensor, state[name]) for name, tensor in self.optimizer_state.items())

    def fade_optimizer_state(self, kept: Tensor | float) -> None:
        """Multiply the optimizer's moments and its number of steps by `kept` (); 0 resets it."""
        for name, tensor in self.optimizer_state.items():
            tensor.mul_(kept)
            if name == "step":
                tensor.round_()  # a whole number

    def restore_source(self) -> None:
        """Restore the initial parameters bit for bit, and reset the optimizer."""
        self.load(self.source_vector)
        for tensor in self.optimizer_state.values():
            tensor.zero_()

    def snapshot(self) -> Tensor:
        """A copy (n,) of the current parameters."""
        self._sync(to_vector=True)
        return self.vector.clone()

    def load(self, vector: Tensor) -> None:
        """Set the parameters to the values of a vector (n,)."""
        self.vector.copy_(vector)
        self._sync(to_vector=False)

    def flatten(self, values: Iterable[Tensor]) -> Tensor:
        """A new vector (n,) of values with the parameters' shapes."""
        return torch.cat([value.detach().reshape(-1).to(self.vector) for value in values])

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Views of a vector (n,) with the parameters' names and shapes."""
        return dict(zip(self.named, self._split(vector), strict=True))

    def backward(self, loss: Tensor) -> Tensor:
        """Fill `gradient`, valid until the next forward; whether it and the loss are finite, () bool on the device."""
        if not self.tensors:
            raise ConfigError("this method adapts no parameters, so there is nothing to differentiate or update")
        gradients = torch.autograd.grad(loss, self.tensors, allow_unused=True, materialize_grads=True)
        torch._foreach_copy_(self._gradient_views, gradients)
        return (torch.linalg.vector_norm(self.gradient, float("inf")) + loss.detach()).isfinite()

    @torch.no_grad()
    def step(self, finite: Tensor, *, start: Tensor | None = None) -> None:
        """One step of `torch.optim.Adam` or `SGD` along `gradient`, from the snapshot `start` or where the weights are.

        The device skips the step where `finite` () is false; no host synchronization. PyTorch's kernels are called
        without its classes, which import the compiler: seconds of every process.
        """
        if start is None:
            self._sync(to_vector=True)
        else:
            self.vector.copy_(start)
        state, config, skip = self.optimizer_state, self.config, (~finite).float()
        if config.optimizer == "adam":
            state["step"] += 1
            torch._fused_adam_(
                [self.vector], [self.gradient], [state["exp_avg"]], [state["exp_avg_sq"]], [], [state["step"]],
                lr=config.lr, beta1=config.momentum, beta2=0.999, weight_decay=0.0, eps=1e-8,
                amsgrad=False, maximize=False, found_inf=skip,
            )  # fmt: skip
            state["step"] -= skip
        else:
            torch._fused_sgd_(
                [self.vector], [self.gradient], list(state.values()),
                lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, weight_decay=0.0, dampening=0.0,
                maximize=False, is_first_step=False, found_inf=skip,
            )  # fmt: skip
        self._sync(to_vector=False)

    def rebuild_if_moved(self) -> None:
        """Rebuild the vector if the parameters were moved to another device or dtype; the optimizer keeps its state."""
        if [t.data_ptr() for t in self.tensors] == self._built_at:
            return
        state = self.optimizer_state
        self._build()
        self.source_vector = self.source_vector.to(self.vector)
        self.load_optimizer_state(state)

    def state_dict(self) -> dict[str, Any]:
        return {"adapted": clone(self.named), "optimizer": clone(self.optimizer_state)}

    def state_spec(self) -> dict[str, Spec]:
        limits: dict[str, dict[str, Any]] = {
            "step": {"least": 0, "most": MAX_STEPS, "whole": True},
            "exp_avg_sq": {"least": 0},
        }
        optimizer: dict[str, Spec] = {
            name: Array.like(value, **limits.get(name, {})) for name, value in self.optimizer_state.items()
        }
        return {"adapted": {name: Array.like(t) for name, t in self.named.items()}, "optimizer": optimizer}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _copy((tensor, state["adapted"][name]) for name, tensor in self.named.items())
        self.load_optimizer_state(state["optimizer"])

    def __getstate__(self) -> dict[str, Any]:
        """Without views of the vector, which copies and pickles rebuild."""
        return {name: getattr(self, name) for name in ("named", "config", "source_vector", "optimizer_state")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.named, self.config = state["named"], state["config"]
        for tensor in self.named.values():
            tensor.data = tensor.data.clone()  # it may have come as shared memory
        self._build()
        self.source_vector = state["source_vector"].to(self.vector)
        self.load_optimizer_state(state["optimizer_state"])

    def _split(self, vector: Tensor) -> list[Tensor]:
        pieces = vector.split([t.numel() for t in self.tensors])
        return [piece.view(t.shape) for piece, t in zip(pieces, self.tensors, strict=True)]

    def _sync(self, *, to_vector: bool) -> None:
        """Copy the parameters that are not views of the vector into it, or out of it."""
        addresses = [t.data_ptr() for t in self.tensors]
        if addresses != self._addresses or not all(map(Tensor.is_contiguous, self.tensors)):
            rows = zip(self.tensors, self._views, addresses, self._addresses, strict=True)
            outside = [(t, view) for t, view, now, aliased in rows if now != aliased or not t.is_contiguous()]
            _copy((view, tensor) if to_vector else (tensor, view) for tensor, view in outside)
        if not to_vector:  # a pending backward over the old values will be refused
            torch.autograd.graph.increment_version(self.tensors)


def _can_alias(tensor: Tensor, view: Tensor, users: int) -> bool:
    """Whether a tensor can move to `view`: same layout, aligned, and no other tensor uses its present memory."""
    if (tensor.dtype, tensor.device, tensor.stride()) != (view.dtype, view.device, view.stride()):
        return False
    storage = tensor.untyped_storage()
    alone = storage.nbytes() == tensor.nbytes and torch._C._storage_Use_Count(storage._cdata) <= users + 1  # with ours
    if tensor.device.type == "cpu":  # PyTorch reports all CUDA memory as shared between processes
        alone = alone and not storage.is_shared()
    return alone and tensor.device.type in ("cpu", "cuda") and view.data_ptr() % ALIGNMENT == 0


def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair into the first."""
    if both := list(zip(*pairs, strict=True)):
        with torch.no_grad():
            torch._foreach_copy_(list(both[0]), list(both[1]))
