"""The data of the live page: curves, thumbnails, counts and alarms of each stream; and its listeners."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from trust_tta.live.guard import Event
from trust_tta.preprocessing import Preprocessing
from trust_tta.serve.engine import BatchResult
from trust_tta.serve.event_log import RECENT_LABELS, Feedback, LabelCounts

MAX_POINTS = 480  # per curve
TICK = 0.5  # seconds
MAX_THUMBNAILS = 10  # per stream
THUMBNAIL_SIDE = 64  # pixels
IMAGES_PER_BATCH = 3  # of which thumbnails are kept
MAX_STREAMS = 64  # with curves
MAX_EVENTS = 60
MAX_BACKLOG = 16  # messages by which a slow listener may lag

# One point of a curve: seconds since 1970, then means over a tick (None: unknown).
CURVES = ("time", "entropy", "confidence", "weight", "certainty", "agreement", "accuracy")
EVIDENCE = ("evidence", "weight", "e_value", "agreement", "snapshot")


@dataclass
class Thumbnail:
    """A predicted image. `url`: empty until somebody looks at the page."""

    id: str
    image: Tensor | None  # (3, h, w), until the thumbnail is made
    label: str
    confidence: float
    right: bool | None = None
    url: str = ""

    def as_dict(self) -> dict[str, Any]:
        shown = {"id": self.id, "src": self.url, "label": self.label}
        return {**shown, "confidence": _finite(self.confidence), "right": self.right}


@dataclass
class StreamView:
    """One stream on the page."""

    name: str
    number: int  # in order of appearance
    labels: int = 0
    right: int = 0
    recent: dict[str, bool] = field(default_factory=dict)  # the last labels: whether each prediction was right
    batches: int = 0
    images: int = 0
    adapted: bool = False
    paused: bool = False
    reading: dict[str, Any] = field(default_factory=dict)
    alarms: set[str] = field(default_factory=set)
    points: deque[list[float | None]] = field(default_factory=lambda: deque(maxlen=MAX_POINTS))
    thumbnails: deque[Thumbnail] = field(default_factory=lambda: deque(maxlen=MAX_THUMBNAILS))
    readings: list[dict[str, Any]] = field(default_factory=list)  # of this tick
    changed: bool = False

    def summary(self) -> dict[str, Any]:
        plain = ("name", "number", "batches", "images", "adapted", "paused", "labels", "right", "accuracy")
        reading = {name: _finite(value) for name, value in self.reading.items()}
        return {name: getattr(self, name) for name in plain} | {"alarms": sorted(self.alarms), "reading": reading}

    @property
    def accuracy(self) -> float | None:
        """Over the last labels."""
        return sum(self.recent.values()) / len(self.recent) if self.recent else None


class Dashboard:
    """Written by the engine's threads, read by the event loop's.

    `count_labels` returns the labels of a stream that are stored already.
    """

    def __init__(
        self,
        preprocessing: Preprocessing,
        *,
        classes: tuple[str, ...] | None,
        count_labels: Callable[[str], LabelCounts] = lambda stream: LabelCounts(0, 0, {}),
    ) -> None:
        self.preprocessing, self.classes, self._count_labels = preprocessing, classes, count_labels
        self._views: OrderedDict[str, StreamView] = OrderedDict()  # the most recently updated comes last
        self._made = 0
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._new_events: list[dict[str, Any]] = []  # since the last tick
        self._removed: list[str] = []
        self._lock = threading.Lock()
        self._listeners: set[asyncio.Queue[str | None]] = set()
        self._closed = False

    # Updates

    def add_batch(self, batch: BatchResult) -> None:
        labeled = (p for p in batch.predictions if p.output.ndim == 2)  # not segmentation
        rows = list(
            islice(((i, row) for p in labeled for i, row in zip(p.ids, p.probabilities, strict=True)), IMAGES_PER_BATCH)
        )
        with self._lock:
            view = self._view(batch.name)
            view.batches, view.images = batch.stream.batches, batch.stream.images
            view.adapted, view.paused, view.changed = batch.result.adapted, batch.stream.paused, True
            if batch.result.reading is not None:
                view.reading = batch.result.reading.as_dict()
                view.readings.append(view.reading)
            for i, (name, row) in enumerate(rows):
                confidence, best = row.max(0)
                image = batch.images[i].detach().cpu()
                view.thumbnails.append(Thumbnail(name, image, self.label_of(int(best)), float(confidence)))

    def add_event(self, stream: str, number: int, event: Event) -> None:
        shown = {"id": number, "stream": stream, **vars(event), "evidence": _shown(event.evidence)}
        del shown["number"]  # in the stream; the page goes by the id
        with self._lock:
            view = self._view(stream)
            view.changed = True
            if event.kind == "few_classes":
                view.alarms.add(event.kind)
            view.alarms.discard(event.kind.removesuffix("_over") if event.kind.endswith("_over") else "")
            if event.kind == "request" and event.action in ("pause", "resume"):
                view.paused = event.action == "pause"
            self._events.append(shown)
            self._new_events.append(shown)

    def add_feedback(self, feedback: Feedback) -> None:
        """Count a label that has been stored, or corrected."""
        with self._lock:
            known = feedback.stream in self._views
            view = self._view(feedback.stream)  # a new view counts all stored labels, this one too
            view.changed = True
            if known and feedback.previous is None:
                view.labels, view.right = view.labels + 1, view.right + feedback.correct
                view.recent[feedback.prediction] = feedback.correct
                while len(view.recent) > RECENT_LABELS:
                    del view.recent[next(iter(view.recent))]
            elif known:
                view.right += feedback.correct - (feedback.predicted == feedback.previous)
                if feedback.prediction in view.recent:
                    view.recent[feedback.prediction] = feedback.correct
            for shown in view.thumbnails:
                if shown.id == feedback.prediction:
                    shown.right = feedback.correct

    def restore(self, events: Iterable[dict[str, Any]], streams: Iterable[str]) -> None:
        """Show stored events, and the label counts of streams."""
        with self._lock:
            for event in events:
                self._events.append(event | {"evidence": _shown(event["evidence"])})
            for name in streams:
                self._view(name)

    def remove(self, stream: str) -> None:
        with self._lock:
            self._views.pop(stream, None)
            self._removed.append(stream)

    def label_of(self, number: int) -> str:
        return self.classes[number] if self.classes and number < len(self.classes) else str(number)

    def summaries(self) -> dict[str, dict[str, Any]]:
        with self._lock:
            return {name: view.summary() for name, view in self._views.items()}

    def _view(self, name: str) -> StreamView:
        if name not in self._views:
            self._made += 1
            counts = self._count_labels(name)
            self._views[name] = StreamView(name, self._made, counts.labels, counts.correct, dict(counts.recent))
        view = self._views[name]
        self._views.move_to_end(name)
        while len(self._views) > MAX_STREAMS:
            self._views.popitem(last=False)
        return view

    # Messages to listeners

    async def run(self) -> None:
        """Send listeners what is new, twice a second."""
        while not self._closed:
            await asyncio.sleep(TICK)
            message = await asyncio.to_thread(self.tick)
            if message:
                self._send(message)

    def tick(self) -> str:
        """Add a point to each curve that changed; returns the message about it, empty if nothing is new."""
        now = time.time()
        with self._lock:
            for view in self._views.values():
                while view.points and (view.points[-1][0] or 0) > now:  # the clock was set back
                    view.points.pop()
            changed = [view for view in self._views.values() if view.changed]
            updates = []
            for view in changed:
                point = _point(now, view)
                view.points.append(point)
                view.readings, view.changed = [], False
                updates.append((view, [point]))
            events, self._new_events, removed, self._removed = self._new_events, [], self._removed, []
            if not self._listeners or not (updates or events or removed):
                return ""
            return self._message(updates, events, removed)

    def everything(self) -> str:
        """The first message to a new listener."""
        with self._lock:
            return self._message([(view, list(view.points)) for view in self._views.values()], list(self._events), [])

    def _message(
        self, views: list[tuple[StreamView, list[list[float | None]]]], events: list[dict[str, Any]], removed: list[str]
    ) -> str:
        streams = []
        for view, points in views:
            for shown in view.thumbnails:
                if shown.image is not None:
                    shown.url, shown.image = thumbnail(shown.image, self.preprocessing), None
            streams.append({**view.summary(), "points": points, "shown": [s.as_dict() for s in view.thumbnails]})
        return json.dumps({"streams": streams, "events": events, "removed": removed}, allow_nan=False)

    def listen(self) -> asyncio.Queue[str | None]:
        """A queue of messages; None ends it."""
        queue: asyncio.Queue[str | None] = asyncio.Queue(MAX_BACKLOG)
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

    def _send(self, message: str) -> None:
        for queue in list(self._listeners):
            if queue.full():  # the page reconnects by itself and gets everything again
                self._listeners.discard(queue)
                _end(queue)
            else:
                queue.put_nowait(message)


def _end(queue: asyncio.Queue[str | None]) -> None:
    while queue.full():
        queue.get_nowait()
    queue.put_nowait(None)


def _point(now: float, view: StreamView) -> list[float | None]:
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


def thumbnail(image: Tensor, preprocessing: Preprocessing) -> str:
    """A small PNG of network input (3, h, w), as a data URL."""
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (preprocessing.mean, preprocessing.std))
    pixels = ((image * std + mean) * 255).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0)
    picture = Image.fromarray(pixels.numpy())
    picture.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
