"""One adapting method under its guard: checks each batch, adapts or predicts, and acts on alarms. Not thread-safe."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args

import torch
from torch import Tensor

from trust_tta.errors import ConfigError, DataError, StateError
from trust_tta.live.calibration import Reference
from trust_tta.live.comparison import MIN_WEIGHT
from trust_tta.live.guard import Action, Event, EventKind, Guard
from trust_tta.live.monitor import Monitor
from trust_tta.live.snapshots import Folder, Memory, Snapshot, check_number
from trust_tta.live.stream_statistics import ImageStats, Mask, Reading, find_broken, image_stats
from trust_tta.methods.base import Method
from trust_tta.methods.validation import all_finite
from trust_tta.ops.segmentation_logits import Logits, upsample
from trust_tta.schema import show

KEPT_SNAPSHOTS = 4  # besides the last good one
LASTING_ALARMS = ("broken_input", "single_image")
OLD_ALARMS = ("drift", "class_shift", "few_classes")  # in snapshots of earlier versions
MAX_LED_WEIGHT = 0.1  # of the adapted network, below which the source leads; without evidence it is 0.12
SLOWEST = 4  # batches per update while the source predicts alone
RESTART_IMAGES = 512  # that the source predicts alone before adaptation begins anew from it
MAX_UPDATE_INTERVAL = 64  # batches per update, after repeated alarms

# Names in snapshots of earlier versions; None: no longer needed.
_OLD_NAMES: Mapping[str, str | None] = {
    "good": "good_snapshot",
    "candidate": "candidate_snapshot",
    "snapshot": "last_snapshot",
    "slow": "update_interval",
    "wait": "update_delay",
    **dict.fromkeys(("attentive", "doubtful", "farthest", "peak_distance", "since_check", "collapsed", "returned")),
}


@dataclass(frozen=True, eq=False)
class Result:
    """The result of a call: `logits` (n, classes), whether the method `adapted` on the batch, and its `events`.

    Rows of images that are not finite are NaN. `reading`: the monitored statistics, if there is a guard. `compared`
    (n, 2): classes that the adapted network and the source predicted, -1 for images that the source did not; for
    `Stream.feedback`. `batch`: number of the batch in the stream.
    """

    logits: Tensor
    adapted: bool
    events: tuple[Event, ...]
    reading: Reading | None = None
    compared: Tensor | None = None
    batch: int = 0


@dataclass
class StreamCounters:
    """Counters of a stream; plain values only, as `vars` of it is part of every snapshot."""

    batches: int = 0
    images: int = 0
    events: int = 0
    updates: int = 0  # since the state was last restored
    restored_at: int = 0  # batch after which that was
    at_source: bool = True  # nothing has been learned, or all of it was undone
    since_snapshot: int = 0  # images
    good_snapshot: int = 0  # number of the last good snapshot
    candidate_snapshot: int = 0  # number of the one that becomes good if nothing happens; 0: none
    last_snapshot: int = 0  # number of the last one written
    paused: bool = False
    leading_since: int = 0  # batch since which the source has had more weight; 0: it has not
    led: int = 0  # images that it has predicted alone since
    update_interval: int = 1  # update on every n-th batch
    update_delay: int = 0  # batches until the next update

    def take_turn(self) -> bool:
        """Whether this batch is an update; counts it."""
        due = self.update_delay == 0
        self.update_delay = self.update_interval - 1 if due else self.update_delay - 1
        return due

    def halve_update_rate(self) -> None:
        self.update_interval = min(2 * self.update_interval, MAX_UPDATE_INTERVAL)
        self.update_delay = self.update_interval - 1

    def double_update_rate(self) -> None:
        self.update_interval = max(1, self.update_interval // 2)
        self.update_delay = min(self.update_delay, self.update_interval - 1)

    @classmethod
    def from_state(cls, state: Any) -> StreamCounters:
        """Counters of a snapshot, also of an earlier version; refused if a name, type or value is not allowed."""
        if not isinstance(state, Mapping):
            raise StateError(f"the snapshot's counters are a {type(state).__name__}; a dict is wanted")
        current: dict[Any, Any] = {_OLD_NAMES.get(name, name): value for name, value in state.items()}
        current.pop(None, None)
        kinds = {field.name: type(field.default) for field in fields(cls)}
        for name, value in current.items():
            if name not in kinds:
                raise StateError(f"the snapshot has an unknown counter {show(name)}; is it of a later version?")
            check_number(value, name, kinds[name])
        counters = cls(**current)
        check_number(counters.update_interval, "update_interval", int, low=1, high=MAX_UPDATE_INTERVAL)
        check_number(counters.update_delay, "update_delay", int, high=counters.update_interval - 1)
        return counters


class Session:
    """A method, its health monitor, the guard's policy and the snapshots."""

    def __init__(
        self,
        method: Method,
        guard: Guard | None,
        store: Memory | Folder,
        *,
        reference: Reference | None,
        on_event: Callable[[Event], None] | None,
    ) -> None:
        self.method, self.store = method, store
        self.policy = guard or Guard()
        self.monitor = Monitor(method, guard, reference=reference) if guard else None
        self.counters = StreamCounters()
        self.reading: Reading | None = None
        self.saved = True  # whether the last snapshot was written
        self._alarms: dict[str, Action] = {}  # current alarms, and the action on each
        self._events: list[Event] = []  # of this call
        self._compared: Tensor | None = None  # `Result.compared` of this call
        self._on_event = on_event

    def step(self, images: Tensor, *, adapt: bool = True) -> Result:
        """Predict images (n, c, h, w), and adapt on them unless told not to or an alarm forbids it.

        Without `adapt` the batch passes the same checks, which may restore an earlier state; it is not counted.
        """
        self._events, self._compared = [], None
        counters, n = self.counters, len(images)
        if adapt:
            counters.batches += 1
            counters.images += n
            counters.since_snapshot += n  # before anything is saved: a restart from there has seen them
        stats = image_stats(images)
        good, blank, monitored = self._check_images(stats)
        if good.all():
            logits, adapted = self._step(images, stats, adapt=adapt, monitored=monitored)
        else:
            logits, adapted = self._step_on_good(images, stats, good, blank, adapt=adapt, monitored=monitored)
        if adapt and counters.since_snapshot >= self.policy.snapshot_every:
            fine = not counters.leading_since
            if counters.candidate_snapshot and fine:  # no alarm since, and the source did not lead: it has proved good
                counters.good_snapshot = counters.candidate_snapshot
                counters.double_update_rate()
            self.save(candidate=fine)
        return Result(logits, adapted, tuple(self._events), self.reading, self._compared, counters.batches)

    def _check_images(self, stats: ImageStats) -> tuple[Mask, Mask, bool]:
        """Masks (n,) of the images to adapt on and of blank ones; and whether the batch counts for the monitors.

        Images that are not finite, blank or repeated raise the alarm `broken_input`.
        """
        ruined, blank, repeated = find_broken(stats)
        blank &= self.monitor is not None  # without a guard, the method adapts on blank images, too
        good = ~(ruined | blank)
        n, bad = len(good), int((~good).sum())
        kind = "not finite" if ruined.any() else "blank"
        broken = 2 * bad >= n
        reason = f"{'half of the images or more' if broken else 'some images'} are {kind}" if bad else ""
        if not bad and self.monitor and repeated:
            reason, broken, bad = "most images are the same", True, n
        if not reason:
            self._alarms.pop("broken_input", None)
            return good, blank, True
        if "broken_input" in self._alarms and not broken:
            self._alarms["broken_input"] = "none"
        elif self._alarms.get("broken_input") == "none":
            del self._alarms["broken_input"]  # more are broken than before: an event again
        self._begin("broken_input", "skip" if broken else "none", reason, {"images": bad})
        return good, blank, not broken

    def _step_on_good(
        self, images: Tensor, stats: ImageStats, good: Mask, blank: Mask, *, adapt: bool, monitored: bool
    ) -> tuple[Tensor, bool]:
        """Logits of all images, and whether the method adapted on the good ones; rows not finite are NaN."""
        mask = torch.from_numpy(good).to(images.device)
        chosen, adapted = images[mask], False
        if len(chosen):
            part, adapted = self._step(chosen, stats[:, good], adapt=adapt, monitored=monitored)
        else:
            part = self.evaluate(images.new_zeros(1, *images.shape[1:]))[:0]
        logits = part.new_full((len(good), *part.shape[1:]), float("nan"))
        logits[mask] = part
        if self._compared is not None:
            compared = self._compared.new_full((len(good), 2), -1)
            compared[torch.from_numpy(good)] = self._compared
            self._compared = compared
        if blank.any():
            is_blank = torch.from_numpy(blank).to(images.device)
            logits[is_blank] = self._predict_alone(images[is_blank]).to(logits)
        return logits, adapted

    def _step(self, images: Tensor, stats: ImageStats, *, adapt: bool, monitored: bool) -> tuple[Tensor, bool]:
        """Predict good images, and adapt on them if nothing forbids it; `monitored`: they count as evidence."""
        monitor, counters = self.monitor, self.counters
        method = self.method
        dense = getattr(method.model, "dense", False)  # whose pixels make up for images
        if len(images) == 1 and method.statistics.uses_batch and not dense:
            return self._predict_single_image(images), False
        if monitor is None:
            return self._adapt(images) if adapt and not counters.paused else (self.evaluate(images), False)
        single = monitor.find_single(adapt=adapt) if monitored else None
        if single == "source":
            theirs, changed = monitor.predict_alone(images, adapt=adapt)
            if changed:
                self._report_change(monitor)
            self._follow_lead(monitor, len(images))
            self.reading = monitor.read(method, counters.images, leading_since=counters.leading_since)
            return self._as_output(upsample(theirs)), False
        before = method.counters.forwards + method.counters.backwards
        logits, adapted = self._adapt(images) if adapt and self._may_update(monitor) else (self.evaluate(images), False)
        if adapted:
            counters.updates, counters.at_source = counters.updates + 1, False
        if not bool(all_finite(logits)):  # although the images are
            if counters.at_source:
                self._begin("broken_input", "skip", "predictions are not finite", {})
            else:
                self._alarm("source", "the predictions are not finite", {})
            return self._predict_alone(images), False
        passes = max(1, method.counters.forwards + method.counters.backwards - before)
        due = monitor.add(stats, logits, passes=passes, adapt=adapt, adapted=adapted)
        source: Logits | None = None
        if monitored and due and single is None:
            few = monitor.comparison.few_classes
            source, changed, self._compared = monitor.compare(images, logits)
            if self._act_on_comparison(monitor, changed=changed, few=few):
                logits, adapted = self.evaluate(images), False
            self._follow_lead(monitor, len(images))
        self.reading = monitor.read(method, counters.images, leading_since=counters.leading_since)
        return (monitor.mix(images, logits, source) if single is None else logits), adapted

    def _adapt(self, images: Tensor) -> tuple[Tensor, bool]:
        """The method's prediction, and whether it adapted: not if that gave values that are not finite."""
        try:
            return self.method(images), True
        except DataError:
            return self.evaluate(images), False

    def _may_update(self, monitor: Monitor) -> bool:
        """Whether to adapt on this batch: less often while the source leads, after alarms, and to keep the budget."""
        counters = self.counters
        if counters.paused or monitor.comparison.few_classes or "skip" in self._alarms.values():
            return False
        if (monitor.overdrawn and monitor.step_passes > 1) or (counters.led and counters.batches % SLOWEST):
            return False
        return counters.take_turn()

    def add_labels(self, compared: Tensor, labels: Tensor, *, batch: int) -> tuple[Event, ...]:
        """Add labels (m,) of images of a batch, with the classes (m, 2) that both networks predicted; may be an alarm.

        Predictions from before the state was last restored say nothing of the present one.
        """
        self._events = []
        monitor = self.monitor
        if monitor is None or batch <= self.counters.restored_at:
            return ()
        monitor.comparison.add_labels(compared[:, 0].numpy(), compared[:, 1].numpy(), labels.numpy())
        self._act_on_comparison(monitor, changed=False, few=monitor.comparison.few_classes)
        return tuple(self._events)

    def evaluate(self, images: Tensor) -> Tensor:
        """Predict without adapting: logits or probabilities, as the method does."""
        return self._as_output(self.method.evaluate(images))

    def _predict_alone(self, images: Tensor) -> Tensor:
        """Predict with the source and its training statistics; with the adapted network where the source has none."""
        if self.monitor is None or not self.monitor.source.own_statistics:
            return self.evaluate(images)
        return self._as_output(upsample(self.monitor.source(images)))

    def _predict_single_image(self, images: Tensor) -> Tensor:
        """Predict with the source and its training statistics, with an event the first time; refused without these."""
        if self.monitor is None or not self.monitor.source.own_statistics:
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

    def _act_on_comparison(self, monitor: Monitor, *, changed: bool, few: bool) -> bool:
        """Act on the alarm, and report what changed; True if the method's state was restored."""
        comparison, counters = monitor.comparison, self.counters
        evidence = {"evidence": comparison.evidence, "weight": comparison.weight, "e_value": comparison.test.e_value}
        if changed:
            self._report_change(monitor)
        if comparison.few_classes and not few:
            self._act("few_classes", "source", "the images are of few classes, which their statistics hide", evidence)
            comparison.few_classes = True
            return True
        if few and not comparison.few_classes:
            monitor.start_over()
            self._event("few_classes_over", "none", "the images are of many classes again", evidence)
            return False
        if comparison.test.e_value < 1 / self.policy.alpha:
            return False
        if counters.at_source:
            monitor.start_over()  # there is nothing to undo
            return False
        action: Action = self.policy.on_alarm
        if action == "rollback" and counters.update_interval > 1:
            action = "source"  # the last good snapshot was not good enough
        return self._alarm(action, "the test is sure that adaptation harms", evidence)

    def _report_change(self, monitor: Monitor) -> None:
        evidence = {"compared": monitor.comparison.compared}
        self._event("change", "none", "the source's predictions are unlike those before", evidence)

    def _alarm(self, action: Action, reason: str, evidence: dict[str, Any]) -> bool:
        restored = self._act("alarm", action, reason, evidence)
        self.counters.halve_update_rate()
        if not restored and self.monitor is not None:
            self.monitor.start_over()
        return restored

    def _follow_lead(self, monitor: Monitor, images: int) -> None:
        """Count for how long the source has had more weight; begin anew from it after it predicted alone for long."""
        counters, comparison = self.counters, monitor.comparison
        if not comparison.in_doubt or comparison.weight >= 0.5:
            if counters.led:
                self._event("source_leads_over", "none", "adaptation is no worse again", {"weight": comparison.weight})
            counters.leading_since = counters.led = 0
            return
        if comparison.weight < MAX_LED_WEIGHT:
            counters.leading_since = counters.leading_since or counters.batches
        if comparison.weight >= MIN_WEIGHT or comparison.few_classes:
            return
        if not counters.led:
            evidence = {"evidence": comparison.evidence, "weight": comparison.weight}
            self._event("source_leads", "none", "the source predicts alone", evidence)
        counters.led += images
        if counters.led >= RESTART_IMAGES and not counters.at_source:
            self._act("source_leads", "source", "adaptation starts again from the source", {"images": counters.led})
            counters.led = 1

    def _begin(self, kind: EventKind, action: Action, reason: str, evidence: dict[str, Any]) -> None:
        """Act on an alarm when it begins; it lasts until it is removed from `_alarms`."""
        if kind not in self._alarms:
            self._alarms[kind] = action
            self._act(kind, action, reason, evidence)

    def _act(self, kind: EventKind, action: Action, reason: str, evidence: dict[str, Any]) -> bool:
        """Act and record the event; True if the state was changed."""
        if action in ("rollback", "source"):
            self.save(within_batch=True)
            action = self.restore_good() if action == "rollback" else self.restore_source()
        if action == "pause":
            self.counters.paused = True
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

    def resume(self) -> None:
        """Continue from the newest snapshot that can be read; without any, store the method as it is."""
        snapshot, problems = self.store.newest()
        if snapshot is not None:
            self.load(snapshot.state)
            reason = "a damaged snapshot was skipped" if problems else "continued from a snapshot"
            self._event("start", "none", reason, {"snapshot": snapshot.number, "problems": problems})
        elif problems:
            raise StateError(f"no snapshot of the folder can be read, the newest because: {problems[0]}")
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
        counters.update_interval, counters.update_delay = 1, 0
        return self.restore_source()

    def _forget(self) -> None:
        counters = self.counters
        counters.updates = counters.candidate_snapshot = 0
        counters.leading_since = counters.led = 0
        counters.restored_at = counters.batches
        if self.monitor is not None:
            self.monitor.start_over()

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

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a snapshot's state, which holds the method's, too; refused whole if it does not fit."""
        missing = [name for name in ("method", "books", "lasting", "watch") if name not in state]
        if missing:
            raise StateError(f"the snapshot has no '{missing[0]}': it is not of a stream, or of another version")
        counters, alarms, watch = StreamCounters.from_state(state["books"]), state["lasting"], state["watch"]
        if not isinstance(alarms, Mapping) or any(
            kind not in LASTING_ALARMS + OLD_ALARMS or action not in get_args(Action) for kind, action in alarms.items()
        ):
            raise StateError(f"the snapshot's alarms are {show(alarms)}; a dict of alarms and actions is wanted")
        if self.monitor is not None and watch is not None:
            self.monitor.check_state(watch)
        self.method.load_state_dict(state["method"])
        self.counters = counters
        self._alarms = {kind: action for kind, action in alarms.items() if kind in LASTING_ALARMS}
        if self.monitor is not None and watch is not None:
            self.monitor.load(watch)

    def take(self, state: Mapping[str, Any]) -> str:
        """Continue from a snapshot of another stream, or an earlier one."""
        own = self.counters
        self.load(state)
        self.counters.last_snapshot, self.counters.events = own.last_snapshot, own.events
        self.counters.candidate_snapshot = 0
        return "load"
