"""What every method shares: options, a network over the caller's tensors, state, reset and fork.

The work is done by parts: `Passes` and `Updates` (forward and backward), `Weights` (the adapted weights and their
optimizer), `Statistics` (those of the BatchNorms), `Caller` (the caller's network), `saving` (what is remembered, and
what of it is accepted), `safety` (what a batch may be).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn

from trust_tta.errors import ConfigError
from trust_tta.methods import saving
from trust_tta.methods.parameters import Caller, ParameterSet, select, share
from trust_tta.methods.passes import Passes, Updates
from trust_tta.methods.safety import Admission, Turns, adapting, are_finite, check_outputs, finite, uncompiled
from trust_tta.methods.saving import Counters
from trust_tta.methods.state import Spec, clone
from trust_tta.methods.statistics import Statistics, StatisticsKind
from trust_tta.methods.weights import Descent, Weights
from trust_tta.ops.segmentation_logits import Logits, whole
from trust_tta.schema import Count, Fraction, Rate, Schema, show


class MethodOptions(Schema):
    """What every method can be asked.

    `statistics`: which statistics the BatchNorms take. `predict`: the logits returned are of the adapting pass, the
    last step's where there are several, or of one more pass after the update.
    """

    statistics: StatisticsKind = "batch"
    predict: Literal["before", "after"] = "after"


class LearningOptions(MethodOptions):
    """Of methods that move weights by gradients; `momentum` of SGD, or the decay of Adam's first moment."""

    lr: Rate = 1e-4
    steps: Count = 1
    episodic: bool = False
    optimizer: Literal["adam", "sgd"] = "adam"
    momentum: Fraction = 0.9
    nesterov: bool = False
    parameters: ParameterSet = "bn"
    stochastic_depth: bool = False

    @model_validator(mode="after")
    def _momentum_fits_the_optimizer(self) -> Self:
        if self.optimizer == "adam" and self.momentum == 1:
            raise ValueError("a momentum of 1 holds Adam's first moment at zero; give one below 1")
        if self.nesterov and (self.optimizer != "sgd" or self.momentum == 0):
            raise ValueError("nesterov=True goes with optimizer='sgd' and a momentum above 0; omit it")
        return self

    def rule(self) -> Descent:
        return Descent(self.optimizer, self.lr, self.momentum, self.nesterov)


