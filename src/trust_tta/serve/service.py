"""The service without HTTP: a network, its streams, the engine, the event log, the dashboard and the metrics."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from functools import partial, wraps
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from torch import Tensor

from trust_tta import __version__
from trust_tta.atomic import write_whole
from trust_tta.config_io import read_json
from trust_tta.errors import ConfigError, StateError
from trust_tta.live.calibration import calibrate
from trust_tta.live.guard import Event, Guard
from trust_tta.live.snapshots import Folder, hold, read_state, write_state
from trust_tta.live.stream import REFERENCE_FILE, Stream
from trust_tta.methods.state import network_state
from trust_tta.models.weights import encode_weights
from trust_tta.preprocessing import network_input
from trust_tta.serve.dashboard import Dashboard
from trust_tta.serve.engine import BatchResult, Engine, RequestPrediction
from trust_tta.serve.event_log import EventLog, Feedback, LabelCounts, StoredPrediction
from trust_tta.serve.metrics import Metrics, gauge, stream_gauges
from trust_tta.serve.network import ServedNetwork
from trust_tta.serve.settings import BadRequestError, RequestError, Settings
from trust_tta.serve.stream_cache import DISK_RETRY_SECONDS, StreamCache

T = TypeVar("T")
P = ParamSpec("P")

ACTIONS = ("pause", "resume", "rollback", "reset")
EVENT_LOG_FILE = "journal.sqlite"

log = logging.getLogger("trust_tta.serve")


def between_batches(method: Callable[Concatenate[Service, P], T]) -> Callable[Concatenate[Service, P], Future[T]]:
    """A method that the engine's thread calls between two batches; the caller gets a future."""

    @wraps(method)
    def submit(self: Service, /, *given: P.args, **named: P.kwargs) -> Future[T]:
        return self.engine.submit_task(partial(method, self, *given, **named))

    return submit


