"""One method, watched and guarded batch by batch. Not thread-safe: the stream takes care of threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trust_tta.errors import DataError, StateError
from trust_tta.live.alarms import Kind, Reference
from trust_tta.live.guard import Action, Event, EventKind, Guard, Pace
from trust_tta.live.inputs import Facts, Fetched, Glances, examine, looks_broken, sound, usable
from trust_tta.live.monitors import CLASS_WINDOW, Reading, Values, rows_of
from trust_tta.live.snapshots import Memory, Snapshot, Snapshots
from trust_tta.live.watch import Check, Watch
from trust_tta.methods.base import Method
from trust_tta.methods.safety import are_finite

ATTENTIVE = 64  # batches from the start, and after an event, whose predictions are looked at one by one
TOGETHER = 8  # batches, at most, of a quiet stream that are looked at together: that takes longer than all the rest
FREE_UPDATES = 16  # after which checks are paid for from the budget
WARY = 16  # batches after one with broken images that are looked at before anything is learned from them
FAR = 2.0  # times the limit: a short drift must have gone this far for its end to count; others may be chance


@dataclass(frozen=True, eq=False)
class Result:
    """The result of a call: `logits` (n, classes), whether the method `adapted` on the batch, and its `events`.

    Rows of images that are not finite are NaN. `reading`: what the monitors saw last, if there is a guard; in a quiet
    stream they look at up to eight batches together.
    """

    logits: Tensor
    adapted: bool
    events: tuple[Event, ...]
    reading: Reading | None = None


class Ahead(NamedTuple):
    """What `evaluate` of a method that is `fixed` gave for images (n, c, h, w), which needs no session."""

    images: Tensor
    logits: Tensor


@dataclass
class Books:
    """What a restart needs besides the method's state to continue as if nothing had happened: plain values only."""

    batches: int = 0
    images: int = 0
    events: int = 0
    updates: int = 0  # since the state was last restored
    at_source: bool = True  # nothing has been learned, or all of it was undone
    since_check: int = 0  # images
    since_snapshot: int = 0
    good: int = 0  # number of the last good snapshot
    candidate: int = 0  # number of the one that becomes good if nothing happens; 0: none
    snapshot: int = 0  # number of the last one written
    paused: bool = False
    collapsed: bool = False  # ever
    returned: bool = False  # from a drift, or from few classes, to a calibrated reference, ever
    farthest: float = 0.0  # largest input distance in the current drift
    slow: int = 1  # the pace
    wait: int = 0
    attentive: int = ATTENTIVE  # batches still to be looked at one by one


@dataclass
class _Look:
    """What is seen while the device works on a batch.

    `unseen`: nobody has looked at its images yet. `wait`: its predictions wait for a later look. `fetched`: earlier
    ones are on their way; `found`, once it is `done`: the alarms of a look at them.
    """

    unseen: bool = False
    wait: bool = False
    fetched: bool = False
    found: dict[Kind, str] | None = None
    done: bool = False


class _NotSound(Exception):  # noqa: N818, it is no error
    """Ends a batch that must be looked at before anything is learned from it; the method takes everything back."""


