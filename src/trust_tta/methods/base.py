"""`Method` and `Learner`: options, forward and backward passes, state, reset and fork, shared by all methods."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn

from trust_tta.errors import ConfigError
from trust_tta.methods import state as states
from trust_tta.methods.flat_parameters import FlatParameters, OptimizerConfig
from trust_tta.methods.forward import NetworkForward, stochastic_depth_on
from trust_tta.methods.network_buffers import NetworkBuffers
from trust_tta.methods.parameters import ParameterSet, SharedModel, select, share_tensors
from trust_tta.methods.state import Counters, Spec
from trust_tta.methods.statistics import Statistics, StatisticsKind
from trust_tta.methods.validation import (
    MIN_IMAGES,
    check_batch,
    check_dtypes,
    check_network,
    check_outputs,
    network_passes,
    warn_of_few_images,
)
from trust_tta.ops.segmentation_logits import Logits, upsample
from trust_tta.orders import OrderLike
from trust_tta.preprocessing import network_input
from trust_tta.schema import Count, Fraction, Rate, Schema, show


class MethodOptions(Schema):
    """Options of every method.

    `statistics`: which statistics the BatchNorms use. `predict`: return the logits of the adapting forward ("before"
    the update, of the last step where there are several), or of one more forward "after" it.
    """

    statistics: StatisticsKind = "batch"
    predict: Literal["before", "after"] = "after"


class LearningOptions(MethodOptions):
    """Options of methods that learn by gradients; `momentum` of SGD, or the decay of Adam's first moment."""

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