class Service:
    """Everything but HTTP. `folder` keeps the state across restarts; one process at a time may use it.

    `streams`: a folder of streams that several services share; each stream belongs to one of them at a time.
    """

    def __init__(
        self,
        network: ServedNetwork,
        folder: Path,
        *,
        guard: Guard | None = None,
        settings: Settings | None = None,
        streams: Path | None = None,
    ) -> None:
        self.network, self.folder = network, folder
        self.settings = settings or Settings()
        folder.mkdir(parents=True, exist_ok=True)
        self._unlock = hold(folder / "lock", self)
        _check_identity(folder / "service.json", network)
        self.event_log = EventLog(folder / EVENT_LOG_FILE)
        self.metrics = Metrics(self._gauges)
        self.dashboard = Dashboard(network, count_labels=self._count_labels)
        self.streams = StreamCache(
            network.method,
            streams or folder / "streams",
            guard=guard or Guard(),
            max_loaded=self.settings.max_loaded,
            max_streams=self.settings.max_streams,
            on_event=self._on_event,
        )
        self.engine = Engine(self.streams, network.preprocessing, self.settings, self._on_batch)
        self._unrecorded: set[str] = set()  # streams with an event that could not be written
        self.dashboard.restore(self.events(None, 60), self.event_log.labeled_streams())

    @property
    def calibrated(self) -> bool:
        return (self.streams.folder.parent / REFERENCE_FILE).exists()

    def calibrate(self, batches: Iterable[Tensor]) -> None:
        """Set the limits of the alarms from clean batches; applies to streams created from now on."""
        device = next(self.network.method.model.parameters()).device
        reference = calibrate(self.network.method.fork(), (batch.to(device) for batch in batches))
        write_state(self.streams.folder.parent / REFERENCE_FILE, reference.state(), about={})

    @property
    def ready(self) -> bool:
        return self.engine.alive and self.event_log.in_place()

    def stop(self) -> None:
        """Answer the queued requests, write a last snapshot of every stream, and close the event log."""
        self.engine.drain()
        self.event_log.close()
        self._unlock()

    def predict(self, images: Tensor, *, stream: str, adapt: bool) -> Future[RequestPrediction]:
        """Queue pixels (n, size, size, 3) or network input (n, 3, size, size)."""
        if images.is_floating_point():
            network_input(self.network.method.model, images)  # warns where they were not preprocessed
        return self.engine.submit(stream, images, adapt=adapt)

    def give_feedback(self, labels: Sequence[tuple[str, int]]) -> list[Feedback | None]:
        """Store labels of predictions; they are on disk when this returns. None for each unknown prediction."""
        try:
            found = self.event_log.add_feedback(labels)
        except sqlite3.Error as error:
            log.error("feedback cannot be stored", extra={"reason": str(error)})
            raise RequestError(503, "the feedback cannot be stored; try again", retry_after=5) from None
        stored = [feedback for feedback in found if feedback]
        new = [feedback for feedback in stored if feedback.previous is None]
        for feedback in new:
            self.metrics.feedback.labels(str(feedback.correct).lower()).inc()
        self.dashboard.add_feedback(stored)
        with suppress(RequestError):  # the service is stopping; the labels are stored
            self._tell_guards([feedback for feedback in new if feedback.compared])
        return found

    @between_batches
    def _tell_guards(self, labels: Sequence[Feedback]) -> None:
        """Add labels of images that the source predicted, too, to the harm tests of their streams."""
        batches = defaultdict[tuple[str, int], list[tuple[int, int, int]]](list)
        for feedback in labels:
            batch, adapted, source = feedback.compared or (0, 0, 0)
            batches[feedback.stream, batch].append((adapted, source, feedback.label))
        for (name, batch), rows in batches.items():
            try:
                if name in self.streams:
                    classes = torch.tensor(rows)
                    self.streams.open(name).add_labels(classes[:, :2], classes[:, 2], batch=batch)
            except (RequestError, StateError) as error:
                log.warning("labels do not reach the guard", extra={"stream": name, "reason": str(error)})

    @between_batches
    def act(self, name: str, action: str) -> dict[str, Any]:
        """Pause, resume, roll back or reset a stream."""
        stream = self._open(name)
        return {"stream": name, "action": self._change(name, stream, getattr(stream, action)).action}

    @between_batches
    def remove(self, name: str) -> None:
        """Remove a stream with its snapshots, predictions and labels."""
        self._check_known(name)
        self.streams.remove(name)
        try:
            self.event_log.remove_stream(name)
        except sqlite3.Error as error:
            log.error("labels cannot be removed", extra={"stream": name, "reason": str(error)})
            reason = f"the labels of the stream '{name}' cannot be removed"
            raise RequestError(503, reason, retry_after=DISK_RETRY_SECONDS) from None
        self.dashboard.remove(name)

    @between_batches
    def release(self, name: str) -> None:
        """Write a snapshot of a stream and close it, so that another service can open it."""
        self.streams.store(name)
        self.dashboard.remove(name)

    @between_batches
    def read_state(self, name: str) -> bytes:
        """The stream as a snapshot: a safetensors file."""
        self._open(name)
        self.streams.store(name)  # writes a snapshot
        with closing(Folder(self.streams.folder / name)) as folder:
            return folder.file(folder.numbers()[-1]).read_bytes()

    @between_batches
    def write_state(self, name: str, content: bytes | bytearray) -> dict[str, Any]:
        """Let a stream, which may be new, continue from a snapshot: a safetensors file."""
        new = name not in self.streams
        with NamedTemporaryFile(suffix=".safetensors") as file:
            try:
                file.write(content)
                file.flush()
                read_state(Path(file.name))  # before a stream is made for it
                stream = self.streams.open(name)
                event = self._change(name, stream, lambda: stream.load(file.name))
                return {"stream": name, "action": event.action, "batches": stream.batches}
            except StateError as error:
                refused: RequestError = BadRequestError(str(error).replace(file.name, "that was sent"))
            except OSError as error:
                refused = RequestError(503, f"the state cannot be kept ({error.strerror}); free the disk")
            if new and name in self.streams:
                self.streams.remove(name)
            raise refused

    @between_batches
    def read_checkpoint(self, name: str) -> bytes:
        """The whole adapted network: a safetensors file that `create_model` takes."""
        method, checkpoint = self._open(name).method, self.network.checkpoint
        about = {"adapted_by": method.name, "adapted_from": checkpoint.sha256}
        return encode_weights(network_state(method), {**checkpoint.to_metadata(), **about})

    def _check_known(self, name: str) -> None:
        if name not in self.streams:
            raise RequestError(404, f"there is no stream '{name}'; GET /streams lists them")

    def _open(self, name: str) -> Stream:
        """A stream that exists."""
        self._check_known(name)
        return self.streams.open(name)

    def _change(self, name: str, stream: Stream, change: Callable[[], Event]) -> Event:
        """Change a stream; refuse to acknowledge it unless the snapshot and the event are on disk."""
        self._unrecorded.discard(name)
        event = change()
        if not stream.saved or name in self._unrecorded:
            reason = f"the stream '{name}' was changed in memory but cannot be written, so a restart would undo it"
            raise RequestError(503, f"{reason}; free or repair the disk", retry_after=DISK_RETRY_SECONDS)
        return event

    def metrics_text(self) -> bytes:
        """All metrics in the format that Prometheus reads."""
        return self.metrics.text()

    def page_updates(self, since: float) -> dict[str, Any]:
        """Everything on the live page that is newer than a time in seconds since 1970."""
        return self.dashboard.since(since)

    def list_streams(self) -> list[dict[str, Any]]:
        """The summaries of all streams."""
        loaded, summaries = set(self.streams.loaded), self.dashboard.summaries()
        return [summaries.get(name, {"name": name}) | {"loaded": name in loaded} for name in self.streams.names]

    def events(self, stream: str | None, limit: int) -> list[dict[str, Any]]:
        """The newest events, of one stream or of all, oldest first."""
        try:
            return self.event_log.events(stream=stream, limit=limit)
        except sqlite3.Error as error:
            raise StateError(f"the event log {self.event_log.path} cannot be read ({error})") from error

    def _on_event(self, stream: str, event: Event) -> None:
        number = 0
        try:
            number = self.event_log.add_event(stream, event)
        except sqlite3.Error as error:
            self._unrecorded.add(stream)
            self._report_write_error("an event", error)
        self.metrics.events.labels(event.kind, event.action).inc()
        self.dashboard.add_event(stream, number, event)
        log.info("event", extra={"stream": stream, "kind": event.kind, "action": event.action, "reason": event.reason})

    def _on_batch(self, batch: BatchResult) -> None:
        if batch.output.ndim == 2:  # not segmentation
            compared = torch.full((len(batch.ids), 2), -1) if batch.result.compared is None else batch.result.compared
            found = zip(batch.ids, batch.output.argmax(1).tolist(), compared.tolist(), strict=True)
            rows = [
                StoredPrediction(name, best, (batch.result.batch, adapted, source) if source >= 0 else None)
                for name, best, (adapted, source) in found
            ]
            try:
                self.event_log.add_predictions(batch.name, rows)
            except sqlite3.Error as error:
                self._report_write_error("predictions", error)
        self.metrics.images.labels(str(batch.result.adapted).lower()).inc(len(batch.images))
        self.metrics.batches.inc()
        self.metrics.batch_seconds.observe(batch.seconds)
        self.metrics.batch_images.observe(len(batch.images))
        self.dashboard.add_batch(batch)

    def _report_write_error(self, what: str, error: sqlite3.Error) -> None:
        self.metrics.event_log_errors.inc()
        log.error(f"{what} cannot be written to the event log", extra={"reason": str(error)})

    def _count_labels(self, stream: str) -> LabelCounts:
        try:
            return self.event_log.label_counts(stream)
        except sqlite3.Error as error:
            log.error("labels cannot be counted", extra={"stream": stream, "reason": str(error)})
            return LabelCounts()

    def _gauges(self) -> Iterator[Metric]:
        loaded, total, summaries = self.streams.loaded, len(self.streams.names), self.dashboard.summaries()
        yield gauge("build_info", "the version that runs", "version", {__version__: 1})
        yield GaugeMetricFamily("trust_tta_queued_images", "queued images", value=self.engine.queued)
        places = {"memory": len(loaded), "disk": total - len(loaded)}
        yield gauge("streams", "streams by where they are", "place", places)
        yield from stream_gauges({name: summaries[name]["reading"] for name in loaded if name in summaries})


def _check_identity(path: Path, network: ServedNetwork) -> None:
    """Refuse streams of another network or method: their states would not fit, or would fit and be wrong."""
    options = network.method.options.model_dump(mode="json")
    identity = {"checkpoint": network.checkpoint.sha256, "method": network.method.name, "options": options}
    if not path.exists():
        write_whole(path, json.dumps(identity, indent=1) + "\n")
        return
    stored = read_json(path, error=StateError)
    for key, value in identity.items():
        if not isinstance(stored, dict) or stored.get(key) != value:
            raise ConfigError(f"'{path.parent}' holds streams of another {key} (see {path.name}); give another folder")
