"""Watching a method at a bounded cost: its inputs, its predictions, and what the source network says of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from trust_tta.live.alarms import Kind, Limits, Reference, canary_of, find_alarms
from trust_tta.live.guard import Guard
from trust_tta.live.inputs import Fetched
from trust_tta.live.judge import Canary, Judge, Reservoir
from trust_tta.live.monitors import (
    CLASS_WINDOW,
    OPINION_WINDOW,
    Monitors,
    Reading,
    Values,
    host_rows,
    weight_distance,
)
from trust_tta.methods.base import Method

MOST_PROBED = 64  # images that the source predicts at once
FEWEST_PROBED = 16  # fewer give poor batch statistics: small batches are gathered first
FAR_INSIDE = 4.0  # units at the middle norm above which images are not like the reference, whatever the first one says
SUSPICIOUS_CHANGE = 0.7  # ratio of the effective number of classes to that of the window before


@dataclass(frozen=True)
class Check:
    """The score of a state on a canary, or its agreement with the source on a batch where there is no canary."""

    on: str
    images: int
    score: float
    least: float

    @property
    def passed(self) -> bool:
        return self.score >= self.least

    def evidence(self) -> dict[str, Any]:
        return {"canary": self.on, "canary_images": self.images, "score": self.score, "least": self.least}


@dataclass(slots=True, eq=False)
class _Served:
    """Predictions (n, classes, ...) that a caller holds too, and how often they had been written to."""

    rows: Tensor
    version: int | None

    @classmethod
    def of(cls, output: Tensor) -> Self:
        return cls(output.detach(), None if output.is_inference() else output._version)

    @property
    def unchanged(self) -> bool:
        """Whether they are still what was served: a caller may do with them as it likes."""
        return self.version is None or self.rows._version == self.version


class Watch:
    """The monitors, judge and canary of one method. `credit`: how many images may still be judged."""

    def __init__(self, method: Method, guard: Guard, *, reference: Reference | None, canary: Any) -> None:
        self.guard, self.judge, self._probabilities = guard, Judge(method), method.probabilities
        self.limits = reference.limits if reference else Limits()
        inputs = reference.inputs if reference else self.judge.training_statistics
        self.monitors = Monitors(
            input_reference=inputs,
            class_reference=reference.classes if reference else None,
            depths=reference.depths if reference else None,
        )
        self.canary: Canary | None = None
        if canary is not None:
            self.canary = make_canary(canary, self.judge)
        elif reference is not None:
            first = next(method.model.parameters(), reference.canary)
            self.canary = canary_of(reference, self.judge, first)
        self.reservoir = Reservoir()
        self.credit = 0.0
        # Images to be judged at any cost: the first ones, as a stream may be of one class from its beginning.
        self.doubt = OPINION_WINDOW + 1 if self.judge.trained else 0
        self._suspected = self._differed = False
        self._doubted = 0  # images for which the end of the drift is not believed
        self._distance: float | None = None  # of the weights, as of the last probe
        self.learns = bool(method.adapted)  # otherwise there may be nothing to judge
        self._pending: list[tuple[Tensor, Tensor]] = []  # images still to be judged, with what was served for them
        self._served: list[_Served] = []  # predictions that the monitors have not seen yet
        self._fetched: Fetched | None = None
        self._last: Fetched | None = None  # whose memory the next one takes
        self._work = self._images = 0  # done for these

    def look(self, images: Tensor, statistics: Values, *, drifting: bool) -> bool:
        """Take the input statistics (2, c) of a batch; whether it ends the current drift, if there is one."""
        self.monitors.see_inputs(len(images), statistics, drift_limit=self.limits.drift if drifting else None)
        self._doubted = max(0, self._doubted - len(images))
        self.monitors.returned = self.monitors.returned and self._differs_nowhere(images)
        return self.monitors.returned

    def _differs_nowhere(self, images: Tensor) -> bool:
        """Whether images that are like the reference at the first norm are so in the middle: noise is not."""
        trained, depths = self.judge.trained, self.monitors.depths
        if trained is None or depths is None or len(images) < FEWEST_PROBED:
            return True
        if not self._doubted and depths.of_middle(trained.depths(images)[0]) > FAR_INSIDE:
            self._doubted = CLASS_WINDOW  # asked again after so many, as it takes a pass
        return not self._doubted

    def differs(self) -> bool:
        """Whether the last images are beyond the limit of drift."""
        distance = self.monitors.input_distance()
        return distance is not None and self.limits.drift is not None and distance > self.limits.drift

    def keep(self, output: Tensor, *, work: int) -> None:
        """Keep what was served for a batch, (n, classes, ...), for `see`.

        `work`: what was done for it, in forward passes of one image.
        """
        self._served.append(_Served.of(output))
        self._fetched = None
        self._work, self._images = self._work + work, self._images + output.shape[0]

    @property
    def behind(self) -> int:
        """How many batches were served that the monitors have not seen."""
        return len(self._served)

    def fetch(self) -> None:
        """Begin to bring what was kept to the host, so that a later `see` need not wait for the device."""
        self._served = [served for served in self._served if served.unchanged]
        if self._served:
            rows = torch.cat([served.rows for served in self._served])
            self._fetched = self._last = Fetched.of(rows, over=self._last)

    def see(self, images: Tensor | None) -> bool:
        """Let the monitors see what was kept; False if it is not finite. The work pays for asking the source.

        images: (n, c, h, w), those of the last batch; None asks nobody.
        """
        fetched, served, work, seen = self._fetched, self._served, self._work, self._images
        self._fetched, self._served, self._work, self._images = None, [], 0, 0
        served = [one for one in served if fetched is not None or one.unchanged]
        if not served:
            return True
        output = rows = served[-1].rows
        if fetched is not None:
            rows = fetched.wait()
        elif len(served) > 1:
            rows = torch.cat([one.rows for one in served])
        predictions = host_rows(rows, probabilities=self._probabilities)
        if not math.isfinite(predictions.sum()):
            return False
        self.monitors.see_predictions(predictions)
        if self._asks:
            self.credit = min(self.credit + self.guard.budget * work, 2 * MOST_PROBED * self.judge.passes)
            self.doubt = max(0, self.doubt - seen)
            suspicious = self._suspicious()
            if suspicious and not self._suspected:  # once: a drift may change the classes for good
                self.doubt = CLASS_WINDOW
            self._suspected = suspicious
            if images is not None:
                self._judge(images, output)
        return True

    @property
    def _asks(self) -> bool:
        """Whether there is anything to ask the source."""
        return self.learns or self.judge.trained is not None

    def affords(self, images: int) -> bool:
        """Whether asking the source about so many is paid for."""
        return self._asks and self.credit >= min(max(images, FEWEST_PROBED), MOST_PROBED) * self.judge.passes

    def _judge(self, images: Tensor, output: Tensor) -> None:
        """Ask the source about a batch if that is paid for, or if there is doubt."""
        stride = -(-len(images) // MOST_PROBED)
        enough, price = len(images) >= FEWEST_PROBED, -(-len(images) // stride) * self.judge.passes
        if enough and not self.doubt and self.credit < price:
            self._pending = []  # another batch as large will do
            return
        sample = slice(None, None, stride)
        self._pending.append((images[sample], output[sample].detach()))
        while sum(len(i) for i, _ in self._pending[1:]) >= FEWEST_PROBED:
            self._pending.pop(0)
        waiting = sum(len(i) for i, _ in self._pending)
        price = waiting * self.judge.passes
        if waiting >= FEWEST_PROBED and (self.credit >= price or self.doubt):
            self._probe()
            self.credit -= min(price, max(self.credit, 0))

    def _probe(self) -> None:
        alike = [pair for pair in self._pending if pair[0].shape[1:] == self._pending[-1][0].shape[1:]]
        images, output = (torch.cat(tensors) for tensors in zip(*alike, strict=True))
        self._pending = []
        self._distance = None
        learned, source = self.judge.compare(images, output)
        learned = learned if self.learns else source  # where nothing is learned, nothing can be wrong with it
        self.monitors.see_probe(learned, source, self.judge.second_opinion(images, source))
        differs = self.monitors.opinions_differ()
        if differs and not self._differed:  # once: in noise they differ for good
            self.doubt = max(self.doubt, OPINION_WINDOW + 1)
        self._differed = differs
        if self.canary is None and len(source) == len(images):
            self.reservoir.offer(images, source)

    def _suspicious(self) -> bool:
        """Whether what is served has changed so much that the source should be asked at once."""
        change, shift = self.monitors.changes()
        return change < SUSPICIOUS_CHANGE or (
            shift is not None and self.limits.class_shift is not None and shift > self.limits.class_shift
        )

    def check(self, method: Method, images: Tensor, *, strict: bool = False, drifting: bool = False) -> Check | None:
        """Try the state on the canary, else on this batch; None where there is nothing to try it on.

        `strict` halves the tolerance, for a state that has failed before. During a drift the tolerance is larger: what
        is learned there is not meant for the canary, and is given up for the source when the drift ends.
        """
        self.learns = self.learns or _holds_tensors(method.state_dict())
        if not self.learns or (self.judge.follows_stream and not method.adapted):
            return None
        canary, tolerance = self.canary, self.guard.canary_tolerance
        if canary is None:
            classes = self.monitors.classes or 2
            canary, tolerance = self.reservoir.canary(self.judge, classes=classes), self.guard.reservoir_tolerance
        if drifting and canary is self.canary and self.limits.every is not None:
            tolerance = max(tolerance, self.guard.drift_tolerance)
        if canary is not None:
            score = canary.score(self.judge.try_state(canary.images))
            return Check(canary.kind, len(canary.images), score, canary.expected - tolerance / (1 + strict))
        if len(images) < FEWEST_PROBED:
            return None
        canary = Canary.trusted(images[:MOST_PROBED], self.judge)
        score = canary.score(self.judge.try_state(canary.images))
        least = (1 + self.guard.agreement) / 2 if strict else self.guard.agreement
        return Check("batch", len(canary.images), score, least)

    def read(
        self, method: Method, images: int, *, drifting: bool, few: bool, anew: bool = False
    ) -> tuple[Reading, dict[Kind, str]]:
        """The present reading of the stream, and its alarms; `anew`, with the distance of the weights as they are."""
        if anew or self._distance is None:
            self._distance = weight_distance(method)
        reading = self.monitors.read(images, weight_distance=self._distance, skipped=method.counters.skipped)
        guard = self.guard
        bounds = {"agreement": guard.agreement, "weight_distance": guard.weight_distance}
        return reading, find_alarms(reading, self.limits, **bounds, drifting=drifting, few=few)

    def forget_predictions(self) -> None:
        """Forget them, since the state is another one now."""
        self.monitors.forget_predictions()
        self._pending, self._distance = [], None
        self._fetched, self._served, self._work, self._images = None, [], 0, 0

    def state(self) -> dict[str, Any]:
        """As tensors and plain values, without the images still to be judged, which this watch drops too.

        Predictions that were kept are not part of it: let the monitors see them before.
        """
        self._pending = []
        return {
            "monitors": self.monitors.state(),
            "reservoir": self.reservoir.state(),
            "credit": self.credit,
            "doubt": self.doubt,
            "suspected": self._suspected,
            "differed": self._differed,
            "doubted": self._doubted,
            "distance": self._distance,
            "learns": self.learns,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        like = next(self.judge.network.parameters())
        self.monitors.load(state["monitors"])
        self.reservoir.load(state["reservoir"], like)
        self.credit, self.doubt, self.learns = state["credit"], state["doubt"], state["learns"]
        self._suspected, self._differed = state["suspected"], state.get("differed", False)
        self._doubted = state.get("doubted", 0)
        self._pending, self._distance = [], state["distance"]
        self._fetched, self._served, self._work, self._images = None, [], 0, 0


def _holds_tensors(state: Any) -> bool:
    """Whether a method's state is more than counters."""
    if isinstance(state, Mapping):
        return any(map(_holds_tensors, state.values()))
    return isinstance(state, Tensor) or (isinstance(state, (list, tuple)) and any(map(_holds_tensors, state)))


def make_canary(given: Any, judge: Judge) -> Canary:
    """A canary from images (m, ...), or from a pair of images and labels."""
    if isinstance(given, (tuple, list)) and len(given) == 2:
        return Canary.labeled(given[0], torch.as_tensor(given[1]), judge)
    return Canary.trusted(given, judge)
