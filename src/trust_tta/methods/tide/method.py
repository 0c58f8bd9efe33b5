"""tide: one forward pass over two views, one update, and the prediction of that pass. Equations: `tide/__init__.py`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import model_validator
from torch import Tensor

from trust_tta.errors import StateError, TrustWarning
from trust_tta.methods.base import Learner, LearningOptions
from trust_tta.methods.ensembling import forward_views, log_mean_probability, mean_log_probability
from trust_tta.methods.losses import class_confusion, confusion_loss
from trust_tta.methods.parameters import ParameterSet
from trust_tta.methods.state import Array, Spec
from trust_tta.methods.statistics import Statistics, StatisticsKind
from trust_tta.methods.tide.class_prior import PriorMemory, bias_share, correct_prior, network_bias
from trust_tta.methods.tide.constants import TIDE
from trust_tta.methods.tide.label_shift import LabelMemory, add_views, class_logits, network_share
from trust_tta.ops.segmentation_logits import CoarseLogits, Logits, apply_in_chunks
from trust_tta.schema import Fraction, Rate

MIN_TRUST = 0.01  # averages of images without weight are undefined
MIN_MANY = 0.9  # `network_share` of a stream of many classes
_MIN_LOG_P = math.log(1e-12)
_REMOVED = ("loss", "temperature")
_RENAMED = {
    "pull": "source_decay",
    "restraint": "step_scaling",
    "error_scaling": "step_scaling",
    "frequencies": "correct_prior",
    "shares": "source_mixing",
    "mixtures": "domain_clusters",
}


class TideOptions(LearningOptions):
    """`lr` and `source_decay` are per 128 images; `lr` is for 2^19 adapted weights, and scaled for more or fewer.
    `views`: average with the mirror image, or not, where left and right matter.

    `source_mixing`: shrink the stream's BatchNorm statistics towards the source's. `domain_clusters`: statistics for
    each domain of a mixed stream. `correct_prior`: correct predictions by the class prior. `step_scaling`: shorter
    steps where the stream is like the training data, or many errors are expected.
    """

    lr: Rate = 2e-3
    parameters: ParameterSet = "auto"
    statistics: StatisticsKind = "stream"
    source_mixing: bool = True
    domain_clusters: bool = True
    predict: Literal["before", "after"] = "before"
    views: Literal["mirror", "none"] = "mirror"
    source_decay: Fraction = 0.04
    correct_prior: bool = True
    step_scaling: bool = True

    @model_validator(mode="before")
    @classmethod
    def _rename_old_options(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        for old in [name for name in _RENAMED if name in values and _RENAMED[name] not in values]:
            message = f"the option '{old}' of tide is now '{_RENAMED[old]}'; the old name goes with the next version"
            warnings.warn(message, TrustWarning, stacklevel=2)
        for name in [name for name in _REMOVED if name in values]:
            warnings.warn(
                f"tide has no option '{name}' any more; its loss follows from the task", TrustWarning, stacklevel=2
            )
        return {_RENAMED.get(name, name): value for name, value in values.items() if name not in _REMOVED}


class Prediction(NamedTuple):
    """Log-probabilities (n, classes), corrected by the class prior; its memory with the batch, None for pixels; the
    `weight` () of the local prior; `bias_share` (), None where no bias is corrected."""

    log_p: Logits
    memory: PriorMemory | None
    weight: Tensor
    bias_share: Tensor | None


class Tide(Learner):
    """tide, by the equations of `tide/__init__.py`.

    State besides weights and statistics, None before the first batch: the entries of `PriorMemory` and `LabelMemory`;
    `network_share` (), that of the network, and not the labels, in how uneven its predictions are; and `error` (), the
    expected error rate of the domain.
    """

    name = "tide"
    Options: ClassVar[type[LearningOptions]] = TideOptions
    options: TideOptions
    chunked_loss = True
    marginal: Tensor | None
    scores: Tensor | None
    spread: Tensor | None
    window: Tensor | None
    agreement: Tensor | None
    votes: Tensor | None
    log_p: Tensor | None
    evidence: Tensor | None
    network_share: Tensor | None
    error: Tensor | None
    _class_rows: tuple[Tensor, Tensor] | None = None  # made for the first batch

    def make_statistics(self) -> Statistics:
        return Statistics(
            self.model,
            self.options.statistics,
            mix_source=self.options.source_mixing,
            cluster_domains=self.options.domain_clusters,
            detect_shifts=True,
        )

    def state_spec(self) -> dict[str, Spec]:
        rows = 1 + TIDE.clusters
        prior = {
            "marginal": Array((None,), least=0),
            "scores": Array((rows, None)),
            "spread": Array((rows, 2), least=0),
        }
        local = {"window": Array((2, None), least=0), "agreement": Array((3,))}
        labels = {"votes": Array((2, None), least=0), "log_p": Array((None,)), "evidence": Array((3,), least=0)}
        rates: dict[str, Spec] = {name: Array((), least=0, most=1) for name in ("network_share", "error")}
        return {**prior, **local, **labels, **rates}

    def check_state(self, state: Mapping[str, Any]) -> None:
        names = ("marginal", "scores", "window", "votes", "log_p")
        found = {state["extra"][name].shape[-1] for name in names if name in state["extra"]}
        if len(found) > 1:
            raise StateError(
                f"the state does not fit: its class prior is of {sorted(found)} classes; one number is wanted"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Continue where `state` was saved."""
        extra = state.get("extra") if isinstance(state, Mapping) else None
        if isinstance(extra, Mapping) and "frequencies" in extra:
            raise StateError("this state was saved by tide before its class prior; adapt again from the source")
        if isinstance(extra, Mapping) and "confusion" in extra:  # of a loss that tide no longer has
            state = {**state, "extra": {name: value for name, value in extra.items() if name != "confusion"}}
        super().load_state_dict(state)

    def start_batch(self, images: Tensor) -> None:
        super().start_batch(images)
        if (labels := self.label_memory()) is not None:  # the domain may be a new one
            self.votes, self.log_p, self.evidence = (value * self.statistics.unchanged for value in labels)
        if self.statistics.stream_norms:
            self.trust_statistics(images)

    def adapt(self, images: Tensor) -> Logits:
        """Steps 5 to 7 of the equations; `start_batch` and the BatchNorms do those before."""
        unchanged = self.statistics.unchanged  # 1 - d
        self.weights.load(self.weights.snapshot().lerp(self.weights.source_vector, TIDE.shift_decay * (1 - unchanged)))
        self.weights.fade_optimizer_state(unchanged)
        mirror = self.options.views == "mirror"
        forward = partial(self.logits, stochastic_depth=self.options.stochastic_depth)
        for step in range(self.options.steps):
            self.counters.forwards += mirror  # counted in forwards over the batch
            views = forward_views(forward, images, mirror=mirror)
            if step == 0 and not self.statistics.stream_norms:
                self.network_share = self.compare_views(views.detach())
            prediction = self.correct_prior(views.detach())
            error = self.expected_error(prediction.log_p)
            pace = self.pace(error, prediction.bias_share) * (1 - prediction.weight)
            self.update_weights(views, prediction, len(images), pace=pace)
            if self.prediction_before is None:
                self.prediction_before = prediction.log_p
        if self.options.predict == "after":
            self.counters.forwards += mirror
            prediction = self.correct_prior(forward_views(self.predict, images, mirror=mirror))
        self.error = error
        if prediction.memory is not None:
            self.marginal, self.scores, self.spread, self.window, self.agreement = prediction.memory
        return prediction.log_p

    def label_memory(self) -> LabelMemory | None:
        """The entries of `LabelMemory`; None before the first batch, and for pixels."""
        if self.votes is None or self.log_p is None or self.evidence is None:
            return None
        return LabelMemory(self.votes, self.log_p, self.evidence)

    def compare_views(self, views: Logits) -> Tensor:
        """`network_share` () with the views (views, n, classes) of a batch; 1 for pixels, always of uneven classes."""
        if isinstance(views, CoarseLogits) or views.dim() > 3:
            return self.weights.vector.new_ones(())
        if self._class_rows is None or self._class_rows[0].device != views.device:
            self._class_rows = class_logits(self.model, views.shape[2])
        memory = add_views(self.label_memory() or LabelMemory.empty(views[0]), views, self._class_rows)
        self.votes, self.log_p, self.evidence = memory
        return network_share(memory, self._class_rows, mirror=self.options.views == "mirror")

    def trust_statistics(self, images: Tensor) -> None:
        """Let the BatchNorms follow the stream as far as the labels are not the reason why it differs.

        While the domain is young, or has few classes, the network also predicts with the source's statistics: with the
        stream's, a class that is alone looks like many. Noise may leave one class there, too, but shows in the first
        norms.
        """
        statistics, mirror = self.statistics, self.options.views == "mirror"
        statistics.set_trust(1.0)
        mixing = any(norm.mix_source for norm in statistics.stream_norms)
        if getattr(self.model, "dense", False) or not mixing:
            return
        if self.evidence is not None and self.network_share is not None:
            old, many = self.evidence[0] >= 2 * TIDE.unit, self.network_share > MIN_MANY
            if bool(old & many):
                return
        statistics.set_trust(0.0)
        self.counters.forwards += mirror
        labels = self.compare_views(forward_views(self.observe_statistics, images, mirror=mirror))
        early = (statistics.early_distance() / TIDE.early_distance) ** 4
        self.network_share = labels.maximum((early / (1 + early)).to(labels))
        statistics.set_trust(max(float(self.network_share), MIN_TRUST), images=len(images))

    def correct_prior(self, views: Logits) -> Prediction:
        """Prediction from the views (views, n, classes, ...): their mean probability, corrected by the class prior.

        Predictions of pixels are not corrected: the classes of neighboring pixels are never even.
        """
        if isinstance(views, CoarseLogits) or views.dim() > 3:
            log_p = log_mean_probability(views, least=_MIN_LOG_P)
            return Prediction(log_p, None, self.weights.vector.new_zeros(()), None)
        p = views.exp().mean(0).clamp_min(1e-12)
        known = [value for name in PriorMemory._fields if (value := getattr(self, name)) is not None]
        memory = PriorMemory(*known) if len(known) == len(PriorMemory._fields) else PriorMemory.empty(p)
        memory = PriorMemory(*(value * self.statistics.unchanged for value in memory))  # the domain may be a new one
        network = p.new_ones(()) if self.network_share is None else self.network_share.to(p)
        corrected = correct_prior(p, memory, shift=self.shift(), weight=network, groups=self.statistics.groups)
        if not self.options.correct_prior:  # the loss needs the marginal
            unbiased = corrected.memory._replace(scores=torch.zeros_like(corrected.memory.scores))
            return Prediction(p.log(), unbiased, p.new_zeros(()), None)
        share = bias_share(corrected.memory.scores, corrected.memory.spread)[0] * network
        return Prediction(corrected.p.log(), corrected.memory, corrected.weight, share)

    def expected_error(self, log_p: Logits) -> Tensor:
        """Error rate () that the predictions (n, classes, ...) of the domain's last images expect of themselves."""
        now = 1 - apply_in_chunks(lambda chunk: chunk.softmax(1).amax(1), log_p).mean()
        detector = self.statistics.shift_detector
        if self.error is None or detector is None:
            return now
        return self.error.lerp(now, log_p.shape[0] / detector.images.clamp_min(log_p.shape[0]))

    def shift(self) -> Tensor | float:
        """Evidence () that a preference for classes is due to a shift: the share of the stream in the BatchNorms.

        Without BatchNorm, `network_share`.
        """
        share = self.statistics.stream_share()
        if share is None:
            return 1.0 if self.network_share is None else self.network_share
        return share

    def pace(self, error: Tensor, bias_share: Tensor | None) -> Tensor:
        """Factor () of the step: the evidence of a shift, times the expected rate of correct predictions.

        The evidence is the stream's share in the BatchNorm statistics; without BatchNorm, that of bias in the mean
        log-probabilities; without either, as for pixels, the expected error.
        """
        if not self.options.step_scaling:
            return error.new_ones(())
        share = self.statistics.stream_share()
        if share is None:
            share = error if bias_share is None else bias_share
        return share.to(error) * (1 - error)

    def update_weights(self, views: Logits, prediction: Prediction, images: int, *, pace: Tensor) -> None:
        """Step 7 of the equations: one step of Adam, `pace` () times as long, then decay towards the source."""
        start = self.weights.snapshot()
        marginal = None if prediction.memory is None else prediction.memory.marginal
        finite = self.step(adaptation_loss(mean_log_probability(views), marginal))
        self.counters.backwards += self.options.views == "mirror"
        units = images * self.statistics.samples_per_image / TIDE.unit
        domains = 1 if self.statistics.groups is None else TIDE.clusters
        moved = start + (self.weights.snapshot() - start) * (pace * step_scale(units / domains, len(start)))
        decayed = moved.lerp(self.weights.source_vector, 1 - (1 - self.options.source_decay) ** units)
        self.weights.load(torch.where(finite, decayed, start))

    def infer(self, images: Tensor) -> Logits:
        """Log-probabilities (n, classes, ...) for even classes, of the state as it is."""
        views = forward_views(self.frozen_logits, images, mirror=self.options.views == "mirror")
        if isinstance(views, Tensor) and self.scores is not None and self.spread is not None:
            views = views - network_bias(self.scores, self.spread, self.shift(), self.statistics.groups)
        return log_mean_probability(views, least=_MIN_LOG_P)


def step_scale(units: float, weights: int) -> float:
    """Factor of a step on `units` times 128 images, for a number of adapted weights."""
    return math.sqrt(units * TIDE.weights / max(weights, TIDE.min_weights))


def adaptation_loss(logits: Logits, marginal: Tensor | None) -> Tensor:
    """Loss () of logits (n, classes, ...): the mutual information of images and classes, or the confusion of pixels.

    `marginal` (classes,): sum of the stream's predictions; None for pixels, whose classes are too uneven for it.
    """
    if marginal is None or isinstance(logits, CoarseLogits):
        return confusion_loss(class_confusion(logits))
    log_p = logits.log_softmax(1)
    log_q = (marginal / marginal.sum()).clamp_min(1e-12).log()
    return (log_p.exp() * (log_q - log_p)).sum(1).mean()