class Session:
    """A method, its monitors, the policy and the snapshots."""

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
        self.method, self.guard, self.store = method, guard, store
        self.policy = guard or Guard()
        self.watch = Watch(method, guard, reference=reference, canary=canary) if guard else None
        self.books = Books()
        self.reading: Reading | None = None
        self._lasting: dict[str, Action] = {}  # current alarms, and the action on each
        self._events: list[Event] = []  # of this call
        self._on_event = on_event
        self._turn = True  # whether a quiet stream is looked at in this batch
        self._wary = 0  # batches still to be looked at before the method sees them
        self._meanwhile: Callable[[], None] | None = None  # the caller's
        self._ahead: Ahead | None = None  # the caller's, too
        self._glances = Glances()
        self._nothing = next(method.model.parameters()).new_zeros(0)  # for checks on the canary alone

    # One batch

    def step(
        self, images: Tensor, meanwhile: Callable[[], None] | None = None, *, ahead: Ahead | None = None
    ) -> Result:
        """Predict images (n, c, h, w), and adapt on them unless something speaks against it.

        `meanwhile` is called while the device works, when the method is as it will be, unless an event changes it.
        `ahead`: what was computed of these images before.
        """
        self._events, self._meanwhile, self._ahead = [], meanwhile, ahead
        books, n = self.books, images.shape[0]
        books.batches += 1
        books.images += n
        books.since_snapshot += n  # before anything is saved: a restart from there has seen them
        self._turn = books.batches % TOGETHER == 0 or books.images % CLASS_WINDOW < n
        try:
            done = self._step_unseen(images) if self._trusts_images() else None
            logits, adapted, images = done or self._step_seen(images)
        finally:
            self._meanwhile = self._ahead = None  # they hold the caller and the batch
        if self.books.since_snapshot >= self.policy.snapshot_every and not self.catch_up():
            self._save_if_healthy(images)
        return Result(logits, adapted, tuple(self._events), self.reading)

    def _trusts_images(self) -> bool:
        """Whether to learn from a batch before its images were looked at: the device would wait for that.

        If they turn out to be broken, what was learned is taken back before the call returns.
        """
        if self._wary or self.books.paused:
            self._wary = max(0, self._wary - 1)
            return False
        if self.watch is None:
            return True
        steady = self.books.slow == 1 and not self.books.wait
        return steady and self._is_quiet(self.watch) and self._may_update(drifting=False)

    def _step_unseen(self, images: Tensor) -> tuple[Tensor, bool, Tensor] | None:
        """As `_step_seen`, but look at the images while the device works; None, and all is as before, if not sound."""
        before, look = vars(self.books).copy(), _Look(unseen=True)
        try:
            if self.watch is not None:
                return *self._update(self.watch, images, look), images
            return *self._adapt(images, lambda: self._glance(look, images, drifting=False)), images
        except Exception:  # what the method says of images that it cannot take is said better by a look at them
            if sound(examine(images)):
                raise
        self.books, self._wary = Books(**before), WARY
        if look.done and self.watch is not None:  # the distance of the weights was seen with the batch learned
            self._act_on(self.watch, None if look.found is None else self._read_alarms(self.watch, anew=True))
        return None

    def _step_seen(self, images: Tensor) -> tuple[Tensor, bool, Tensor]:
        """Look at a batch first: the logits of all its images, whether the method adapted, and the usable images."""
        facts, statistics = self._inspect(images)
        if sound(facts):
            return *self._step(images, None, statistics), images
        if (fine := usable(facts)).all():
            return *self._step(images, facts, statistics), images
        images = images[torch.from_numpy(fine).to(images.device)]
        return *self._step_partly(images, facts, fine), images

    def _inspect(self, images: Tensor) -> tuple[Facts, Values | None]:
        """The facts of images, and the statistics that show a drift: of each batch, or of some while all is quiet."""
        if self.watch is None or (self._is_quiet(self.watch) and not self._turn):
            return examine(images), None
        return self.watch.judge.inspect(images)

    def _is_quiet(self, watch: Watch) -> bool:
        """Whether nothing has happened for some time, and nothing lasts."""
        return not (self.books.attentive or self._lasting or watch.doubt)

    def _step_partly(self, images: Tensor, facts: Facts, fine: NDArray[np.bool_]) -> tuple[Tensor, bool]:
        """Continue with `images`, the usable ones; the rows of the others are NaN. A broken half spoils the rest."""
        broken, adapted = int((~fine).sum()), False
        action: Action = self.policy.on_broken_input if 2 * broken >= len(fine) else "none"
        part_of_it = "half of the images or more are" if 2 * broken >= len(fine) else "some images are"
        self._begin_broken(action, f"{part_of_it} not finite", broken)
        if len(images):
            statistics = self.watch.judge.inspect(images)[1] if self.watch else None
            part, adapted = self._step(images, facts[:, fine], statistics, partly=True)
        else:
            part = self.predict(images.new_zeros(1, *images.shape[1:]))[:0]
        logits = part.new_full((len(fine), *part.shape[1:]), float("nan"))
        logits[torch.from_numpy(fine).to(logits.device)] = part
        return logits, adapted

    def _step(
        self, images: Tensor, facts: Facts | None, statistics: Values | None, *, partly: bool = False
    ) -> tuple[Tensor, bool]:
        """Predict usable images, and adapt if nothing speaks against it; without `facts` nothing looks broken."""
        if self.watch is None:
            return (self.predict(images), False) if self.books.paused else self._adapt(images)
        problem, returned = looks_broken(facts) if facts is not None else "", False
        if problem:
            self._begin_broken(self.policy.on_broken_input, problem, len(images))
        else:
            if not partly:
                self._lasting.pop("broken_input", None)
            if statistics is not None:
                returned = self.watch.look(images, statistics, drifting="drift" in self._lasting)
        left = returned and self._return_action(self.watch) in ("source", "rollback")
        if not left and self._may_update(
            drifting="drift" in self._lasting and not returned
        ):  # a state that is about to be dropped learns nothing more
            return self._update(self.watch, images, _Look())
        logits = self.predict(images)
        if not self.books.paused:  # the skipped update pays for asking the source
            self.watch.credit = max(self.watch.credit, self.watch.judge.passes * len(images))
        if not problem:
            self.watch.keep(logits, work=len(images))
            logits = self.predict(images) if self._look(self.watch, images) else logits
        return logits, False

    def _update(self, watch: Watch, images: Tensor, look: _Look) -> tuple[Tensor, bool]:
        books, probation, n = self.books, self.books.slow > 1, images.shape[0]
        books.updates, books.at_source = books.updates + 1, False
        # The first updates show whether the learning rate is ruinous; after a collapse every update is checked.
        early = books.updates & (books.updates - 1) == 0
        due = early or probation or books.since_check >= self.policy.check_every
        before = self.method.state_dict() if probation else None
        drifting, spent = "drift" in self._lasting, self._spent()
        look.wait = self._can_wait(watch) and before is None
        if look.wait and self._turn and watch.behind:
            look.fetched = True
            watch.fetch()
        logits, adapted = self._adapt(images, lambda: self._glance(look, images, drifting=drifting))
        work = max(1, self._spent() - spent) * n
        check = watch.check(self.method, images, strict=probation, drifting=drifting) if due else None
        if check and books.updates > FREE_UPDATES:
            watch.credit -= check.images
        books.since_check = 0 if due else books.since_check + n
        changed = look.done and self._act_on(watch, look.found)
        wait = look.wait and adapted and logits.dim() == 2 and not watch.doubt and (check is None or check.passed)
        if changed:
            return self.predict(images), False
        watch.keep(logits, work=work)
        if not wait and self._look(watch, images, check=check, before=before):
            return self.predict(images), False
        return logits, adapted

    def _can_wait(self, watch: Watch) -> bool:
        """Whether the predictions of this batch may be looked at later, as nothing has happened for some time."""
        books = self.books
        books.attentive = max(0, books.attentive - 1)
        snapshot = books.since_snapshot >= self.policy.snapshot_every
        return not (books.attentive or snapshot or watch.doubt or watch.monitors.returned)

    def _glance(self, look: _Look, images: Tensor, *, drifting: bool) -> None:
        """While the device works on this batch: at predictions that were kept, and at its images."""
        watch = self.watch
        coming = self._send_for(images) if look.unseen else None
        if look.fetched and watch is not None:
            look.found, look.done = self._read(watch, None), True
            look.wait = not watch.affords(len(images))
        if coming is not None:
            self._see_images(images, coming.wait())
        if watch is not None:
            look.wait = look.wait and (drifting or not watch.differs())

    def _send_for(self, images: Tensor) -> Fetched:
        """Queue a look at the images behind the work of the device; what it finds is on its way to the host."""
        if self.watch is None or not self._turn:
            return self._glances.send(images)
        return Fetched.of(self.watch.judge.inspection(images))

    def _see_images(self, images: Tensor, seen: Tensor) -> None:
        """Take what `_send_for` brought; it may end the batch."""
        if self.watch is None or not self._turn:
            facts, statistics = seen.numpy(), None
        else:
            facts, statistics = self.watch.judge.split(images, seen)
        if not sound(facts):
            raise _NotSound
        if statistics is not None and self.watch is not None:
            self.watch.look(images, statistics, drifting=False)

    def _adapt(self, images: Tensor, meanwhile: Callable[[], None] | None = None) -> tuple[Tensor, bool]:
        """The method's prediction; where it refuses because that is not finite, one without adapting."""
        own = vars(self.method)  # a module takes microseconds to set an attribute
        own["meanwhile"], own["ahead"] = partial(self._do_meanwhile, meanwhile), self._known(images)
        try:
            return self.method(images), True
        except DataError:
            return self.evaluate(images), False
        finally:
            own["meanwhile"] = own["ahead"] = None

    def _do_meanwhile(self, more: Callable[[], None] | None) -> None:
        if self._meanwhile is not None:
            self._meanwhile()
        if more is not None:
            more()

    def _may_update(self, *, drifting: bool) -> bool:
        held = "skip" in self._lasting.values() or self._lasting.get("few_classes") == "source"
        if self.books.paused or held:
            return False
        wary = self.books.collapsed or self.books.returned
        if wary and not drifting and self.watch and self.watch.monitors.knows_inputs:
            return False  # without a drift there is nothing to adapt to: stay at the source
        turn = self.books.wait == 0
        if self.books.slow > 1 or not turn:
            self._set_pace(self._pace.step())
        return turn

    def evaluate(self, images: Tensor) -> Tensor:
        """Predict by the state as it is: logits or probabilities, as the method does."""
        known = self._known(images)
        logits = self.method.evaluate(images) if known is None else known
        return logits.softmax(1) if self.method.probabilities else logits

    def _known(self, images: Tensor) -> Tensor | None:
        """What was computed of these images ahead, if they are the whole batch."""
        return self._ahead.logits if self._ahead is not None and self._ahead.images is images else None

    def predict(self, images: Tensor) -> Tensor:
        """As `evaluate`; while images are of few classes, by the source with the statistics of its training."""
        few = self._lasting.get("few_classes") == "source"
        trained = self.watch.judge.trained if self.watch and few else None
        if trained is None or self.method.options.statistics != "batch":  # those of a stream are the source's by then
            return self.evaluate(images)
        logits = trained(images)
        return logits.softmax(1) if self.method.probabilities else logits

    def _spent(self) -> int:
        """Passes of the method so far; a backward pass counts as two."""
        counters = self.method.counters
        return counters.forwards + 2 * counters.backwards

    # From observations to actions

    def catch_up(self) -> bool:
        """Look at the predictions that were kept for later; True if the state was changed."""
        return self.watch is not None and self.watch.behind > 0 and self._look(self.watch, None)

    def _look(
        self,
        watch: Watch,
        images: Tensor | None,
        *,
        check: Check | None = None,
        before: dict[str, Any] | None = None,
    ) -> bool:
        """Let the monitors see what was kept, and the guard act; True if the state was changed.

        images: those of the last batch, of which the source may be asked.
        """
        return self._act_on(watch, self._read(watch, images), check=check, before=before)

    def _read(self, watch: Watch, images: Tensor | None) -> dict[Kind, str] | None:
        """Let the monitors see what was kept; the alarms, or None if it is not finite. Nothing is done about them."""
        return self._read_alarms(watch) if watch.see(images) else None

    def _read_alarms(self, watch: Watch, *, anew: bool = False) -> dict[Kind, str]:
        lasting = {"drifting": "drift" in self._lasting, "few": "few_classes" in self._lasting}
        self.reading, alarms = watch.read(self.method, self.books.images, **lasting, anew=anew)
        return alarms

    def _act_on(
        self,
        watch: Watch,
        alarms: Mapping[Kind, str] | None,
        *,
        check: Check | None = None,
        before: dict[str, Any] | None = None,
    ) -> bool:
        """Act on the alarms of the last reading; True if the state was changed."""
        if alarms is None or self.reading is None:
            if self.books.at_source:
                return self._begin("broken_input", self.policy.on_broken_input, "predictions are not finite", {})
            return self._collapse("the predictions are not finite", {}, before)
        if not alarms and not self._lasting and check is None:
            return False  # the usual case
        evidence = self.reading.as_dict() | (check.evidence() if check else {})
        if watch.monitors.returned:
            return self._end_drift(watch, evidence)
        if "few_classes" in alarms or "few_classes" in self._lasting:
            changed = self._follow_few_classes(watch, alarms, evidence)
            if self.policy.on_few_classes == "source":  # nothing is learned, so that nothing else can be wrong
                return changed
        if check and not check.passed:
            return self._collapse("the canary is predicted otherwise", evidence, before)
        if "collapse" in alarms:
            return self._collapse(alarms["collapse"], evidence, None)
        shifted = self._follow_class_shift(alarms, evidence)
        return self._follow_drift(alarms, evidence) or shifted

    def _collapse(self, reason: str, evidence: dict[str, Any], before: dict[str, Any] | None) -> bool:
        """Undo; the second time before a snapshot has proved good, go back to the source. Update less often."""
        if self.books.at_source:
            return False  # there is nothing to undo
        self.books.collapsed = True
        action: Action = self.policy.on_collapse
        if before is not None and action in ("rollback", "source"):
            self.method.load_state_dict(before)
            self._event("collapse", "skip", reason, evidence)
            self._slower()
            return True
        if action == "rollback" and self.books.slow > 1:
            action = "source"
        return self._act("collapse", action, reason, evidence)

    def _follow_few_classes(self, watch: Watch, alarms: Mapping[Kind, str], evidence: dict[str, Any]) -> bool:
        if "few_classes" in alarms:
            return self._begin("few_classes", self.policy.on_few_classes, alarms["few_classes"], evidence)
        if "few_classes" in self._lasting and evidence.get("trained_classes") is not None:
            left = self._lasting.pop("few_classes") == "source"
            self.books.returned = self.books.returned or (left and watch.limits.every is not None)
            watch.forget_predictions()  # of the few
            self._event("few_classes_over", "none", "the images are of many classes again", evidence)
        return False

    def _follow_class_shift(self, alarms: Mapping[Kind, str], evidence: dict[str, Any]) -> bool:
        if "class_shift" in alarms:
            return self._begin_class_shift(alarms["class_shift"], evidence)
        # Without a full window of the source's predictions nothing is known, so nothing ends.
        if "class_shift" in self._lasting and (evidence.get("source_shift") is not None or "drift" in alarms):
            del self._lasting["class_shift"]
            self._event("class_shift_over", "none", "the classes are those of the reference again", evidence)
        return False

    def _begin_class_shift(self, reason: str, evidence: dict[str, Any]) -> bool:
        """If updates are to be skipped, also undo those made before the shift showed."""
        action, undone = self.policy.on_class_shift, self.books.updates
        if "class_shift" in self._lasting or action != "skip" or not undone:
            return self._begin("class_shift", action, reason, evidence)
        self.save(within_batch=True)
        restored = self.restore_good()
        self._begin("class_shift", action, reason, {**evidence, "undone": undone})
        self.save(good=restored == "source")
        return True

    def _follow_drift(self, alarms: Mapping[Kind, str], evidence: dict[str, Any]) -> bool:
        """A drift lasts until the images are closer to the reference than to the drift: see `_end_drift`."""
        distance = evidence.get("input_distance")
        if "drift" in self._lasting:
            self.books.farthest = max(self.books.farthest, distance or 0.0)
        elif "drift" in alarms and self.watch is not None:
            self.books.farthest = distance or 0.0
            self.watch.monitors.begin_drift()
            return self._begin("drift", self.policy.on_drift, alarms["drift"], evidence)
        return False

    def _return_action(self, watch: Watch) -> Action:
        """What to do at the end of the current drift; nothing if it may have been chance."""
        far = watch.limits.drift is not None and self.books.farthest >= FAR * watch.limits.drift
        real = far or watch.monitors.drifted_long
        return self.policy.on_return if real and not self.books.at_source else "none"

    def _end_drift(self, watch: Watch, evidence: dict[str, Any]) -> bool:
        action, evidence = self._return_action(watch), {**evidence, "farthest": self.books.farthest}
        watch.monitors.end_drift()
        self.books.farthest = 0.0
        self.books.returned = self.books.returned or (action == "source" and watch.limits.every is not None)
        del self._lasting["drift"]
        watch.doubt = CLASS_WINDOW
        return self._act("drift_over", action, "the images are like the reference again", evidence)

    def _begin(self, kind: EventKind, action: Action, reason: str, evidence: dict[str, Any]) -> bool:
        """Act on an alarm when it begins; it lasts until it is removed from `_lasting`."""
        if kind in self._lasting:
            return False
        self._lasting[kind] = action
        return self._act(kind, action, reason, evidence)

    def _begin_broken(self, action: Action, reason: str, images: int) -> None:
        """Act on broken images: an event if there were none before, or fewer; the action is this batch's."""
        if "broken_input" in self._lasting and action == "none":
            self._lasting["broken_input"] = action
        elif self._lasting.get("broken_input") == "none":
            del self._lasting["broken_input"]
        self._begin("broken_input", action, reason, {"images": images})

    def _act(self, kind: EventKind, action: Action, reason: str, evidence: dict[str, Any]) -> bool:
        """Act and record the event; True if the state was changed."""
        if action in ("rollback", "source"):
            self.save(within_batch=True)
            action = self.restore_good() if action == "rollback" else self.restore_source()
        if action == "pause":
            self.books.paused = True
        if kind == "collapse" or action == "slow":
            self._slower()
        self._event(kind, action, reason, evidence)
        if action in ("rollback", "source", "pause"):
            self.save(good=action == "source")
        return action in ("rollback", "source")

    def _slower(self) -> None:
        self._set_pace(self._pace.slower(self.policy.slowest))

    @property
    def _pace(self) -> Pace:
        return Pace(slow=self.books.slow, wait=self.books.wait)

    def _set_pace(self, pace: Pace) -> None:
        self.books.slow, self.books.wait = pace.slow, pace.wait

    # What others learned

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
            reason, evidence = self._judge_change(served, images[-len(served) :], canary=canary)
            if not reason and evidence.get("agreement", 1.0) >= (1 + self.policy.agreement) / 2:
                return self._adopted(evidence)
        self.method.load_state_dict(before)
        served = self.evaluate(images)
        change()
        reason, evidence = self._judge_change(served, images)
        if reason:
            self.method.load_state_dict(before)
            return self._event("merge", "return", reason, evidence)
        return self._adopted(evidence)

    def _adopted(self, evidence: dict[str, Any]) -> Event:
        self.books.at_source = False
        return self._event("merge", "take", "what others learned works for these images", evidence)

    def _agreement(self, served: Tensor, logits: Tensor) -> float:
        """The share of predictions (n, classes) that stay the same, weighted by their confidence."""
        old, new = (rows_of(output, probabilities=self.method.probabilities) for output in (served, logits))
        weights = old.amax(1)
        return float((weights * (old.argmax(1) == new.argmax(1))).sum() / weights.sum())

    def _judge_change(self, served: Tensor, images: Tensor, *, canary: bool = True) -> tuple[str, dict[str, Any]]:
        """Why a change of state is wrong, or "", and the evidence. `served`: the predictions before it."""
        logits = self.evaluate(images)
        if not bool(are_finite(logits)):
            return "the predictions are not finite", {}
        if self.watch is None:
            return "", {}
        agreement = self._agreement(served, logits)
        check = self.watch.check(self.method, images) if canary else None
        evidence = {"agreement": agreement} | (check.evidence() if check else {})
        if agreement < self.policy.agreement:
            return "the images are predicted otherwise than before", evidence
        return ("the canary is predicted otherwise" if check and not check.passed else ""), evidence

    # States

    def restore_good(self) -> Action:
        """Back to the last good snapshot, or to the source if it cannot be read or is no longer good."""
        try:
            self.method.load_state_dict(self.store.read(self.books.good).state["method"])
        except StateError:
            return self.restore_source()
        drifting = "drift" in self._lasting
        check = self.watch.check(self.method, self._nothing, strict=True, drifting=drifting) if self.watch else None
        if check and not check.passed:
            return self.restore_source()
        self._forget()
        return "rollback"

    def restore_source(self) -> Action:
        self.method.reset()
        self._forget()
        self.books.at_source = True
        return "source"

    def take(self, state: Mapping[str, Any]) -> str:
        """Continue from what a snapshot of this or of another stream holds; it is refused whole if it does not fit."""
        try:
            own, _ = self.books, Books(**state["books"])
        except (KeyError, TypeError):
            raise StateError("the snapshot is not of a stream, or of another version") from None
        self.method.load_state_dict(state["method"])
        self.load(state)
        self.books.snapshot, self.books.events, self.books.candidate = own.snapshot, own.events, 0
        return "load"

    def start_over(self) -> Action:
        """Begin anew: what failed may be tried again."""
        self.books.collapsed = self.books.returned = False
        self._set_pace(Pace())
        return self.restore_source()

    def _forget(self) -> None:
        self.books.updates = self.books.since_check = self.books.candidate = 0
        self._lasting.pop("class_shift", None)
        if self.watch is not None:
            self.watch.forget_predictions()

    def _save_if_healthy(self, images: Tensor) -> None:
        """Write a snapshot; the previous one has proved good if nothing happened since. If the check fails, undo."""
        stale = 2 * self.books.since_check >= self.policy.snapshot_every
        if self.watch is not None and self.books.updates and len(images) and stale:
            check = self.watch.check(self.method, images, drifting="drift" in self._lasting)
            self.books.since_check = 0
            self.watch.credit -= check.images if check else 0
            if check and not check.passed:
                self._collapse("the canary is predicted otherwise", check.evidence(), None)
                return
        if self.books.candidate:
            self.books.good = self.books.candidate
            self._set_pace(self._pace.faster())
        self.save(candidate=True)

    def save(self, *, good: bool = False, candidate: bool = False, within_batch: bool = False) -> bool:
        """Write the state; a failing disk is an event, not the end of the stream. True if it was written."""
        books = self.books
        books.snapshot += 1
        books.since_snapshot = 0
        if good:
            books.good = books.snapshot
        if candidate:
            books.candidate = books.snapshot
        try:
            state = {"method": self.method.state_dict(), **self.state()}
            self.store.write(Snapshot(books.snapshot, state, within_batch=within_batch))
            keep = 1 if isinstance(self.store, Memory) else self.policy.keep
            self.store.prune(keep, always=(books.good, books.candidate))
        except StateError as error:
            self._event("storage", "none", str(error), {"snapshot": books.snapshot})
            return False
        return True

    def state(self) -> dict[str, Any]:
        """Everything but the method's state, as tensors and plain values."""
        watch = self.watch.state() if self.watch else None
        return {"books": vars(self.books).copy(), "lasting": dict(self._lasting), "watch": watch}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self.books, self._lasting = Books(**state["books"]), dict(state["lasting"])
        if self.watch is not None and state["watch"] is not None:
            self.watch.load(state["watch"])

    def _event(self, kind: EventKind, action: str, reason: str, evidence: Mapping[str, Any]) -> Event:
        self.books.events += 1
        if kind not in ("storage", "merge"):
            self.books.attentive = ATTENTIVE
        event = Event(self.books.events, self.books.batches, time.time(), kind, action, reason, dict(evidence))
        self._events.append(event)
        if self._on_event is not None:
            self._on_event(event)
        return event

    def start(self, snapshot: int, problems: list[str]) -> None:
        """Begin from a snapshot that was loaded or, if its number is 0, from the method as it is."""
        if problems or snapshot:
            reason = "a damaged snapshot was passed over" if problems else "went on from a snapshot"
            self._event("start", "none", reason, {"snapshot": snapshot, "problems": problems})
        else:
            self.save(good=True)

    def on_request(self, action: str, do: Callable[[], str | None]) -> Event:
        """Do what a person asked for, with a snapshot before and after."""
        self.catch_up()
        self.save()
        done = do() or action
        event = self._event("request", done, "asked for", {})
        self.save(good=done in ("source", "load"))
        return event