class Method(nn.Module):
    """Adapt on a batch, then predict it. Subclasses say how in `adapt`, which builds on the parts of a method.

    `model`: the network, over the tensors of the caller's. `predict` and `update`: its passes. `weights`: what is
    adapted, with the optimizer. `statistics`: what the BatchNorms normalize with. `counters`: what was done.

    `probabilities`: the output is a distribution, not logits. `pooled`: what of `moving` tells of the domain, not of
    the stream, as sums over images that total one each: fleets pool it. `worth`: images for which each one stands in
    statistics and sums, where others see the rest of the stream. `coarse_before`: the prediction made before the last
    batch's update, where it came for free. One method may serve several threads: calls take turns, but for predictions
    of one that is `fixed`.
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
        self.caller = Caller(model)
        with torch.inference_mode(False):  # what is made here must be able to learn
            names = self.adapted_names(self.caller.network)
            self.model = share(self.caller.network, names)
            rule = self.options.rule() if isinstance(self.options, LearningOptions) else Descent()
            self.weights = Weights({name: self.model.get_parameter(name) for name in names}, rule)
            self.caller.share_again(self.model)
            self.adapted = self.weights.named  # the adapted parameters by name, as the network has them now
            self.statistics = self.make_statistics()
        self.counters = Counters()
        self.predict = Passes(self.model, self.weights, self.statistics, self.counters)
        self.update = Updates(self.weights, self.statistics, self.counters)
        self.worth = 1
        self.coarse_before: Logits | None = None
        self.training, self._admit, self._turns = False, Admission(), Turns()
        self.start()

    # What a subclass writes

    def adapt(self, images: Tensor) -> Logits:
        """Adapt on images (n, c, h, w), then return their logits (n, classes)."""
        raise NotImplementedError

    def infer(self, images: Tensor) -> Logits:
        """Logits (n, classes) of the state as it is; `evaluate` sees to it that nothing moves."""
        return self.predict.frozen(images)

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

    @property
    def fixed(self) -> bool:
        """Whether no batch changes what is predicted, so that on a CPU predictions may run side by side."""
        return False

    # What a caller uses

    def __call__(self, images: Tensor) -> Tensor:
        outputs: Tensor = uncompiled(super().__call__)(images)
        return outputs

    def forward(self, images: Tensor) -> Tensor:
        """Adapt on the batch and predict it; on an error the state is as it was."""
        with self._turns:
            images = self._admit(images, self)
            with adapting(images), saving.undone_on_error(self), finite(images):
                images = images.clone() if images.is_inference() else images.detach()
                if getattr(self.options, "episodic", False):
                    self.restore_source()
                self.statistics.begin(images, worth=self.worth)
                self.coarse_before, self.update.unsettled = None, []
                outputs = whole(self.adapt(images).detach())
                fine = are_finite(outputs)
                if self.update.unsettled:
                    self.update.settle(self.update.unsettled)
                check_outputs(fine, images)
                self.counters.batches += 1
                return outputs

    @torch.no_grad()
    def evaluate(self, images: Tensor, *, as_next: bool = False) -> Tensor:
        """Logits (n, classes) of the state as it is: nothing is adapted or counted.

        `as_next`: statistics of the stream count the images, as if they came next, and are then put back.
        """
        going_on = self.statistics.going_on(images, self.predict.plain, worth=self.worth) if as_next else nullcontext()
        alone = nullcontext() if self.fixed and images.device.type == "cpu" else self._turns  # recordings share memory
        with alone, going_on, self.statistics.frozen(images):
            return whole(self.infer(images))

    @property
    def logits_before(self) -> Tensor | None:
        """The prediction made before the last batch's update, where there is one."""
        return None if self.coarse_before is None else whole(self.coarse_before)

    def reset(self) -> None:
        """Back to the source, bit for bit: weights, optimizer, moving statistics, counters."""
        with self._turns:
            self.restore_source()
            self.counters.set(Counters())
            self.coarse_before = None

    @torch.inference_mode(False)
    def restore_source(self) -> None:
        """As `reset`, but the counters, and with them the random draws that follow from them, continue."""
        with self._turns:
            self.weights.restore_source()
            self.statistics.restore_source()
            self.start()

    def detach(self) -> nn.Module:
        """The caller's network with the adapted weights, in the mode and with the flags it came with."""
        with self._turns:
            return self.caller.with_weights(self.adapted)

    def fork(self) -> Self:
        """An independent copy that continues from here and shares the frozen weights."""
        with self._turns, torch.inference_mode(False):
            return copy.deepcopy(self, saving.shared_by_forks(self))

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """The whole adapted state, made of tensors and plain values: safe to save and to load weights-only."""
        with self._turns:
            state: dict[str, Any] = clone(saving.save(self))  # a pickle of views has all that they are views of
            return state

    @torch.inference_mode(False)
    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Continue where `state` was saved; it is refused whole, before anything is touched, if it does not fit."""
        with self._turns:
            saving.load(self, state)

    # What every module has

    def train(self, mode: bool = True) -> Self:
        """Methods choose the modes of their network themselves; nothing changes."""
        return self

    def __repr__(self) -> str:
        options = [f"{name}={show(getattr(self.options, name))}" for name in type(self.options).model_fields]
        return f"{type(self).__name__}({', '.join([type(self.caller.network).__name__, *options])})"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """When it is moved to another device or dtype, the vector and the optimizer come along."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.weights.moved()
        self.statistics.moved()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        """After a copy or a pickle."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.caller.share_again(self.model)
        saving.set_moving_values(self, saving.moving_values(self))


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
        if self.options.predict == "after":
            with torch.no_grad():
                logits = self.predict.coarse(images)
        return logits

    def adapting_pass(self, images: Tensor) -> Any:
        """Logits to learn from."""
        logits = self.predict.coarse(images, stochastic_depth=self.options.stochastic_depth)
        if self.coarse_before is None and not self.options.stochastic_depth:
            self.coarse_before = logits.detach()
        return logits if self.in_bands else whole(logits)

    def learn(self, images: Tensor, logits: Any) -> None:
        """One update from the logits of the batch; where nothing in it waits for that, it is counted at its end."""
        del images
        chosen = self.select(logits.detach())
        if chosen is not None and not bool(chosen.any()):
            return
        if type(self).learned is Learner.learned:
            self.update.unsettled.append(self.update.descend(self.loss(logits, chosen)))
        elif self.update(self.loss(logits, chosen)):
            self.learned(logits.detach(), chosen)