class Method(nn.Module):
    """Adapts on a batch, then predicts it. Subclasses implement `adapt`.

    `model`: the network, over the tensors of the user's. `weights`: the adapted parameters and their optimizer.
    `adapted`: the same parameters by name. `statistics`: what the BatchNorms normalize with. `counters`: operations
    done. `prediction_before`: the prediction made before the last batch's update, where it came for free.

    `probabilities`: the output is a distribution, not logits. Calls from several threads run one at a time, except
    predictions of a `stateless` method.
    """

    name: ClassVar[str]
    Options: ClassVar[type[MethodOptions]] = MethodOptions
    probabilities: ClassVar[bool] = False
    options: MethodOptions

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.name = cls.__dict__.get("name", cls.__name__.lower())

    def __init__(self, model: nn.Module, options: MethodOptions | None = None) -> None:
        super().__init__()
        check_network(model)
        self.options = self.Options() if options is None else options
        if not isinstance(self.options, self.Options):
            raise ConfigError(f"the options of '{self.name}' are {show(options)}; give a {self.Options.__name__}")
        self.shared = SharedModel(model)
        with torch.inference_mode(False):  # tensors made here need gradients
            names = self.adapted_names(self.shared.network)
            check_dtypes(self.shared.network, names)
            self.model = share_tensors(self.shared.network, names)
            config = OptimizerConfig()
            if isinstance(o := self.options, LearningOptions):
                config = OptimizerConfig(o.optimizer, o.lr, o.momentum, o.nesterov)
            self.weights = FlatParameters({name: self.model.get_parameter(name) for name in names}, config)
            self.shared.rebind(self.model)
            self.adapted = self.weights.named
            self.statistics = self.make_statistics()
            self.network_buffers = NetworkBuffers(self.model, self.shared.network)
        self.counters = Counters()
        # The stem is cached by the batch, a tensor of the method's own that is not changed in place.
        self._forward = NetworkForward(self.model, self.weights.tensors, cache_stem=True)
        # Separate graphs: norms behave differently in evaluation and while they update their statistics.
        self._frozen_forward, self._observing_forward = NetworkForward(self.model), NetworkForward(self.model)
        self.prediction_before: Logits | None = None
        self.finite_steps: list[Tensor] = []  # of the present batch: whether each step was made, () on the device
        self.training, self._lock = False, threading.RLock()
        self._few_images_before, self._warned_of_few = True, False
        self.reset_state()
        self.state_names = tuple(self.state_spec())

    # Implemented by subclasses

    def adapt(self, images: Tensor) -> Logits:
        """Adapt on images (n, c, h, w), then return their logits (n, classes)."""
        raise NotImplementedError

    def start_batch(self, images: Tensor) -> None:
        """Prepare the statistics for images (n, c, h, w), before the first forward over them."""
        self.statistics.start_batch(images)

    def infer(self, images: Tensor) -> Logits:
        """Logits (n, classes) of the present state, for `evaluate`; changes nothing."""
        return self.frozen_logits(images)

    def adapted_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters to adapt; ConfigError where the network lacks something that the method needs."""
        del model
        return []

    def make_statistics(self) -> Statistics:
        """Set up the statistics of the BatchNorms of `self.model`; called when the adapted parameters are known."""
        return Statistics(self.model, self.options.statistics, updating_without_grad=not self.adapted)

    def reset_state(self) -> None:
        """Set the attributes that `state_spec` names to their initial values: None, unless a subclass overrides it."""
        for name in self.state_spec():
            setattr(self, name, None)

    def state_spec(self) -> dict[str, Spec]:
        """Specification of the attributes in the state besides weights and statistics; each may also be None."""
        return {}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a state whose entries contradict each other; each one has been checked against `state_spec`."""

    @property
    def stateless(self) -> bool:
        """Whether predictions are independent of earlier batches; on a CPU they then run in parallel."""
        return False

    # Building blocks of `adapt`

    def logits(
        self, images: Tensor, *, order: OrderLike | None = None, stochastic_depth: bool = False, capture: bool = True
    ) -> Logits:
        """Logits (n, classes) of one counted forward; `CoarseLogits` where the network segments.

        `capture=False`: no CUDA graph, as for batches whose size varies.
        """
        self.counters.forwards += 1
        if stochastic_depth:  # cannot be captured in a CUDA graph
            with stochastic_depth_on(self.model, seed=self.counters.forwards - 1):
                return self._forward(images, order, capture=False)
        plain = self.statistics.groups is None and self.statistics.trust == 1
        return self._forward(images, order, capture=capture and plain)

    @torch.no_grad()
    def predict(self, images: Tensor, *, order: OrderLike | None = None, capture: bool = True) -> Logits:
        """`logits` without gradients."""
        return self.logits(images, order=order, capture=capture)

    def logits_of_some(
        self, make: Callable[[Tensor], Tensor], indices: Tensor, n: int, *, stochastic_depth: bool = False
    ) -> Tensor:
        """Logits (k, classes) of the images `make(indices)` alone, for `indices` (k,) into a batch of n.

        One image whose last map is a single pixel has no batch statistics; the whole batch is then forwarded.
        """
        try:
            return upsample(self.logits(make(indices), stochastic_depth=stochastic_depth, capture=False))
        except ValueError:
            if not 1 == len(indices) < n:
                raise
        every = make(torch.arange(n, device=indices.device))
        return upsample(self.logits(every, stochastic_depth=stochastic_depth, capture=False))[indices]

    @torch.no_grad()
    def observe_statistics(self, images: Tensor) -> Logits:
        """Logits of one counted forward without gradients, in which the norms update their statistics."""
        self.counters.forwards += 1
        with self.statistics.updating():
            return self._observing_forward(images, capture=self.statistics.groups is None)

    def frozen_logits(self, images: Tensor, *, order: OrderLike | None = None) -> Logits:
        """Logits of a forward that is not counted and changes nothing, for `infer`."""
        if self._frozen_forward.coarse:  # the network's own `forward`, which prepares images, is not called
            images = network_input(self.model, images)
        return self._frozen_forward(images, order, capture=self.statistics.groups is None)

    def step(self, loss: Tensor, *, start: Tensor | None = None) -> Tensor:
        """One optimizer step on the loss, from the weights (n,) `start` or the present ones.

        Skipped where the loss or its gradient is not finite. Returns whether it was made, () bool on the device;
        `bool()` of it makes the host wait.
        """
        self.counters.backwards += 1
        finite = self.weights.backward(loss)
        self.weights.step(finite, start=start)
        self.finite_steps.append(finite)
        return finite

    # Public interface

    def __call__(self, images: Tensor) -> Tensor:
        dynamo: Any = sys.modules.get("torch._dynamo")  # not imported: nothing was compiled
        call = super().__call__ if dynamo is None else dynamo.disable(super().__call__)  # graphs cannot hold updates
        return call(images)

    def forward(self, images: Tensor) -> Tensor:
        """Adapt on the batch and predict it; on an error the state is as it was."""
        with self._lock, torch.inference_mode(False), torch.enable_grad():
            images = check_batch(images, self.model)
            few = self.statistics.uses_batch and len(images) < MIN_IMAGES and not getattr(self.model, "dense", False)
            if few and self._few_images_before and not self._warned_of_few:  # the last batch of a stream may be small
                self._warned_of_few = True
                warn_of_few_images(len(images), self.name)
            self._few_images_before = few
            with states.restored_on_error(self), network_passes(images):
                images = images.clone() if images.is_inference() else images.detach()
                if getattr(self.options, "episodic", False):
                    self.restore_source()
                self.start_batch(images)
                self.prediction_before, self.finite_steps = None, []
                outputs = upsample(self.adapt(images).detach())
                if self.finite_steps:
                    made = int(torch.stack(self.finite_steps).sum())
                    self.counters.updates += made
                    self.counters.skipped += len(self.finite_steps) - made
                check_outputs(outputs, images)
                if not self._forward.output_checked:
                    self._forward.check_first_output()
                self.counters.batches += 1
                return outputs

    @torch.no_grad()
    def evaluate(self, images: Tensor, *, include_in_stats: bool = False) -> Tensor:
        """Logits (n, classes) of the present state: nothing is adapted or counted.

        `include_in_stats`: statistics of the stream include the images for this prediction, and are then restored.
        """
        with ExitStack() as stack:
            if not (self.stateless and images.device.type == "cpu"):
                stack.enter_context(self._lock)
            if include_in_stats and self.statistics.stream_norms:
                stack.enter_context(self.statistics.restored())
                stack.callback(states.set_extra_state, self, states.clone(states.extra_state(self)))
                stack.callback(setattr, self, "counters", replace(self.counters))
                self.start_batch(images)
                with self.statistics.updating():
                    self._forward(images, capture=False)
            stack.enter_context(self.statistics.frozen(images))
            stack.enter_context(self.network_buffers.restored())
            return upsample(self.infer(images))

    @property
    def logits_before(self) -> Tensor | None:
        """The prediction made before the last batch's update, where there is one."""
        return None if self.prediction_before is None else upsample(self.prediction_before)

    def reset(self) -> None:
        """Return to the source, bit for bit: weights, optimizer, statistics, counters."""
        with self._lock:
            self.restore_source()
            self.counters = Counters()
            self.prediction_before = None

    @torch.inference_mode(False)
    def restore_source(self) -> None:
        """Return to the source as `reset` does, but keep the counters, which seed random draws."""
        with self._lock:
            self.weights.restore_source()
            self.statistics.restore_source()
            self.network_buffers.load({})
            self.reset_state()

    def detach(self) -> nn.Module:
        """The user's network with the adapted weights, in the mode and with the flags it came with."""
        with self._lock, torch.no_grad():
            for name, parameter in self.adapted.items():  # the storage is the same unless the method was moved
                self.shared.network.get_parameter(name).copy_(parameter)
            return self.shared.given

    def fork(self) -> Self:
        """An independent copy that continues from here; it shares the frozen weights and the source's tensors."""
        network = self.shared.network
        shared: list[Tensor] = [self.weights.source_vector, *network.buffers()]
        frozen = dict(network.named_parameters()).keys() - self.adapted.keys()
        for each in (self.model, network):
            shared += [p for name, p in each.named_parameters() if name in frozen]
        with self._lock, torch.inference_mode(False):
            return copy.deepcopy(self, {id(tensor): tensor for tensor in shared})

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """The whole adapted state, made of tensors and plain values: safe to save and to load weights-only."""
        with self._lock:
            return states.save_state(self)

    @torch.inference_mode(False)
    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Continue where `state` was saved; a state that does not fit is refused before anything changes."""
        with self._lock:
            states.load_state(self, state)

    # nn.Module

    def train(self, mode: bool = True) -> Self:
        """No effect: methods set the modes of their network themselves."""
        return self

    def __repr__(self) -> str:
        options = [f"{name}={show(getattr(self.options, name))}" for name in type(self.options).model_fields]
        return f"{type(self).__name__}({', '.join([type(self.shared.network).__name__, *options])})"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move to another device or dtype, with the flat parameters and the optimizer."""
        self.network_buffers.note_changes()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.weights.rebuild_if_moved()
        self.network_buffers.watch()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore after a copy or a pickle."""
        super().__setstate__({**state, "_lock": threading.RLock()})  # type: ignore[no-untyped-call]
        self.shared.rebind(self.model)
        self.network_buffers.watch()
        states.set_extra_state(self, states.extra_state(self))


class Learner(Method):
    """A method that learns by gradients: forward, loss, optimizer step, `steps` times; then a prediction.

    Subclasses implement `loss`, or override `update`. Logits are (n, classes) or, for dense predictions,
    (n, classes, h, w). `chunked_loss`: dense logits come as `CoarseLogits`, for losses that are computed in chunks.
    """

    Options: ClassVar[type[LearningOptions]] = LearningOptions
    chunked_loss: ClassVar[bool] = False
    options: LearningOptions

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not {"loss", "update"}.isdisjoint(cls.__dict__):  # not inherited by a class with another loss
            cls.chunked_loss = cls.__dict__.get("chunked_loss", False)

    def adapted_names(self, model: nn.Module) -> list[str]:
        return select(model, self.options.parameters, skip_last=getattr(self.options, "skip_last", False))

    def adapt(self, images: Tensor) -> Logits:
        for step in range(self.options.steps):
            logits = self.logits(images, stochastic_depth=self.options.stochastic_depth)
            if step == 0 and not self.options.stochastic_depth:
                self.prediction_before = logits.detach()
            logits = logits if self.chunked_loss else upsample(logits)
            self.update(images, logits)
        return logits if self.options.predict == "before" else self.predict(images)

    def update(self, images: Tensor, logits: Any) -> None:
        """One update from the logits of the batch (n, c, h, w)."""
        del images
        self.step(self.loss(logits))

    def loss(self, logits: Any) -> Tensor:
        """A scalar from logits (n, classes, ...)."""
        raise NotImplementedError
