"""What every method shares: options, a network over the caller's tensors, state, reset and fork.

The work is done by parts: `Weights` (the adapted weights and their optimizer), `Statistics` (those of the BatchNorms),
`Recorder` (passes as CUDA graphs), `saving` (what is remembered, and what of it is accepted), `safety` (what a batch
may be).
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn

from trust_tta.bands import Logits, Pixels, whole
from trust_tta.errors import ConfigError, DataError
from trust_tta.methods import saving
from trust_tta.methods.parameters import ParameterSet, select, share
from trust_tta.methods.safety import (
    FewImages,
    adapting,
    check_images,
    check_outputs,
    stochastic_depth_on,
    uncompiled,
)
from trust_tta.methods.saving import Counters
from trust_tta.methods.state import Spec
from trust_tta.methods.statistics import Statistics, StatisticsKind
from trust_tta.methods.weights import Descent, Weights
from trust_tta.orders import OrderLike
from trust_tta.preprocessing import network_input
from trust_tta.recording import Recorder
from trust_tta.schema import Count, Fraction, Rate, Schema, show


class MethodOptions(Schema):
    """What every method can be asked.

    `statistics`: which statistics the BatchNorms take. `predict`: the logits returned are of the adapting pass, the
    last step's where there are several, or of one more pass after the update.
    """

    statistics: StatisticsKind = "batch"
    predict: Literal["before", "after"] = "after"


class LearningOptions(MethodOptions):
    """Of methods that move weights by gradients; `momentum` and `nesterov` are SGD's."""

    lr: Rate = 1e-4
    steps: Count = 1
    episodic: bool = False
    optimizer: Literal["adam", "sgd"] = "adam"
    momentum: Fraction = 0.9
    nesterov: bool = False
    parameters: ParameterSet = "bn"
    stochastic_depth: bool = False

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> Self:
        if self.nesterov and (self.optimizer != "sgd" or self.momentum == 0):
            raise ValueError("nesterov=True goes with optimizer='sgd' and a momentum above 0; omit it")
        return self

    def rule(self) -> Descent:
        return Descent(self.optimizer, self.lr, self.momentum, self.nesterov)


