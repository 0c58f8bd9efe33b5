"""What the live page shows: for each stream a few hundred points, the last thumbnails and alarms; and its listeners."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor

from trust_tta.live.alarms import Limits
from trust_tta.live.guard import Event
from trust_tta.preprocessing import Preprocessing
from trust_tta.serve.engine import Batch
from trust_tta.serve.event_log import Label
from trust_tta.serve.images import thumbnail

POINTS = 480  # per curve
TICK = 0.5  # seconds
THUMBNAILS = 10  # per stream
PER_BATCH = 3  # images shown per batch
RECENT = 100  # labels over which accuracy is computed
MOST_STREAMS = 64  # with curves
MOST_EVENTS = 60
BACKLOG = 16  # messages by which a slow listener may lag

# One point of a curve: seconds since 1970, then means over a tick (None: unknown).
CURVES = ("time", "entropy", "confidence", "input_distance", "weight_distance", "agreement", "accuracy")
EVIDENCE = ("score", "least", "agreement", "input_distance", "source_shift", "effective_classes", "snapshot")


@dataclass
class Shown:
    """A predicted image."""

    id: str
    image: Tensor | None  # (h, w, 3) or (3, h, w), until its thumbnail is made
    label: str
    confidence: float
    right: bool | None = None
    picture: str = ""

    def as_dict(self) -> dict[str, Any]:
        shown = {"id": self.id, "src": self.picture, "label": self.label}
        return {**shown, "confidence": _finite(self.confidence), "right": self.right}


@dataclass
class View:
    """One stream on the page."""

    name: str
    number: int  # in order of appearance
    batches: int = 0
    images: int = 0
    adapted: bool = False
    paused: bool = False
    limit: float | None = None  # of the input distance; above it, the page says drift
    labels: int = 0
    right: int = 0
    reading: dict[str, Any] = field(default_factory=dict)
    alarms: set[str] = field(default_factory=set)
    recent: deque[bool] = field(default_factory=lambda: deque(maxlen=RECENT))
    points: deque[list[float | None]] = field(default_factory=lambda: deque(maxlen=POINTS))
    shown: deque[Shown] = field(default_factory=lambda: deque(maxlen=THUMBNAILS))
    readings: list[dict[str, Any]] = field(default_factory=list)  # of this tick
    changed: bool = False

    def summary(self) -> dict[str, Any]:
        plain = ("name", "number", "batches", "images", "adapted", "paused", "limit", "labels", "right", "accuracy")
        reading = {name: _finite(value) for name, value in self.reading.items()}
        return {name: getattr(self, name) for name in plain} | {"alarms": sorted(self.alarms), "reading": reading}

    @property
    def accuracy(self) -> float | None:
        """Over the last labels that came back."""
        return sum(self.recent) / len(self.recent) if self.recent else None


class Board:
    """Written by the engine's threads, read by the event loop's."""

    def __init__(self, preprocessing: Preprocessing, *, classes: tuple[str, ...] | None) -> None:
        self.preprocessing, self.classes = preprocessing, classes
        self._views: OrderedDict[str, View] = OrderedDict()  # the most recently updated comes last
        self._made = 0
        self._events: deque[dict[str, Any]] = deque(maxlen=MOST_EVENTS)
        self._news: list[dict[str, Any]] = []  # events since the last tick
        self._gone: list[str] = []
        self._lock = threading.Lock()
        self._listeners: set[asyncio.Queue[str | None]] = set()
        self._closed = False

    # Updates

    def add_batch(self, batch: Batch) -> None:
        labeled = (answer for answer in batch.answers if answer.output.ndim == 2)  # not maps
        pairs = (pair for answer in labeled for pair in zip(answer.ids, answer.probabilities, strict=True))
        rows = list(islice(pairs, PER_BATCH))
        with self._lock:
            view = self._view(batch.name)
            view.batches, view.images = batch.stream.batches, batch.stream.images
            view.adapted, view.paused, view.changed = batch.result.adapted, batch.stream.paused, True
            view.limit = (batch.stream.reference.limits if batch.stream.reference else Limits()).drift
            if batch.result.reading is not None:
                view.reading = batch.result.reading.as_dict()
                view.readings.append(view.reading)
            for i, (name, row) in enumerate(rows):
                best = int(np.argmax(row))
                image = batch.images[i].detach().cpu()
                view.shown.append(Shown(name, image, self.label_of(best), float(row[best])))

    def add_event(self, stream: str, number: int, event: Event) -> None:
        told = {"id": number, "stream": stream, **vars(event), "evidence": _shown(event.evidence)}
        del told["number"]  # in the stream; the page goes by the id
        with self._lock:
            view = self._view(stream)
            view.changed = True
            if event.kind in ("drift", "class_shift", "few_classes"):
                view.alarms.add(event.kind)
            view.alarms.discard(event.kind.removesuffix("_over") if event.kind.endswith("_over") else "")
            if event.kind == "request" and event.action in ("pause", "resume"):
                view.paused = event.action == "pause"
            self._events.append(told)
            self._news.append(told)

    def add_label(self, label: Label) -> None:
        with self._lock:
            view = self._view(label.stream)
            view.changed = True
            if label.before is None:
                view.labels, view.right = view.labels + 1, view.right + label.right
                view.recent.append(label.right)
            else:  # sent again, perhaps corrected
                view.right += label.right - (label.predicted == label.before)
            for shown in view.shown:
                if shown.id == label.prediction:
                    shown.right = label.right

    def start_from(self, events: Iterable[dict[str, Any]], accuracy: Mapping[str, tuple[int, int]]) -> None:
        """Restore what the journal holds from before."""
        with self._lock:
            for event in events:
                self._events.append(event | {"evidence": _shown(event["evidence"])})
            for name, (labels, right) in accuracy.items():
                view = self._view(name)
                view.labels, view.right = labels, right

    def remove(self, stream: str) -> None:
        with self._lock:
            self._views.pop(stream, None)
            self._gone.append(stream)

    def label_of(self, number: int) -> str:
        return self.classes[number] if self.classes and number < len(self.classes) else str(number)

    def summaries(self) -> dict[str, dict[str, Any]]:
        with self._lock:
            return {name: view.summary() for name, view in self._views.items()}

    def _view(self, name: str) -> View:
        if name not in self._views:
            self._made += 1
            self._views[name] = View(name, self._made)
        view = self._views[name]
        self._views.move_to_end(name)
        while len(self._views) > MOST_STREAMS:
            self._views.popitem(last=False)
        return view

    # Messages to listeners

    async def run(self) -> None:
        """Send listeners what is new, twice a second."""
        while not self._closed:
            await asyncio.sleep(TICK)
            message = await asyncio.to_thread(self.tick)
            if message:
                self._tell(message)

    def tick(self) -> str:
        """Add a point to each curve that changed; the message about it, empty where nothing is new."""
        now = time.time()
        with self._lock:
            for view in self._views.values():
                while view.points and (view.points[-1][0] or 0) > now:  # the clock was set back
                    view.points.pop()
            changed = [view for view in self._views.values() if view.changed]
            told = []
            for view in changed:
                point = _point(now, view)
                view.points.append(point)
                view.readings, view.changed = [], False
                told.append((view, [point]))
            news, self._news, gone, self._gone = self._news, [], self._gone, []
            if not self._listeners or not (told or news or gone):
                return ""
            return self._message(told, news, gone)

    def everything(self) -> str:
        """The first message to a new listener."""
        with self._lock:
            return self._message([(view, list(view.points)) for view in self._views.values()], list(self._events), [])

    def _message(
        self, views: list[tuple[View, list[list[float | None]]]], events: list[dict[str, Any]], gone: list[str]
    ) -> str:
        streams = []
        for view, points in views:
            for shown in view.shown:
                if shown.image is not None:
                    shown.picture, shown.image = thumbnail(shown.image, self.preprocessing), None
            streams.append({**view.summary(), "points": points, "shown": [s.as_dict() for s in view.shown]})
        return json.dumps({"streams": streams, "events": events, "gone": gone}, allow_nan=False)

    def listen(self) -> asyncio.Queue[str | None]:
        """A queue of messages; None ends it."""
        queue: asyncio.Queue[str | None] = asyncio.Queue(BACKLOG)
        self._listeners.add(queue)
        if self._closed:
            queue.put_nowait(None)
        return queue

    def leave(self, queue: asyncio.Queue[str | None]) -> None:
        self._listeners.discard(queue)

    @property
    def listeners(self) -> int:
        return len(self._listeners)

    def close(self) -> None:
        """End all listeners; call it in the event loop's thread."""
        self._closed = True
        for queue in list(self._listeners):
            _end(queue)

    def _tell(self, message: str) -> None:
        for queue in list(self._listeners):
            if queue.full():  # it does not read: the page reconnects by itself and gets the whole board
                self._listeners.discard(queue)
                _end(queue)
            else:
                queue.put_nowait(message)


def _end(queue: asyncio.Queue[str | None]) -> None:
    while queue.full():
        queue.get_nowait()
    queue.put_nowait(None)


def _point(now: float, view: View) -> list[float | None]:
    means = []
    for name in CURVES[1:-1]:
        values = [r[name] for r in view.readings if r.get(name) is not None]
        means.append(_finite(sum(values) / len(values)) if values else None)
    return [round(now, 2), *means, view.accuracy]


def _shown(evidence: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers that the page shows."""
    return {name: _finite(evidence[name]) for name in EVIDENCE if evidence.get(name) is not None}


def _finite(value: Any) -> Any:
    return value if not isinstance(value, float) or math.isfinite(value) else None
