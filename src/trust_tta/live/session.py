"""One adapting method under its guard: checks each batch, adapts or predicts, and acts on alarms. Not thread-safe."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trust_tta.errors import ConfigError, DataError, StateError
from trust_tta.live.alarms import Kind, Reference
from trust_tta.live.counters import StreamCounters
from trust_tta.live.guard import Action, Event, EventKind, Guard
from trust_tta.live.health import MIN_AGREEMENT, Check, HealthMonitor
from trust_tta.live.inputs import ImageStats, blank, examine, mostly_repeated, usable
from trust_tta.live.monitors import CLASS_WINDOW, Reading, Values, probability_rows
from trust_tta.live.snapshots import Memory, Snapshot, Snapshots
from trust_tta.methods.base import Method
from trust_tta.methods.validation import all_finite
from trust_tta.schema import show

FREE_UPDATES = 16  # after which checks are paid for from the budget
MIN_DRIFT_RATIO = 2.0  # times the limit: a short drift must have gone this far for its end to count
KEPT_SNAPSHOTS = 4  # besides the last good one
LASTING_ALARMS = ("drift", "class_shift", "few_classes", "broken_input", "single_image")


@dataclass(frozen=True, eq=False)
class Result:
    """The result of a call: `logits` (n, classes), whether the method `adapted` on the batch, and its `events`.

    Rows of images that are not finite are NaN. `reading`: the monitored statistics, if there is a guard.
    """

    logits: Tensor
    adapted: bool
    events: tuple[Event, ...]
    reading: Reading | None = None


class Session:
    """A method, its health monitor, the guard's policy and the snapshots."""

    def __init__(
        self,
        method: Method,
        guard: Guard | None,
        store: Snapshots,
        *,
        reference: Reference | None,
        canary: Any,
        on_event: Callable[[Event], None] | None,
    ) -> None:
        self.method, self.store = method, store
        self.policy = guard or Guard()
        self.monitor = HealthMonitor(method, guard, reference=reference, canary=canary) if guard else None
        self.counters = StreamCounters()
        self.reading: Reading | None = None
        self.saved = True  # whether the last snapshot was written
        self._alarms: dict[str, Action] = {}  # current alarms, and the action on each
        self._events: list[Event] = []  # of this call
        self._on_event = on_event
        self._no_images = next(method.model.parameters()).new_zeros(0)  # for checks on the canary alone

    # One batch

    def step(self, images: Tensor, *, adapt: bool = True) -> Result:
        """Predict images (n, c, h, w), and adapt on them unless told not to or an alarm forbids it.

        Without `adapt` the batch passes the same checks, which may restore an earlier state; it is not counted.
        """
        self._events = []
        counters, n = self.counters, len(images)
        if adapt:
            counters.batches += 1
            counters.images += n
            counters.since_snapshot += n  # before anything is saved: a restart from there has seen them
        stats, inputs = self.monitor.source.inspect(images) if self.monitor else (examine(images), None)
        good, monitored = self._check_images(stats)
        if good.all():
            logits, adapted = self._step(images, inputs, adapt=adapt, monitored=monitored)
        else:
            logits, adapted, images = self._step_on_good(images, stats, good, adapt=adapt, monitored=monitored)
        if adapt and counters.since_snapshot >= self.policy.snapshot_every:
            self._save_if_healthy(images)
        return Result(logits, adapted, tuple(self._events), self.reading)

    def _check_images(self, stats: ImageStats) -> tuple[NDArray[np.bool_], bool]:
        """Mask (n,) of the images to adapt on; and whether the batch counts for the monitors. Raises `broken_input`."""
        finite = usable(stats)
        good = finite & ~blank(stats) if self.monitor else finite
        n, bad = len(good), int((~good).sum())
        kind = "blank" if finite.all() else "not finite"
        reason = f"{'half of the images or more' if 2 * bad >= n else 'some images'} are {kind}" if bad else ""
        broken = 2 * bad >= n
        if not bad and self.monitor and mostly_repeated(stats):
            reason, broken, bad = "most images are the same", True, n
        if reason:
            self._begin_broken_input(self.policy.on_broken_input if broken else "none", reason, bad)
        else:
            self._alarms.pop("broken_input", None)
        return good, not broken

    def _step_on_good(
        self, images: Tensor, stats: ImageStats, good: NDArray[np.bool_], *, adapt: bool, monitored: bool
    ) -> tuple[Tensor, bool, Tensor]:
        """Logits of all images, whether the method adapted on the good ones, and these; rows not finite are NaN."""
        mask = torch.from_numpy(good).to(images.device)
        chosen, adapted = images[mask], False
        if len(chosen):
            inputs = self.monitor.source.input_statistics(chosen) if self.monitor else None
            part, adapted = self._step(chosen, inputs, adapt=adapt, monitored=monitored)
        else:
            part = self.predict(images.new_zeros(1, *images.shape[1:]))[:0]
        logits = part.new_full((len(good), *part.shape[1:]), float("nan"))
        logits[mask] = part
        is_blank = torch.from_numpy(usable(stats) & ~good).to(images.device)
        if is_blank.any():
            logits[is_blank] = self._predict_alone(images[is_blank]).to(logits)
        return logits, adapted, chosen

    def _step(self, images: Tensor, inputs: Values | None, *, adapt: bool, monitored: bool) -> tuple[Tensor, bool]:
        """Predict good images, and adapt on them if nothing forbids it. `inputs`: their channel statistics (2, c)."""
        monitor, counters = self.monitor, self.counters
        if self._lacks_statistics(images):
            return self._predict_single_image(images), False
        if monitor is None or inputs is None:
            return self._adapt(images) if adapt and not counters.paused else (self.predict(images), False)
        drifting = "drift" in self._alarms
        returned = monitored and monitor.add_inputs(images, inputs, drifting=drifting)
        # A state that is about to be dropped learns nothing more.
        leaving = returned and self._return_action(monitor) in ("source", "rollback")
        if adapt and not leaving and self._may_update(drifting=drifting and not returned):
            return self._update(monitor, images)
        logits = self.predict(images)
        if adapt and not counters.paused:  # the skipped update pays for a probe
            monitor.budget = max(monitor.budget, monitor.source.passes * len(images))
        if monitored and self._observe(monitor, images, logits, passes=1):
            logits = self.predict(images)
        return logits, False

    def _update(self, monitor: HealthMonitor, images: Tensor) -> tuple[Tensor, bool]:
        """Adapt on a batch and check the result; if it was undone, predict by the state restored."""
        counters, probation = self.counters, self.counters.update_interval > 1
        counters.updates, counters.at_source = counters.updates + 1, False
        # The first updates show whether the learning rate is ruinous; after a collapse every update is checked.
        early = counters.updates & (counters.updates - 1) == 0
        due = early or probation or counters.since_check >= self.policy.check_every
        before = self.method.state_dict() if probation else None
        passes = self._count_passes()
        logits, adapted = self._adapt(images)
        passes = max(1, self._count_passes() - passes)
        check = monitor.check(self.method, images, strict=probation, drifting="drift" in self._alarms) if due else None
        if check and counters.updates > FREE_UPDATES:
            monitor.budget -= check.images
        counters.since_check = 0 if due else counters.since_check + len(images)
        if self._observe(monitor, images, logits, passes=passes, check=check, before=before):
            return self.predict(images), False
        return logits, adapted

    def _adapt(self, images: Tensor) -> tuple[Tensor, bool]:
        """The method's prediction, and whether it adapted: not if that gave values that are not finite."""
        try:
            return self.method(images), True
        except DataError:
            return self.evaluate(images), False

    def _may_update(self, *, drifting: bool) -> bool:
        held = "skip" in self._alarms.values() or self._alarms.get("few_classes") == "source"
        if self.counters.paused or held:
            return False
        only_drifts = self.counters.collapsed or self.counters.returned
        if only_drifts and not drifting and self.monitor and self.monitor.monitors.knows_inputs:
            return False  # without a drift there is nothing to adapt to: stay at the source
        return self.counters.take_turn()

    def _count_passes(self) -> int:
        """Forward passes of the method so far; a backward pass counts as two."""
        return self.method.counters.forwards + 2 * self.method.counters.backwards

    # Predictions

    def evaluate(self, images: Tensor) -> Tensor:
        """Predict by the state as it is: logits or probabilities, as the method does."""
        return self._as_output(self.method.evaluate(images))

    def predict(self, images: Tensor) -> Tensor:
        """Logits of the method; while images are of few classes, of the source with its training statistics."""
        few = self._alarms.get("few_classes") == "source"
        trained = self.monitor.source.trained if self.monitor and few else None
        if trained is None or self.method.options.statistics != "batch":  # those of a stream are the source's by then
            return self.evaluate(images)
        return self._as_output(trained(images))

    def _predict_alone(self, images: Tensor) -> Tensor:
        """By the source with the statistics of its training, where it has any, for images unlike the rest."""
        trained = self.monitor.source.trained if self.monitor else None
        return self.evaluate(images) if trained is None else self._as_output(trained(images))

    def _lacks_statistics(self, images: Tensor) -> bool:
        """Whether this is a single image for a method that normalizes with the statistics of the batch."""
        dense = getattr(self.method.model, "dense", False)  # whose pixels make up for images
        return len(images) == 1 and self.method.statistics.of_batches and not dense

    def _predict_single_image(self, images: Tensor) -> Tensor:
        """By the source with the statistics of its training, with an event the first time; refused without these."""
        if self.monitor is None or self.monitor.source.trained is None:
            raise ConfigError(
                f"'{self.method.name}' normalizes with the statistics of the batch, and this batch is a single image; "
                'create the method with statistics="stream", or give batches of 8 or more'
            )
        reason = (
            "a single image has no batch statistics: predicted by the source with those of its training, and not "
            'learned from; statistics="stream" adapts on single images'
        )
        self._begin("single_image", "none", reason, {})
        return self._predict_alone(images)

    def _as_output(self, logits: Tensor) -> Tensor:
        return logits.softmax(1) if self.method.probabilities else logits

    # From observations to actions

    def _observe(
        self,
        monitor: HealthMonitor,
        images: Tensor,
        logits: Tensor,
        *,
        passes: int,
        check: Check | None = None,
        before: dict[str, Any] | None = None,
    ) -> bool:
        """Give the served predictions to the monitor and act on its alarms; True if the state was changed.

        `before`: the state before the update, while each one is checked.
        """
        if not monitor.add_predictions(images, logits, passes=passes):
            if self.counters.at_source:
                return self._begin("broken_input", self.policy.on_broken_input, "predictions are not finite", {})
            return self._collapse("the predictions are not finite", {}, before)
        drifting, few = "drift" in self._alarms, "few_classes" in self._alarms
        self.reading, alarms = monitor.read(self.method, self.counters.images, drifting=drifting, few=few)
        if not alarms and not self._alarms and check is None:
            return False  # the usual case
        evidence = self.reading.as_dict() | (check.evidence() if check else {})
        if monitor.monitors.returned:
            return self._end_drift(monitor, evidence)
        if "few_classes" in alarms or few:
            changed = self._follow_few_classes(monitor, alarms, evidence)
            if self.policy.on_few_classes == "source":  # nothing is learned, so that nothing else can be wrong
                return changed
        if check and not check.passed:
            return self._collapse("the canary is predicted otherwise", evidence, before)
        if "collapse" in alarms:
            return self._collapse(alarms["collapse"], evidence, None)
        shifted = self._follow_class_shift(alarms, evidence)
        return self._follow_drift(monitor, alarms, evidence) or shifted

    def _collapse(self, reason: str, evidence: dict[str, Any], before: dict[str, Any] | None) -> bool:
        """Undo; the second time before a snapshot has proved good, go back to the source. Update less often."""
        if self.counters.at_source:
            return False  # there is nothing to undo
        self.counters.collapsed = True
        action: Action = self.policy.on_collapse
        if before is not None and action in ("rollback", "source"):
            self.method.load_state_dict(before)
            self._event("collapse", "skip", reason, evidence)
            self.counters.halve_update_rate()
            return True
        if action == "rollback" and self.counters.update_interval > 1:
            action = "source"
        return self._act("collapse", action, reason, evidence)

    def _follow_few_classes(self, monitor: HealthMonitor, alarms: Mapping[Kind, str], evidence: dict[str, Any]) -> bool:
        if "few_classes" in alarms:
            return self._begin("few_classes", self.policy.on_few_classes, alarms["few_classes"], evidence)
        if "few_classes" in self._alarms and evidence.get("trained_classes") is not None:
            at_source = self._alarms.pop("few_classes") == "source"
            self.counters.returned = self.counters.returned or (at_source and monitor.limits.every is not None)
            monitor.forget_predictions()  # of the few classes
            self._event("few_classes_over", "none", "the images are of many classes again", evidence)
        return False

    def _follow_class_shift(self, alarms: Mapping[Kind, str], evidence: dict[str, Any]) -> bool:
        if "class_shift" in alarms:
            return self._begin_class_shift(alarms["class_shift"], evidence)
        # Without a full window of the source's predictions nothing is known, so nothing ends.
        if "class_shift" in self._alarms and (evidence.get("source_shift") is not None or "drift" in alarms):
            del self._alarms["class_shift"]
            self._event("class_shift_over", "none", "the classes are those of the reference again", evidence)
        return False

    def _begin_class_shift(self, reason: str, evidence: dict[str, Any]) -> bool:
        """If updates are to be skipped, also undo those made before the shift showed."""
        action, undone = self.policy.on_class_shift, self.counters.updates
        if "class_shift" in self._alarms or action != "skip" or not undone:
            return self._begin("class_shift", action, reason, evidence)
        self.save(within_batch=True)
        restored = self.restore_good()
        self._begin("class_shift", action, reason, {**evidence, "undone": undone})
        self.save(good=restored == "source")
        return True

    def _follow_drift(self, monitor: HealthMonitor, alarms: Mapping[Kind, str], evidence: dict[str, Any]) -> bool:
        """A drift lasts until the images are closer to the reference than to the drift: see `_end_drift`."""
        distance = evidence.get("input_distance") or 0.0
        if "drift" in self._alarms:
            self.counters.peak_distance = max(self.counters.peak_distance, distance)
        elif "drift" in alarms:
            self.counters.peak_distance = distance
            monitor.monitors.begin_drift()
            return self._begin("drift", self.policy.on_drift, alarms["drift"], evidence)
        return False

    def _return_action(self, monitor: HealthMonitor) -> Action:
        """The action at the end of the current drift; none if it may have been chance."""
        limit = monitor.limits.drift
        far = limit is not None and self.counters.peak_distance >= MIN_DRIFT_RATIO * limit
        real = far or monitor.monitors.drifted_long
        return self.policy.on_return if real and not self.counters.at_source else "none"

    def _end_drift(self, monitor: HealthMonitor, evidence: dict[str, Any]) -> bool:
        action, evidence = self._return_action(monitor), {**evidence, "farthest": self.counters.peak_distance}
        monitor.monitors.end_drift()
        self.counters.peak_distance = 0.0
        self.counters.returned = self.counters.returned or (action == "source" and monitor.limits.every is not None)
        del self._alarms["drift"]
        monitor.forced_probes = CLASS_WINDOW
        return self._act("drift_over", action, "the images are like the reference again", evidence)

    def _begin_broken_input(self, action: Action, reason: str, images: int) -> None:
        """An event if there were no broken images before, or fewer; the action is this batch's."""
        if "broken_input" in self._alarms and action == "none":
            self._alarms["broken_input"] = action
        elif self._alarms.get("broken_input") == "none":
            del self._alarms["broken_input"]
        self._begin("broken_input", action, reason, {"images": images})

    def _begin(self, kind: EventKind, action: Action, reason: str, evidence: dict[str, Any]) -> bool:
        """Act on an alarm when it begins; it lasts until it is removed from `_alarms`."""
        if kind in self._alarms:
            return False
        self._alarms[kind] = action
        return self._act(kind, action, reason, evidence)

    def _act(self, kind: EventKind, action: Action, reason: str, evidence: dict[str, Any]) -> bool:
        """Act and record the event; True if the state was changed."""
        if action in ("rollback", "source"):
            self.save(within_batch=True)
            action = self.restore_good() if action == "rollback" else self.restore_source()
        if action == "pause":
            self.counters.paused = True
        if kind == "collapse" or action == "slow":
            self.counters.halve_update_rate()
        self._event(kind, action, reason, evidence)
        if action in ("rollback", "source", "pause"):
            self.save(good=action == "source")
        return action in ("rollback", "source")

    def _event(self, kind: EventKind, action: str, reason: str, evidence: Mapping[str, Any]) -> Event:
        counters = self.counters
        counters.events += 1
        event = Event(counters.events, counters.batches, time.time(), kind, action, reason, dict(evidence))
        self._events.append(event)
        if self._on_event is not None:
            self._on_event(event)
        return event

    # States of other streams

    def adopt(
        self, change: Callable[[], None], images: Tensor, *, served: Tensor | None = None, canary: bool = True
    ) -> Event:
        """Let `change` alter the method's state; undo it if that is wrong for the images (n, c, h, w).

        `served`: predictions (m, classes) for the last of them. If these, and the `canary` where it is asked for, stay
        clearly the same, that is enough; otherwise, or without `served`, all images are predicted before and after.
        """
        self._events = []
        before = self.method.state_dict()
        change()
        if served is not None:
            reason, evidence = self._check_change(served, images[-len(served) :], canary=canary)
            if not reason and evidence.get("agreement", 1.0) >= (1 + MIN_AGREEMENT) / 2:
                return self._adopted(evidence)
        self.method.load_state_dict(before)
        served = self.evaluate(images)
        change()
        reason, evidence = self._check_change(served, images)
        if reason:
            self.method.load_state_dict(before)
            return self._event("merge", "return", reason, evidence)
        return self._adopted(evidence)

    def _adopted(self, evidence: dict[str, Any]) -> Event:
        self.counters.at_source = False
        return self._event("merge", "take", "what others learned works for these images", evidence)

    def _check_change(self, served: Tensor, images: Tensor, *, canary: bool = True) -> tuple[str, dict[str, Any]]:
        """Why a change of state is wrong, or "", and the evidence. `served`: the predictions before it."""
        logits = self.evaluate(images)
        if not bool(all_finite(logits)):
            return "the predictions are not finite", {}
        if self.monitor is None:
            return "", {}
        old, new = (probability_rows(output, probabilities=self.method.probabilities) for output in (served, logits))
        weights = old.amax(1)
        agreement = float((weights * (old.argmax(1) == new.argmax(1))).sum() / weights.sum())
        check = self.monitor.check(self.method, images) if canary else None
        evidence = {"agreement": agreement} | (check.evidence() if check else {})
        if agreement < MIN_AGREEMENT:
            return "the images are predicted otherwise than before", evidence
        return ("the canary is predicted otherwise" if check and not check.passed else ""), evidence

    # Snapshots

    def start(self, snapshot: int, problems: list[str]) -> None:
        """Begin from a snapshot that was loaded or, if its number is 0, from the method as it is."""
        if problems or snapshot:
            reason = "a damaged snapshot was passed over" if problems else "went on from a snapshot"
            self._event("start", "none", reason, {"snapshot": snapshot, "problems": problems})
        else:
            self.save(good=True)

    def on_request(self, action: str, do: Callable[[], str | None]) -> Event:
        """Do what a person asked for, with a snapshot before and after."""
        self.save()
        done = do() or action
        event = self._event("request", done, "asked for", {})
        self.save(good=done in ("source", "load"))
        return event

    def restore_good(self) -> Action:
        """Back to the last good snapshot, or to the source if it cannot be read or is no longer good."""
        try:
            self.method.load_state_dict(self.store.read(self.counters.good_snapshot).state["method"])
        except StateError:
            return self.restore_source()
        drifting, monitor = "drift" in self._alarms, self.monitor
        check = monitor.check(self.method, self._no_images, strict=True, drifting=drifting) if monitor else None
        if check and not check.passed:
            return self.restore_source()
        self._forget()
        return "rollback"

    def restore_source(self) -> Action:
        self.method.reset()
        self._forget()
        self.counters.at_source = True
        return "source"

    def start_over(self) -> Action:
        """Back to the source; what failed before may be tried again."""
        counters = self.counters
        counters.collapsed = counters.returned = False
        counters.update_interval, counters.update_delay = 1, 0
        return self.restore_source()

    def _forget(self) -> None:
        self.counters.updates = self.counters.since_check = self.counters.candidate_snapshot = 0
        self._alarms.pop("class_shift", None)
        if self.monitor is not None:
            self.monitor.forget_predictions()

    def _save_if_healthy(self, images: Tensor) -> None:
        """Write a snapshot; the previous one has proved good if nothing happened since. If the check fails, undo."""
        counters, monitor = self.counters, self.monitor
        stale = 2 * counters.since_check >= self.policy.snapshot_every
        if monitor is not None and counters.updates and len(images) and stale:
            check = monitor.check(self.method, images, drifting="drift" in self._alarms)
            counters.since_check = 0
            monitor.budget -= check.images if check else 0
            if check and not check.passed:
                self._collapse("the canary is predicted otherwise", check.evidence(), None)
                return
        if counters.candidate_snapshot:
            counters.good_snapshot = counters.candidate_snapshot
            counters.double_update_rate()
        self.save(candidate=True)

    def save(self, *, good: bool = False, candidate: bool = False, within_batch: bool = False) -> bool:
        """Write the state; a failing disk is an event, not the end of the stream. True if it was written."""
        counters = self.counters
        counters.last_snapshot += 1
        counters.since_snapshot = 0
        if good:
            counters.good_snapshot = counters.last_snapshot
        if candidate:
            counters.candidate_snapshot = counters.last_snapshot
        try:
            state = {"method": self.method.state_dict(), **self.state()}
            self.store.write(Snapshot(counters.last_snapshot, state, within_batch=within_batch))
            keep = 1 if isinstance(self.store, Memory) else KEPT_SNAPSHOTS
            self.store.prune(keep, always=(counters.good_snapshot, counters.candidate_snapshot))
            self.saved = True
        except StateError as error:
            self._event("storage", "none", str(error), {"snapshot": counters.last_snapshot})
            self.saved = False
        return self.saved

    def state(self) -> dict[str, Any]:
        """Everything but the method's state, as tensors and plain values, under the names of the file format."""
        monitor = self.monitor.state() if self.monitor else None
        return {"books": vars(self.counters).copy(), "lasting": dict(self._alarms), "watch": monitor}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a snapshot that `state` cannot have returned; nothing is changed."""
        missing = [name for name in ("method", "books", "lasting", "watch") if name not in state]
        if missing:
            raise StateError(f"the snapshot has no '{missing[0]}': it is not of a stream, or of another version")
        StreamCounters.from_state(state["books"])
        alarms = state["lasting"]
        if not isinstance(alarms, Mapping) or any(
            kind not in LASTING_ALARMS or action not in get_args(Action) for kind, action in alarms.items()
        ):
            raise StateError(f"the snapshot's alarms are {show(alarms)}; a dict of alarms and actions is wanted")
        if self.monitor is not None and state["watch"] is not None:
            self.monitor.check_state(state["watch"])

    def take(self, state: Mapping[str, Any]) -> str:
        """Continue from a snapshot of another stream, or an earlier one; refused whole if it does not fit."""
        self.check_state(state)
        self.method.load_state_dict(state["method"])
        own = self.counters
        self.load(state)
        self.counters.last_snapshot, self.counters.events = own.last_snapshot, own.events
        self.counters.candidate_snapshot = 0
        return "load"

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self.counters, self._alarms = StreamCounters.from_state(state["books"]), dict(state["lasting"])
        if self.monitor is not None and state["watch"] is not None:
            self.monitor.load(state["watch"])