class Method(nn.Module):
    """Adapt on a batch, then predict it. Subclasses say how in `adapt`.

    `probabilities`: the output is a distribution, not logits. `pooled`: what of `moving` tells of the domain, not of
    the stream, as sums over images that total one each: fleets pool it. `worth`: images for which each one stands in
    statistics and sums, where others see the rest of the stream. `logits_before`: the prediction made before the last
    batch's update, where it came for free. One method may serve several threads: calls take turns.
    """

    name: ClassVar[str]
    Options: ClassVar[type[MethodOptions]] = MethodOptions
    probabilities: ClassVar[bool] = False
    pooled: ClassVar[tuple[str, ...]] = ()
    options: MethodOptions

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.name = cls.__dict__.get("name", cls.__name__.lower())

    def __init__(self, model: nn.Module, options: MethodOptions | None = None) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise ConfigError(f"the model is a {type(model).__name__}; give a torch.nn.Module")
        self.options = self.Options() if options is None else options
        if not isinstance(self.options, self.Options):
            raise ConfigError(f"the options of '{self.name}' are {show(options)}; give a {self.Options.__name__}")
        network: nn.Module = getattr(model, "_orig_mod", model)  # passes are not those that torch.compile made
        self._caller = [model, network]  # in a list, so that it is not a submodule
        with torch.inference_mode(False):  # what is made here must be able to learn
            names = self.adapted_names(network)
            self.model = share(network, names)
            parameters = dict(self.model.named_parameters())
            rule = self.options.rule() if isinstance(self.options, LearningOptions) else Descent()
            self.weights = Weights({name: parameters[name] for name in names}, rule)
            self.statistics = self.make_statistics()
        self.counters = Counters()
        self.worth = 1
        self.coarse_before: Logits | None = None
        self.training, self._few = False, FewImages()
        self._connect()
        self.start()

    # What a subclass writes

    def adapt(self, images: Tensor) -> Logits:
        """Adapt on images (n, c, h, w), then return their logits (n, classes)."""
        raise NotImplementedError

    def infer(self, images: Tensor) -> Logits:
        """Logits (n, classes) of the state as it is; `evaluate` sees to it that nothing moves."""
        return self.frozen_coarse(images)

    def adapted_names(self, model: nn.Module) -> list[str]:
        """The parameters that the method moves; refused where the network lacks what the method needs."""
        del model
        return []

    def make_statistics(self) -> Statistics:
        """What the BatchNorms of `self.model` normalize with; called after the weights are chosen."""
        return Statistics(self.model, self.options.statistics, observing_without_grad=not self.adapted)

    def start(self) -> None:
        """Set what moves besides weights and statistics to its initial value; called at every return to the source."""

    def moving(self) -> dict[str, Spec]:
        """Names of the attributes that move besides weights and statistics, and what each holds unless it is None."""
        return {}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a state for what its parts do not show one by one; called when each is what `moving` says."""

    # What a subclass builds on

    def predict(
        self,
        images: Tensor,
        *,
        order: OrderLike | None = None,
        stochastic_depth: bool = False,
        recorded: bool = True,
    ) -> Tensor:
        """One counted forward pass, in the given order or the network's own; not `recorded` where it is changed."""
        return whole(self.predict_coarse(images, order=order, stochastic_depth=stochastic_depth, recorded=recorded))

    def predict_coarse(
        self,
        images: Tensor,
        *,
        order: OrderLike | None = None,
        stochastic_depth: bool = False,
        recorded: bool = True,
    ) -> Logits:
        """As `predict`; the logits of pixels are `Pixels`, for losses in bands."""
        self.counters.forwards += 1
        slots = self.slots_of(images, order)
        if not stochastic_depth:
            recorded = recorded and not self.statistics.mixed  # another way through the norms
            return self._sized(self.call(images, slots) if recorded else self.call.plain(images, slots), images)
        with stochastic_depth_on(self.model, seed=self.counters.forwards - 1):
            return self._sized(self.call.plain(images, slots), images)  # chance cannot be recorded

    def frozen_pass(self, images: Tensor, *, order: OrderLike | None = None) -> Tensor:
        """A pass for `infer`, which is not counted and moves nothing."""
        return whole(self.frozen_coarse(images, order=order))

    def frozen_coarse(self, images: Tensor, *, order: OrderLike | None = None) -> Logits:
        """The same, with the logits of pixels as `Pixels`."""
        if self._coarse:
            images = network_input(self.model, images)
        run = self.frozen_call.plain if self.statistics.mixed else self.frozen_call
        return self._sized(run(images, self.slots_of(images, order)), images)

    def _sized(self, logits: Tensor, images: Tensor) -> Logits:
        return Pixels(logits, (images.shape[2], images.shape[3])) if self._coarse else logits

    def slots_of(self, images: Tensor, order: OrderLike | None = None) -> Tensor | None:
        """An order as the network takes it; None for a network without orders."""
        choose: Callable[[OrderLike | None, int], Tensor] | None = getattr(self.model, "slots", None)
        if choose is not None:
            return choose(order, len(images))
        if order is not None:
            raise ConfigError(f"{type(self.model).__name__} has no traversal orders, and order={order} was asked for")
        return None

    def update(self, loss: Tensor, *, start: Tensor | None = None) -> bool:
        """Descend `loss`; a loss or gradient that is not finite is skipped and counted, and False returned.

        With `start`, a vector of weights, the step is taken from there, wherever the weights are now.
        """
        return self.settle([self.descend(loss, start=start)])[0]

    def descend(self, loss: Tensor, *, start: Tensor | None = None) -> Tensor:
        """As `update`, but nobody waits for the device, which itself skips a step; `settle` counts."""
        shares = self.statistics.shares
        finite = self.weights.differentiate(loss, extra=None if shares is None else shares.value)
        self.counters.backwards += 1
        self.weights.step(finite, start=start)
        return finite

    def settle(self, finite: list[Tensor]) -> list[bool]:
        """Wait for the device, count the updates that `descend` made and those that it skipped."""
        made: list[bool] = torch.stack(finite).tolist()
        self.counters.updates += sum(made)
        self.counters.skipped += len(made) - sum(made)
        return made

    def gradient(self, loss: Tensor) -> Tensor | None:
        """One counted backward pass; the gradient (n,) in the order of the weights' vector, until the next pass.

        None, counted as skipped, where it or the loss is not finite.
        """
        finite = bool(self.weights.differentiate(loss))
        self.counters.backwards += 1
        self.counters.skipped += not finite
        return self.weights.gradient if finite else None

    # What a caller uses

    @property
    def logits_before(self) -> Tensor | None:
        return None if self.coarse_before is None else whole(self.coarse_before)

    @logits_before.setter
    def logits_before(self, logits: Logits | None) -> None:
        self.coarse_before = logits

    @property
    def adapted(self) -> dict[str, nn.Parameter]:
        """The adapted parameters by name, as the network has them now."""
        return self.weights.named

    def __call__(self, images: Tensor) -> Tensor:
        outputs: Tensor = uncompiled(super().__call__)(images)
        return outputs

    def forward(self, images: Tensor) -> Tensor:
        """Adapt on the batch and predict it; on an error the state is as it was."""
        with self._lock:
            if getattr(self.model, "preprocessing", None) is not None:  # pixels and pictures are taken too
                images = network_input(self.model, images)
            check_images(images, self.model)
            if self.statistics.of_batches and not getattr(self.model, "dense", False):  # pixels make up for images
                self._few(len(images), self.name)
            try:
                with adapting(images), saving.undone_on_error(self):
                    return self._adapt(images.clone() if images.is_inference() else images.detach())
            except DataError:
                self.counters.refused += 1
                raise

    def _adapt(self, images: Tensor) -> Tensor:
        if getattr(self.options, "episodic", False):
            self.restore_source()
        self.statistics.begin(images, worth=self.worth)
        self.coarse_before = None
        outputs = whole(self.adapt(images).detach())
        check_outputs(outputs, images)
        self.counters.batches += 1
        return outputs

    @torch.no_grad()
    def evaluate(self, images: Tensor, *, as_next: bool = False) -> Tensor:
        """Logits (n, classes) of the state as it is: nothing is adapted or counted.

        `as_next`: statistics of the stream count the images, as if they came next, and are then put back.
        """
        with self._lock:
            if not as_next:
                with self.statistics.frozen(images):
                    return whole(self.infer(images))
            run = partial(self.call.plain, slots=self.slots_of(images))
            with self.statistics.going_on(images, run, worth=self.worth), self.statistics.frozen(images):
                return whole(self.infer(images))

    def reset(self) -> None:
        """Back to the source, bit for bit: weights, optimizer, moving statistics, counters."""
        with self._lock:
            self.restore_source()
            self.counters = Counters()
            self.coarse_before = None

    @torch.inference_mode(False)
    def restore_source(self) -> None:
        """As `reset`, but the counters, and with them the random draws that follow from them, continue."""
        with self._lock:
            self.weights.restore_source()
            self.statistics.restore_source()
            self.start()

    def detach(self) -> nn.Module:
        """The caller's network with the adapted weights, in the mode and with the flags it came with."""
        given, network = self._caller
        with self._lock, torch.no_grad():  # the storage is the same unless the method was moved
            for name, parameter in self.adapted.items():
                network.get_parameter(name).copy_(parameter)
        return given

    @torch.inference_mode(False)
    def fork(self) -> Self:
        """An independent copy that continues from here and shares the frozen weights."""
        with self._lock:
            network = self._caller[1]
            memo: dict[int, Any] = {id(s): s for s in self.weights.source.values()}
            frozen = dict(network.named_parameters()).keys() - self.adapted.keys()
            memo |= {id(p): p for m in (self.model, network) for n, p in m.named_parameters() if n in frozen}
            memo |= {id(b): b for b in network.buffers()}
            return copy.deepcopy(self, memo)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """The whole adapted state, made of tensors and plain values: safe to save and to load weights-only."""
        with self._lock:
            return saving.save(self)

    @torch.inference_mode(False)
    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Continue where `state` was saved; it is refused whole, before anything is touched, if it does not fit."""
        with self._lock:
            saving.load(self, state)

    def train(self, mode: bool = True) -> Self:
        """Methods choose the modes of their network themselves; nothing changes."""
        return self

    def __repr__(self) -> str:
        options = [f"{name}={show(getattr(self.options, name))}" for name in type(self.options).model_fields]
        return f"{type(self).__name__}({', '.join([type(self._caller[1]).__name__, *options])})"

    # How it works

    def _connect(self) -> None:
        """What no copy and no pickle carries: recordings hold addresses, a lock its threads."""
        learned = [] if self.statistics.shares is None else [self.statistics.shares.value]
        self._coarse = hasattr(self.model, "forward_coarse")
        network = CoarseNetwork(self.model) if self._coarse else self.model
        self.call = Recorder(network, [*self.adapted.values(), *learned])
        self.frozen_call = Recorder(network, [])  # of its own: norms that observe do otherwise
        self._lock = threading.RLock()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """As every module, when it is moved to another device or dtype; the vector and the optimizer come along."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.weights.moved()
        return self

    def __getstate__(self) -> dict[str, Any]:
        network = self._caller[1]
        return {**self.__dict__, "_caller": [network, network], "call": None, "frozen_call": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """After a copy or a pickle: weights of its own, which network and caller's network share again."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        network = self._caller[1]
        parameters = dict(self.model.named_parameters())
        for name, theirs in network.named_parameters():
            parameter = parameters[name]
            if name in self.adapted:
                parameter.data = parameter.data.clone()
            if (theirs.dtype, theirs.device) == (parameter.dtype, parameter.device):
                theirs.data = parameter.data
        self._connect()
        saving.set_moving_values(self, saving.moving_values(self))


class CoarseNetwork(nn.Module):
    """A network that labels pixels, up to the logits of its head: images (n, c, h, w) -> (n, classes, h', w')."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, **order: Any) -> Tensor:
        logits: Tensor = self.network.forward_coarse(images, **order)
        return logits


class Learner(Method):
    """A method that moves weights by gradients: pass, loss, update, as often as `steps` says; then a prediction.

    Subclasses give `loss`, and `select` where not all predictions count; logits are (n, classes) or, for dense
    predictions, (n, classes, h, w). With `in_bands`, these come as `Pixels`; each class says so for itself.
    """

    Options: ClassVar[type[LearningOptions]] = LearningOptions
    in_bands: ClassVar[bool] = False
    options: LearningOptions

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.in_bands = cls.__dict__.get("in_bands", False)

    def adapted_names(self, model: nn.Module) -> list[str]:
        return select(model, self.options.parameters)

    def loss(self, logits: Any, chosen: Tensor | None) -> Tensor:
        """A scalar from logits (n, classes, ...) and what `select` chose of them."""
        raise NotImplementedError

    def select(self, logits: Any) -> Tensor | None:
        """Which predictions (n, ...) count; None: all of them. Where none does, there is no update."""
        del logits
        return None

    def learned(self, logits: Any, chosen: Tensor | None) -> None:
        """Called after each update that was made."""

    def adapt(self, images: Tensor) -> Logits:
        for _ in range(self.options.steps):
            logits: Logits = self.adapting_pass(images)
            self.learn(images, logits)
        if self.options.predict == "before":
            return logits
        with torch.no_grad():
            return self.predict_coarse(images)

    def adapting_pass(self, images: Tensor) -> Any:
        """Logits to learn from."""
        logits = self.predict_coarse(images, stochastic_depth=self.options.stochastic_depth)
        if self.coarse_before is None and not self.options.stochastic_depth:
            self.coarse_before = logits.detach()
        return logits if self.in_bands else whole(logits)

    def learn(self, images: Tensor, logits: Any) -> None:
        """One update from the logits of the batch."""
        del images
        chosen = self.select(logits.detach())
        if chosen is not None and not bool(chosen.any()):
            return
        if self.update(self.loss(logits, chosen)):
            self.learned(logits.detach(), chosen)
