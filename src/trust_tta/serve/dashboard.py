"""The data of the live page: curves, thumbnails, counts and alarms of each stream."""

from __future__ import annotations

import base64
import io
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from trust_tta.live.guard import Event
from trust_tta.preprocessing import Preprocessing
from trust_tta.serve.engine import BatchResult
from trust_tta.serve.event_log import Feedback, LabelCounts
from trust_tta.serve.network import NetworkInfo

MAX_POINTS = 480  # per curve
TICK = 0.5  # seconds between two points
MAX_THUMBNAILS = 10  # per stream
THUMBNAIL_SIDE = 64  # pixels
IMAGES_PER_BATCH = 3  # of which thumbnails are kept
MAX_STREAMS = 64  # with curves
MAX_EVENTS = 60

# One point of a curve: seconds since 1970, then the last values of a tick (None: unknown).
CURVES = ("time", "entropy", "confidence", "weight", "certainty", "agreement", "accuracy")
EVIDENCE = ("evidence", "weight", "e_value", "agreement", "snapshot")


@dataclass
class Thumbnail:
    """A predicted image. `url`: a data URL, made when the page is first requested."""

    id: str
    image: Tensor | None  # (3, h, w), until the thumbnail is made
    predicted: int
    confidence: float
    right: bool | None = None
    url: str = ""


@dataclass
class StreamView:
    """One stream on the page. `changed`: seconds since 1970."""

    name: str
    number: int  # in order of appearance
    labels: LabelCounts = LabelCounts()
    batches: int = 0
    images: int = 0
    adapted: bool = False
    paused: bool = False
    reading: dict[str, Any] = field(default_factory=dict)
    alarms: set[str] = field(default_factory=set)
    points: deque[list[float | None]] = field(default_factory=lambda: deque(maxlen=MAX_POINTS))
    thumbnails: deque[Thumbnail] = field(default_factory=lambda: deque(maxlen=MAX_THUMBNAILS))
    changed: float = 0.0

    def summary(self) -> dict[str, Any]:
        plain = ("name", "number", "batches", "images", "adapted", "paused")
        return {name: getattr(self, name) for name in plain} | {
            **dict(zip(("labels", "right", "accuracy"), self.labels, strict=True)),
            "alarms": sorted(self.alarms),
            "reading": {name: _finite(value) for name, value in self.reading.items()},
        }

    def add_point(self) -> None:
        """Append the present values to the curves; within a tick, they replace the last point."""
        self.changed = start = time.time()
        while self.points and start - (self.points[-1][0] or 0) < TICK:  # negative if the clock was set back
            start = min(start, self.points.pop()[0] or 0)
        values = [self.reading.get(name) for name in CURVES[1:-1]]
        self.points.append([start, *values, self.labels.recent])


class Dashboard:
    """Written by the engine's thread; the page polls for news every second.

    `count_labels` returns the labels of a stream that are stored already.
    """

    def __init__(
        self, network: NetworkInfo, *, count_labels: Callable[[str], LabelCounts] = lambda stream: LabelCounts()
    ) -> None:
        self.network, self._count_labels, self._made = network, count_labels, 0
        self._views: OrderedDict[str, StreamView] = OrderedDict()  # the most recently updated comes last
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._lock = threading.Lock()

    def add_batch(self, batch: BatchResult) -> None:
        shown = batch.output[:IMAGES_PER_BATCH] if batch.output.ndim == 2 else batch.output[:0]  # not segmentation
        probabilities = shown if batch.stream.method.probabilities else shown.softmax(1)
        with self._lock:
            view = self._view(batch.name)
            view.batches, view.images = batch.stream.batches, batch.stream.images
            view.adapted, view.paused = batch.result.adapted, batch.stream.paused
            if batch.result.reading is not None:
                view.reading = batch.result.reading.as_dict()
            view.add_point()
            for name, image, row in zip(batch.ids, batch.images, probabilities, strict=False):  # the first ones
                confidence, best = row.max(0)
                view.thumbnails.append(Thumbnail(name, image.detach().cpu(), int(best), float(confidence)))

    def add_event(self, stream: str, number: int, event: Event) -> None:
        shown = {"id": number, "stream": stream, **vars(event), "evidence": _shown(event.evidence)}
        del shown["number"]  # in the stream; the page uses the id
        with self._lock:
            view = self._view(stream)
            view.changed = time.time()
            if event.kind == "few_classes":
                view.alarms.add(event.kind)
            elif event.kind.endswith("_over"):
                view.alarms.discard(event.kind.removesuffix("_over"))
            if event.kind == "request" and event.action in ("pause", "resume"):
                view.paused = event.action == "pause"
            self._events.append(shown)

    def add_feedback(self, stored: Sequence[Feedback]) -> None:
        """Count labels that have been stored, or corrected."""
        right = {feedback.prediction: feedback.correct for feedback in stored}
        with self._lock:
            for name in {feedback.stream for feedback in stored}:
                view = self._view(name)
                view.labels = self._count_labels(name)
                for shown in view.thumbnails:
                    shown.right = right.get(shown.id, shown.right)
                view.add_point()

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

    def summaries(self) -> dict[str, dict[str, Any]]:
        with self._lock:
            return {name: view.summary() for name, view in self._views.items()}

    def since(self, moment: float) -> dict[str, Any]:
        """Points and events of the page newer than a time in seconds since 1970, and the names of all streams."""
        with self._lock:
            streams = [
                view.summary()
                | {"points": [list(map(_finite, point)) for point in view.points if (point[0] or 0) >= moment]}
                | {"shown": list(map(self._show, view.thumbnails))}
                for view in self._views.values()
                if view.changed >= moment
            ]
            events = [event for event in self._events if event["time"] >= moment]
            return {"now": time.time(), "names": list(self._views), "streams": streams, "events": events}

    def _show(self, shown: Thumbnail) -> dict[str, Any]:
        if shown.image is not None:
            shown.url, shown.image = thumbnail(shown.image, self.network.preprocessing), None
        about = {"id": shown.id, "src": shown.url, "label": self.network.label_of(shown.predicted)}
        return about | {"confidence": _finite(shown.confidence), "right": shown.right}

    def _view(self, name: str) -> StreamView:
        if name not in self._views:
            self._made += 1
            self._views[name] = StreamView(name, self._made, self._count_labels(name))
        view = self._views[name]
        self._views.move_to_end(name)
        while len(self._views) > MAX_STREAMS:
            self._views.popitem(last=False)
        return view


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
