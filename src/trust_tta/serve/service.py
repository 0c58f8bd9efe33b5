"""The service without HTTP: a network, its streams, the engine, the event log, the dashboard and the metrics."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, TypeVar

import torch
from torch import Tensor

from trust_tta.atomic import write_whole
from trust_tta.config_io import read_json
from trust_tta.errors import ConfigError, StateError, TrustWarning
from trust_tta.live.calibration import calibrate
from trust_tta.live.guard import Event, Guard
from trust_tta.live.snapshots import Folder, hold, read_state, write_state
from trust_tta.live.stream import REFERENCE_FILE, Stream
from trust_tta.methods.base import Method
from trust_tta.methods.state import network_state
from trust_tta.models.base import ScanNetwork
from trust_tta.models.checkpoint import CHECKED_BATCHES
from trust_tta.models.weights import encode_weights
from trust_tta.serve.dashboard import Dashboard
from trust_tta.serve.engine import BatchResult, Engine, RequestPrediction
from trust_tta.serve.event_log import EventLog, Feedback, LabelCounts, StoredPrediction
from trust_tta.serve.metrics import Metrics
from trust_tta.serve.network import ServedNetwork
from trust_tta.serve.settings import BadRequestError, RequestError, Settings
from trust_tta.serve.stream_cache import DISK_RETRY_SECONDS, StreamCache

T = TypeVar("T")

ACTIONS = ("pause", "resume", "rollback", "reset")
EVENT_LOG_FILE = "journal.sqlite"

log = logging.getLogger("trust_tta.serve")


class Service:
    """Everything but HTTP. `folder` holds what survives a restart; one process at a time may use it.

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
        self.guard = guard or Guard()
        folder.mkdir(parents=True, exist_ok=True)
        self._unlock = weakref.finalize(self, _close, hold(folder / "lock"))
        _check_identity(folder / "service.json", network.identity())
        self.event_log = EventLog(folder / EVENT_LOG_FILE)
        self.metrics = Metrics()
        self.dashboard = Dashboard(network.preprocessing, classes=network.classes, count_labels=self._count_labels)
        self.streams = StreamCache(
            network.method,
            streams or folder / "streams",
            guard=self.guard,
            max_loaded=self.settings.max_loaded,
            max_streams=self.settings.max_streams,
            on_event=self._on_event,
        )
        self.engine = Engine(self.streams, network.preprocessing, self.settings, self._on_batch)
        self._unrecorded: set[str] = set()  # streams with an event that could not be written
        checks_itself = isinstance(network.method.model, ScanNetwork)
        self._unchecked_batches = 0 if checks_itself else CHECKED_BATCHES
        self.dashboard.restore(self.events(None, 60), self.event_log.labeled_streams())
        self.metrics.watch(
            queued=lambda: self.engine.queued,
            streams=lambda: (len(self.streams.loaded), len(self.streams.names)),
            readings=self._readings,
        )

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

    def start(self) -> None:
        self.engine.start()

    def stop(self) -> None:
        """Answer what is queued, write a last snapshot of every stream, and close the event log."""
        self.engine.drain()
        self.event_log.close()
        self._unlock()

    # Requests of clients

    def predict(self, images: Tensor, *, stream: str, adapt: bool) -> Future[RequestPrediction]:
        """Queue pixels (n, size, size, 3) or network input (n, 3, size, size)."""
        self.streams.check_room(stream)
        if self._unchecked_batches and images.is_floating_point():
            self._check_input(images)
        return self.engine.submit(stream, images, adapt=adapt)

    def _check_input(self, images: Tensor) -> None:
        """Warn if network input cannot have gone through the preprocessing; our own networks check this themselves."""
        self._unchecked_batches -= 1
        if mismatch := self.network.preprocessing.mismatch(images):
            self._unchecked_batches = 0
            warnings.warn(f"{mismatch}; send pixels as UINT8, or preprocess them", TrustWarning, stacklevel=2)

    def give_feedback(self, labels: Sequence[tuple[str, int]]) -> list[Feedback | None]:
        """Store labels of predictions; they are on disk when this returns. None for each unknown prediction."""
        try:
            found = self.event_log.add_feedback(labels)
        except sqlite3.Error as error:
            log.error("feedback cannot be stored", extra={"reason": str(error)})
            raise RequestError(503, "the feedback cannot be stored; try again", retry_after=5) from None
        for feedback in found:
            if feedback is not None:
                if feedback.previous is None:
                    self.metrics.feedback.labels(str(feedback.correct).lower()).inc()
                self.dashboard.add_feedback(feedback)
        self._tell_guards([feedback for feedback in found if feedback and feedback.previous is None])
        return found

    def _tell_guards(self, labels: Sequence[Feedback]) -> None:
        """Let labels of images that the source predicted too enter the tests of their streams."""
        batches: dict[tuple[str, int], list[tuple[int, int, int]]] = {}
        for feedback in labels:
            if feedback.compared is not None:
                batch, *classes = feedback.compared
                batches.setdefault((feedback.stream, batch), []).append((classes[0], classes[1], feedback.label))

        def tell() -> None:
            for (name, batch), rows in batches.items():
                try:
                    if name in self.streams:
                        told = torch.tensor(rows)
                        self.streams.open(name).add_labels(told[:, :2], told[:, 2], batch=batch)
                except (RequestError, StateError) as error:
                    log.warning("labels do not reach the guard", extra={"stream": name, "reason": str(error)})

        if batches:
            with suppress(RequestError):  # the service is stopping; the labels are stored
                self.engine.submit_task(tell)

    # Changes to streams, made by the engine between two batches

    def act(self, name: str, action: str) -> Future[dict[str, Any]]:
        """Pause, resume, roll back or reset a stream."""

        def act() -> dict[str, Any]:
            stream = self.streams.open(name)
            return {"stream": name, "action": self._change(name, stream, getattr(stream, action)).action}

        return self._submit(name, act)

    def _change(self, name: str, stream: Stream, change: Callable[[], Event]) -> Event:
        """Change a stream; refuse to acknowledge it unless the snapshot and the event are on disk."""
        self._unrecorded.discard(name)
        event = change()
        if not stream.saved or name in self._unrecorded:
            raise RequestError(
                503,
                f"the stream '{name}' was changed in memory but cannot be written, so a restart would undo it; "
                "free or repair the disk, and try again",
                retry_after=DISK_RETRY_SECONDS,
            )
        return event

    def fork(self, name: str, new: str) -> Future[dict[str, Any]]:
        """Create the stream `new`, which continues from this one."""

        def fork() -> dict[str, Any]:
            self.streams.fork(name, new)
            stream = self.streams.open(new)
            return {"stream": new, "batches": stream.batches, "images": stream.images}

        return self._submit(name, fork)

    def remove(self, name: str) -> Future[None]:
        """Remove a stream with its snapshots, predictions and labels."""

        def remove() -> None:
            self.streams.remove(name)
            try:
                self.event_log.remove_stream(name)
            except sqlite3.Error as error:
                log.error("labels cannot be removed", extra={"stream": name, "reason": str(error)})
                raise RequestError(
                    503, f"the labels of the stream '{name}' cannot be removed", retry_after=DISK_RETRY_SECONDS
                ) from None
            self.dashboard.remove(name)

        return self._submit(name, remove)

    def release(self, name: str) -> Future[None]:
        """Write a snapshot of a stream and close it, so that another service can open it."""

        def release() -> None:
            self.streams.store(name)
            self.dashboard.remove(name)

        return self.engine.submit_task(release)

    def read_state(self, name: str) -> Future[bytes]:
        """The stream as a snapshot: a safetensors file."""

        def read() -> bytes:
            self.streams.open(name)
            self.streams.store(name)  # writes a snapshot
            folder = Folder(self.streams.folder / name)
            try:
                return folder.file(folder.numbers()[-1]).read_bytes()
            finally:
                folder.close()

        return self._submit(name, read)

    def write_state(self, name: str, content: bytes) -> Future[dict[str, Any]]:
        """Let a stream, which may be new, continue from a snapshot: a safetensors file."""

        def write() -> dict[str, Any]:
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

        self.streams.check_room(name)
        return self.engine.submit_task(write)

    def read_checkpoint(self, name: str) -> Future[bytes]:
        """The whole adapted network: a safetensors file that `create_model` takes."""

        return self._submit(name, lambda: adapted_checkpoint(self.network, self.streams.open(name).method))

    def _submit(self, name: str, function: Callable[[], T]) -> Future[T]:
        """Call a function on a stream that exists, between two batches."""
        if name not in self.streams:
            raise RequestError(404, f"there is no stream '{name}'; GET /streams lists them")
        return self.engine.submit_task(function)

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

    # Callbacks of the engine and the streams

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
        result = batch.result
        compared = None if result.compared is None else iter(result.compared.tolist())
        rows = []
        for prediction in batch.predictions:
            if prediction.output.ndim == 2:
                for name, best in zip(prediction.ids, prediction.output.argmax(1).tolist(), strict=True):
                    adapted, source = next(compared) if compared else (-1, -1)
                    rows.append(StoredPrediction(name, best, (result.batch, adapted, source) if source >= 0 else None))
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
            return LabelCounts(0, 0, {})

    def _readings(self) -> dict[str, dict[str, float | int | None]]:
        summaries = self.dashboard.summaries()
        return {name: summaries[name]["reading"] for name in self.streams.loaded if name in summaries}


def adapted_checkpoint(network: ServedNetwork, method: Method) -> bytes:
    """The network with a method's weights and statistics, and its metadata, as safetensors."""
    about = {"adapted_by": method.name, "adapted_from": network.checkpoint.sha256}
    return encode_weights(network_state(method), {**network.checkpoint.info.to_metadata(), **about})


def _close(lock: int | None) -> None:
    if lock is not None:
        os.close(lock)


def _check_identity(path: Path, identity: dict[str, Any]) -> None:
    """Refuse streams of another network or method: their states would not fit, or would fit and be wrong."""
    if not path.exists():
        write_whole(path, json.dumps(identity, indent=1) + "\n")
        return
    stored = read_json(path, error=StateError)
    for key in ("checkpoint", "method", "options"):
        if not isinstance(stored, dict) or stored.get(key) != identity[key]:
            raise ConfigError(
                f"'{path.parent}' holds streams of another {key} ({path.name} says which); give another folder, or the "
                f"same {key}"
            )
