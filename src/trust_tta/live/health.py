"""Health monitor of an adapting method, at a bounded cost: inputs, predictions, and the source's on a sample."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trust_tta.errors import StateError
from trust_tta.live.alarms import Kind, Limits, Reference, find_alarms
from trust_tta.live.guard import Guard
from trust_tta.live.monitors import (
    CLASS_WINDOW,
    FEW_CLASSES_WINDOW,
    Monitors,
    Reading,
    Values,
    probability_rows,
    weight_distance,
)
from trust_tta.live.source_reference import Canary, Reservoir, SourceReference
from trust_tta.methods.base import Method
from trust_tta.schema import show

MAX_PROBED = 64  # images that the source predicts at once
MIN_PROBED = 16  # fewer give poor batch statistics: small batches are gathered first
MAX_NORM_DISTANCE = 4.0  # at the middle norm, in units of clean batches, of images that are like the reference
SUSPICIOUS_CHANGE = 0.7  # ratio of the effective number of classes to that of the window before
CANARY_TOLERANCE = 0.05  # by how much the score on the canary may fall
DRIFT_TOLERANCE = 0.25  # the same while the images differ from a calibrated reference
RESERVOIR_TOLERANCE = 0.15  # the same for a canary taken from the stream itself
MIN_AGREEMENT = 0.6  # with the source, below which adaptation counts as wrong
MAX_WEIGHT_DISTANCE = 4.0  # relative norm of what was learned, above which it does too


@dataclass(frozen=True)
class Check:
    """Score of a state on a canary, or its agreement with the source on a batch where there is no canary."""

    on: str
    images: int
    score: float
    least: float

    @property
    def passed(self) -> bool:
        return self.score >= self.least

    def evidence(self) -> dict[str, Any]:
        return {"canary": self.on, "canary_images": self.images, "score": self.score, "least": self.least}


class HealthMonitor:
    """Windows, source and canary of one method. `budget`: how many images the source may still predict."""

    def __init__(self, method: Method, guard: Guard, *, reference: Reference | None, canary: Any) -> None:
        self.guard, self.source, self._probabilities = guard, SourceReference(method), method.probabilities
        self.limits = reference.limits if reference else Limits()
        self.monitors = Monitors(
            input_reference=reference.inputs if reference else self.source.training_statistics,
            class_reference=reference.classes if reference else None,
            depths=reference.depths if reference else None,
        )
        self.canary: Canary | None = None
        if canary is not None:
            self.canary = Canary.from_user(canary, self.source)
        elif reference is not None:
            like = next(method.model.parameters(), reference.canary)
            self.canary = Canary.trusted(reference.canary.to(like), self.source)
        self.reservoir = Reservoir()
        self.budget = 0.0
        # Images to be probed at any cost: the first ones, as a stream may be of one class from its beginning.
        self.forced_probes = FEW_CLASSES_WINDOW + 1 if self.source.trained else 0
        self.adapts = bool(method.adapted)  # otherwise there may be nothing to compare
        self._class_change_seen = self._few_classes_seen = False
        self._return_distrusted = 0  # images for which the end of the drift is not believed
        self._distance: float | None = None  # of the weights, as of the last probe
        self._pending: list[tuple[Tensor, Tensor]] = []  # images to be probed, with what was served for them

    def add_inputs(self, images: Tensor, statistics: Values, *, drifting: bool) -> bool:
        """Take the input statistics (2, c) of a batch; returns whether it ends the current drift."""
        self.monitors.add_inputs(len(images), statistics, drift_limit=self.limits.drift if drifting else None)
        self._return_distrusted = max(0, self._return_distrusted - len(images))
        self.monitors.returned = self.monitors.returned and self._like_reference_inside(images)
        return self.monitors.returned

    def _like_reference_inside(self, images: Tensor) -> bool:
        """Whether images that are like the reference at the first norm are so in the middle: noise is not."""
        trained, depths = self.source.trained, self.monitors.depths
        if trained is None or depths is None or len(images) < MIN_PROBED:
            return True
        if not self._return_distrusted and depths.of_middle(trained.norm_inputs(images)[0]) > MAX_NORM_DISTANCE:
            self._return_distrusted = CLASS_WINDOW  # tried again after so many, as it takes a pass
        return not self._return_distrusted

    def add_predictions(self, images: Tensor, output: Tensor, *, passes: int) -> bool:
        """Take what was served, (n, classes, ...), and probe the images if that is due; False if it is not finite.

        `passes`: forward passes of the method for this batch, a share of which the probes may take.
        """
        predictions = probability_rows(output, probabilities=self._probabilities).cpu().numpy()
        if not math.isfinite(predictions.sum()):
            return False
        self.monitors.add_predictions(predictions)
        if self.adapts or self.source.trained is not None:
            earned = self.guard.budget * passes * len(images)
            self.budget = min(self.budget + earned, 2 * MAX_PROBED * self.source.passes)
            self.forced_probes = max(0, self.forced_probes - len(images))
            changed = self._classes_changed()
            if changed and not self._class_change_seen:  # once: a drift may change the classes for good
                self.forced_probes = CLASS_WINDOW
            self._class_change_seen = changed
            self._probe_if_due(images, output)
        return True

    def _probe_if_due(self, images: Tensor, output: Tensor) -> None:
        """Let the source predict a sample of the batch if the budget allows it, or if it is forced."""
        stride = -(-len(images) // MAX_PROBED)
        enough, price = len(images) >= MIN_PROBED, -(-len(images) // stride) * self.source.passes
        if enough and not self.forced_probes and self.budget < price:
            self._pending = []  # another batch as large will do
            return
        sample = slice(None, None, stride)
        self._pending.append((images[sample], output[sample].detach()))
        while sum(len(i) for i, _ in self._pending[1:]) >= MIN_PROBED:
            self._pending.pop(0)
        waiting = sum(len(i) for i, _ in self._pending)
        price = waiting * self.source.passes
        if waiting >= MIN_PROBED and (self.budget >= price or self.forced_probes):
            self._probe()
            self.budget -= min(price, max(self.budget, 0))

    def _probe(self) -> None:
        alike = [pair for pair in self._pending if pair[0].shape[1:] == self._pending[-1][0].shape[1:]]
        images, output = (torch.cat(tensors) for tensors in zip(*alike, strict=True))
        self._pending, self._distance = [], None
        adapted, source = self.source.compare(images, output)
        adapted = adapted if self.adapts else source  # where nothing is learned, nothing can be wrong with it
        self.monitors.add_probe(adapted, source, self.source.compare_statistics(images, source))
        few = self.monitors.suggests_few_classes()
        if few and not self._few_classes_seen:  # once: in noise the statistics disagree for good
            self.forced_probes = max(self.forced_probes, FEW_CLASSES_WINDOW + 1)
        self._few_classes_seen = few
        if self.canary is None and len(source) == len(images):
            self.reservoir.offer(images, source)

    def _classes_changed(self) -> bool:
        """Whether the served classes have changed so much that the source should be asked at once."""
        change, shift = self.monitors.changes()
        return change < SUSPICIOUS_CHANGE or (
            shift is not None and self.limits.class_shift is not None and shift > self.limits.class_shift
        )

    def check(self, method: Method, images: Tensor, *, strict: bool = False, drifting: bool = False) -> Check | None:
        """Score the state on the canary, else on this batch; None where there is nothing to score it on.

        `strict` halves the tolerance, for a state that has failed before. During a drift the tolerance is larger: what
        is learned there is not meant for the canary, and is dropped for the source when the drift ends.
        """
        self.adapts = self.adapts or _holds_tensors(method.state_dict())
        if not self.adapts or (self.source.follows_stream and not method.adapted):
            return None
        canary, tolerance = self.canary, CANARY_TOLERANCE
        if canary is not None and drifting and self.limits.every is not None:
            tolerance = DRIFT_TOLERANCE
        if canary is None:
            canary, tolerance = (
                self.reservoir.canary(self.source, classes=self.monitors.classes or 2),
                RESERVOIR_TOLERANCE,
            )
        if canary is not None:
            least, on = canary.expected - tolerance / (1 + strict), str(canary.kind)
        elif len(images) >= MIN_PROBED:
            canary, on = Canary.trusted(images[:MAX_PROBED], self.source), "batch"
            least = (1 + MIN_AGREEMENT) / 2 if strict else MIN_AGREEMENT
        else:
            return None
        return Check(on, len(canary.images), canary.score(self.source.predict_adapted(canary.images)), least)

    def read(self, method: Method, images: int, *, drifting: bool, few: bool) -> tuple[Reading, dict[Kind, str]]:
        """The present reading of the stream, and its alarms."""
        if self._distance is None:
            self._distance = weight_distance(method)
        reading = self.monitors.read(images, weight_distance=self._distance, skipped=method.counters.skipped)
        bounds = {"agreement": MIN_AGREEMENT, "weight_distance": MAX_WEIGHT_DISTANCE}
        return reading, find_alarms(reading, self.limits, **bounds, drifting=drifting, few=few)

    def forget_predictions(self) -> None:
        """Clear what was served and probed, since the state is another one now."""
        self.monitors.forget_predictions()
        self._pending, self._distance = [], None

    def state(self) -> dict[str, Any]:
        """State as tensors and plain values; drops images that wait for a probe, which are not part of it."""
        self._pending = []
        return {
            "monitors": self.monitors.state(),
            "reservoir": self.reservoir.state(),
            "credit": self.budget,
            "doubt": self.forced_probes,
            "suspected": self._class_change_seen,
            "differed": self._few_classes_seen,
            "doubted": self._return_distrusted,
            "distance": self._distance,
            "learns": self.adapts,
        }

    def check_state(self, state: Any) -> None:
        """Refuse what `state` cannot have returned; nothing is changed."""
        if not isinstance(state, Mapping):
            raise StateError(f"the snapshot's monitor is a {type(state).__name__}; a dict is wanted")
        names = set(self.state())
        missing, unknown = names - {"differed", "doubted"} - set(state), set(state) - names
        if missing or unknown:
            raise StateError(
                f"the snapshot's monitor lacks or has the unknown {show(sorted(map(str, missing | unknown)))}"
            )
        for name, kinds, least, most in (
            ("credit", (int, float), -1e12, 1e12),
            ("doubt", (int,), 0, CLASS_WINDOW),
            ("doubted", (int,), 0, CLASS_WINDOW),
            ("suspected", (bool,), 0, 1),
            ("differed", (bool,), 0, 1),
            ("learns", (bool,), 0, 1),
            ("distance", (float,), 0, 1e30),
        ):
            value: Any = state.get(name)
            optional = name in ("differed", "doubted", "distance") and value is None
            if not optional and (type(value) not in kinds or not least <= value <= most):
                raise StateError(
                    f"the snapshot's {name} is {show(value)}; a {kinds[-1].__name__} from {least} to {most} is wanted"
                )
        self.monitors.check_state(state["monitors"])
        self.reservoir.check_state(state["reservoir"], self.source)

    def load(self, state: Mapping[str, Any]) -> None:
        like = next(self.source.network.parameters())
        self.monitors.load(state["monitors"])
        self.reservoir.load(state["reservoir"], like)
        self.budget, self.forced_probes, self.adapts = state["credit"], state["doubt"], state["learns"]
        self._class_change_seen, self._few_classes_seen = state["suspected"], state.get("differed") or False
        self._return_distrusted = state.get("doubted") or 0
        self._pending, self._distance = [], state["distance"]


def _holds_tensors(state: Any) -> bool:
    """Whether a method's state is more than counters."""
    if isinstance(state, Mapping):
        return any(map(_holds_tensors, state.values()))
    return isinstance(state, Tensor) or (isinstance(state, (list, tuple)) and any(map(_holds_tensors, state)))
