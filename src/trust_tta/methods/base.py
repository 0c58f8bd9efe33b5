"""What every method shares: a network over the caller's tensors, safe updates, state, reset and fork."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from trust_tta.errors import ConfigError, StateError, TrustError
from trust_tta.methods.checks import check_images
from trust_tta.methods.counters import Counters
from trust_tta.methods.flat import Flat
from trust_tta.methods.modes import check_count, check_number, learning
from trust_tta.methods.optimizers import load_optimizer, make_optimizer
from trust_tta.methods.parameters import share, use_batch_statistics
from trust_tta.methods.state import check_weights, clone
from trust_tta.orders import ScanOrder
from trust_tta.recording import Recorder

STATE_FORMAT = 3


class Method(nn.Module):
    """Adapt on a batch, then predict it. Subclasses say how in `adapt`.

    `probabilities`: the output is a distribution, not logits. `logits_before`: the prediction made before the
    last batch's update, where it came for free.
    """

    name: ClassVar[str]
    probabilities: ClassVar[bool] = False

    def __init__(
        self,
        model: nn.Module,
        *,
        adapted: Sequence[str] = (),
        lr: float = 1e-4,
        optimizer: str = "adam",
        steps: int = 1,
        episodic: bool = False,
        batch_statistics: bool = True,
    ) -> None:
        super().__init__()
        check_count("steps", steps)
        check_number("lr", lr)
        self._caller = [model]  # in a list, so that it is not a submodule
        self.model = share(model, adapted).eval()
        self.training = False
        self.batch_statistics = batch_statistics
        if batch_statistics:
            use_batch_statistics(self.model)
        self.lr, self.steps, self.episodic, self.optimizer_name = lr, steps, episodic, optimizer
        parameters = dict(self.model.named_parameters())
        self.adapted = {name: parameters[name] for name in adapted}
        self.source = {name: p.detach().clone() for name, p in self.adapted.items()}
        self.flat = Flat(list(self.adapted.values())) if self.adapted else None
        self.call = Recorder(self.model, list(self.adapted.values()))
        self.counters = Counters()
        self.logits_before: Tensor | None = None
        self.optimizer = self._make_optimizer()

    # What a subclass writes

    def adapt(self, images: Tensor) -> Tensor:
        """Adapt on images (n, c, h, w), then return their logits (n, classes)."""
        raise NotImplementedError

    def extra_state(self) -> dict[str, Any]:
        """Moving statistics beyond the weights and the optimiser, as tensors and plain values."""
        return {}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Take back what `extra_state` gave; an empty dict means: as at the start."""

    # What a caller uses

    def forward(self, images: Tensor) -> Tensor:
        """Adapt on the batch and predict it; on an error the state is as it was."""
        check_images(images, self.model)
        with learning(images), self._all_or_nothing():
            images = images.clone() if images.is_inference() else images.detach()
            if self.episodic:
                self.restore_source()
            self.logits_before = None
            logits = self.adapt(images).detach()
            self.counters.batches += 1
        return logits

    @torch.no_grad()
    def evaluate(self, images: Tensor) -> Tensor:
        """Logits (n, classes) of the state as it is: nothing is adapted or counted."""
        return cast(Tensor, self.model(images))

    def reset(self) -> None:
        """Back to the source, bit for bit: weights, optimiser, moving statistics, counters."""
        self.restore_source()
        self.counters = Counters()
        self.logits_before = None

    def detach(self) -> nn.Module:
        """The caller's network with the adapted weights, in the mode and with the flags it came with."""
        with torch.no_grad():  # the storage is the same unless the method was moved to another device or dtype
            for name, parameter in self.adapted.items():
                self._caller[0].get_parameter(name).copy_(parameter)
        return self._caller[0]

    @torch.inference_mode(False)
    def fork(self) -> Method:
        """An independent copy that goes on from here and shares the frozen weights."""
        memo: dict[int, Any] = {id(s): s for s in self.source.values()}
        for network in (self.model, self._caller[0]):
            memo |= {id(p): p for n, p in network.named_parameters() if n not in self.adapted}
            memo |= {id(b): b for b in network.buffers()}
        twin = copy.deepcopy(self, memo)
        for name, parameter in twin.adapted.items():
            twin._caller[0].get_parameter(name).data = parameter.data
        return twin

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Method:
        """As every module, when it is moved to another device or dtype; the vectors and the optimiser come along."""
        state = self._state_beside_weights()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.adapted:
            self.flat = Flat(list(self.adapted.values()))
            self.optimizer = self._make_optimizer()
        self._take_beside_weights(state)
        return self

    def train(self, mode: bool = True) -> Method:
        """Methods choose the modes of their network themselves; nothing changes."""
        return self

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """The whole adapted state, made of tensors and plain values: safe to save and to load weights-only."""
        return {
            "format": STATE_FORMAT,
            "method": self.name,
            "adapted": clone(self.adapted),
            **self._state_beside_weights(),
        }

    @torch.inference_mode(False)
    def load_state_dict(self, state: dict[str, Any]) -> None:  # type: ignore[override]
        """Go on where `state` was saved; refused whole if of another method, network, set of weights or optimiser."""
        given = (state.get("method"), state.get("format")) if isinstance(state, Mapping) else (type(state).__name__, "")
        if given != (self.name, STATE_FORMAT):
            raise StateError(
                f"this state is of method {given[0]!r}, format {given[1]!r}; "
                f"'{self.name}' takes format {STATE_FORMAT} of its own"
            )
        try:
            with self._all_or_nothing():
                self._take(state)
        except TrustError:
            raise
        except Exception as error:
            problem = f"{type(error).__name__}: {error}".splitlines()[0]
            raise StateError(
                f"this state does not fit this '{self.name}' ({problem}); was it made with the same options?"
            ) from error
        self.logits_before = None

    # What subclasses build on

    def predict(self, images: Tensor, *, order: ScanOrder | None = None, recorded: bool = True) -> Tensor:
        """One counted forward pass, in the given order or the network's own; not `recorded` where chance is in it."""
        self.counters.forwards += 1
        choose: Callable[[ScanOrder | None, int], Tensor] | None = getattr(self.model, "slots", None)
        if choose is None:
            if order is not None:
                raise ConfigError(
                    f"{type(self.model).__name__} has no traversal orders, and order={order} was asked for"
                )
            return self.call(images)
        slots = choose(order, len(images))
        return self.call(images, slots) if recorded else self.call.plain(images, slots)

    def update(self, loss: Tensor, *, start: Tensor | None = None) -> bool:
        """Descend `loss`; a loss or gradient that is not finite is skipped and counted, and False returned.

        With `start`, a snapshot, the step is taken from there, wherever the weights are now.
        """
        return self.settle([self.descend(loss, start=start)])[0]

    def descend(self, loss: Tensor, *, start: Tensor | None = None) -> Tensor:
        """As `update`, but nobody waits for the device, which itself leaves out a step; `settle` counts."""
        flat, optimizer = self._vector, cast(torch.optim.Optimizer, self.optimizer)
        finite = self._differentiate(loss)
        if start is None:
            flat.gather()
        else:
            flat.weights.copy_(start)
        flat.weights.grad = flat.gradient
        optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            flat.weights.grad = None
            del optimizer.found_inf  # type: ignore[attr-defined]
        flat.scatter()
        return finite

    def settle(self, finite: Sequence[Tensor]) -> list[bool]:
        """Wait for the device, count the updates that `descend` made and those that it refused."""
        made: list[bool] = torch.stack(list(finite)).tolist()
        self.counters.updates += sum(made)
        self.counters.skipped += len(made) - sum(made)
        return made

    def gradient(self, loss: Tensor) -> Tensor | None:
        """One counted backward pass; the gradient (n,) in the order of a snapshot, until the next pass.

        None, counted as skipped, where it or the loss is not finite.
        """
        if not bool(self._differentiate(loss)):
            self.counters.skipped += 1
            return None
        return self._vector.gradient

    def _differentiate(self, loss: Tensor) -> Tensor:
        """One counted backward pass; whether loss and gradient are finite is for the device to know."""
        flat = self._vector
        flat.gather_gradients(torch.autograd.grad(loss, flat.tensors, allow_unused=True))
        self.counters.backwards += 1
        largest: Tensor = torch.linalg.vector_norm(flat.gradient, float("inf"))
        return (largest + loss.detach()).isfinite()

    def snapshot(self) -> Tensor:
        """A copy of all adapted weights as one vector (n,)."""
        return self._vector.read()

    def load_snapshot(self, weights: Tensor) -> None:
        self._vector.write(weights)

    def layers(self, snapshot: Tensor) -> dict[str, Tensor]:
        """The weights of a snapshot (n,) by their names."""
        return dict(zip(self.adapted, self._vector.layers(snapshot), strict=True))

    @property
    def _vector(self) -> Flat:
        if self.flat is None:
            raise ConfigError(f"'{self.name}' adapts no weights, so that it has none to read, change or differentiate")
        return self.flat

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Undo everything when what is inside does not come to its end."""
        weights = self.flat.read() if self.flat else None
        state, logits_before = self._state_beside_weights(), self.logits_before
        try:
            yield
        except BaseException:
            if weights is not None:
                self.load_snapshot(weights)
            self._take_beside_weights(state)
            self.logits_before = logits_before
            raise

    def _take(self, state: Mapping[str, Any]) -> None:
        check_weights(state["adapted"], self.adapted, self.name)
        self._set_weights(state["adapted"])
        self._take_beside_weights(state)

    def _state_beside_weights(self) -> dict[str, Any]:
        return {
            "optimizer": clone(self.optimizer.state_dict()) if self.optimizer else None,
            "extra": clone(self.extra_state()),
            "counters": asdict(self.counters),
        }

    def _take_beside_weights(self, state: Mapping[str, Any]) -> None:
        if self.optimizer:
            load_optimizer(self.optimizer, state["optimizer"])
        self.load_extra_state(clone(state["extra"]))
        self.counters = Counters(**{f.name: state["counters"][f.name] for f in fields(Counters)})

    def _set_weights(self, weights: Mapping[str, Tensor]) -> None:
        if self.adapted:
            with torch.no_grad():
                torch._foreach_copy_(list(self.adapted.values()), [weights[n].to(p) for n, p in self.adapted.items()])

    @torch.inference_mode(False)
    def restore_source(self) -> None:
        """As `reset`, but the counters, and with them the random draws that follow from them, go on."""
        self._set_weights(self.source)
        self.optimizer = self._make_optimizer()
        self.load_extra_state({})

    def _make_optimizer(self) -> torch.optim.Optimizer | None:
        if self.flat is None:
            return None
        return make_optimizer(self.optimizer_name, self.flat.weights, lr=self.lr)
