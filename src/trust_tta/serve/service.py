"""The service without HTTP: a network, its streams, the engine, the journal, the board and the metrics."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, TypeVar

import torch
from torch import Tensor

from trust_tta.atomic import write_whole
from trust_tta.config_io import read_json
from trust_tta.errors import ConfigError, StateError
from trust_tta.live.calibration import calibrate
from trust_tta.live.guard import Event, Guard
from trust_tta.live.snapshots import Folder, hold, write_state
from trust_tta.live.stream import REFERENCE_FILE
from trust_tta.methods.base import Method
from trust_tta.methods.registry import create_method
from trust_tta.methods.state import network_state
from trust_tta.models.checkpoint import Checkpoint
from trust_tta.models.weights import encode_weights
from trust_tta.preprocessing import Preprocessing
from trust_tta.serve.dashboard import Board
from trust_tta.serve.engine import Answer, Batch, Engine
from trust_tta.serve.event_log import Journal, Label
from trust_tta.serve.metrics import Metrics
from trust_tta.serve.pool import Pool
from trust_tta.serve.settings import RequestError, Settings

T = TypeVar("T")

ACTIONS = ("pause", "resume", "rollback", "reset")
WARM_UP = 8  # images; enough for batch statistics
MOST_WORKERS = 4  # that run batches: the interpreter's lock, which each holds for a part of its batch, allows no more

log = logging.getLogger("trust_tta.serve")


@dataclass(frozen=True, eq=False)
class NetworkFacts:
    """What clients are told of a served network. `outputs`: the shape of one image's logits."""

    name: str
    method_name: str
    preprocessing: Preprocessing
    classes: tuple[str, ...] | None
    outputs: tuple[int, ...]

    def read_label(self, given: Any) -> int:
        """The number of a class that a client gives by number or by name."""
        if isinstance(given, str) and self.classes and given in self.classes:
            return self.classes.index(given)
        count = self.outputs[0]
        if type(given) is int and 0 <= given < count:
            return given
        names = f", or a name such as '{self.classes[0]}'" if self.classes else ""
        raise RequestError(
            400, f"the label {json.dumps(given)[:60]} is not a class; give a number from 0 to {count - 1}{names}"
        )


@dataclass(frozen=True, eq=False)
class Network(NetworkFacts):
    """A served network: a method over it, which each stream forks."""

    method: Method
    checkpoint: Checkpoint

    def facts(self) -> NetworkFacts:
        """All but the weights, for a process that does not load them."""
        return NetworkFacts(**{field.name: getattr(self, field.name) for field in fields(NetworkFacts)})

    def identity(self) -> dict[str, Any]:
        """What a folder of streams must have been made with."""
        options = self.method.options.model_dump(mode="json")
        return {"checkpoint": self.checkpoint.sha256, "method": self.method.name, "options": options}


def open_network(
    checkpoint: str,
    method: str,
    *,
    options: Mapping[str, Any] | None = None,
    device: str | torch.device = "cpu",
    variant: str | None = None,
) -> Network:
    """Load a checkpoint, wrap it in a method, and run it once, so that no client waits for compilation."""
    opened = Checkpoint.open(checkpoint, variant=variant)
    made = create_method(method, opened.load(device=device), **(options or {}))
    size = opened.preprocessing.size
    noise = torch.randn(WARM_UP, 3, size, size, generator=torch.Generator().manual_seed(0)).to(device)
    made.fork()(noise)
    outputs = tuple(made.evaluate(noise).shape[1:])
    name = Path(checkpoint).stem if opened.file is None or Path(checkpoint) == opened.file else checkpoint
    return Network(name, made.name, opened.preprocessing, opened.classes, outputs, made, opened.release())


class Service:
    """Everything but HTTP. `folder` holds what survives a restart; one process at a time may use it.

    `streams`: a folder of streams that several services share; each stream belongs to one of them at a time.
    """

    def __init__(
        self,
        network: Network,
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
        lock = hold(folder / "lock")
        self._let_go = weakref.finalize(self, _close, lock)
        _check_identity(folder / "service.json", network.identity())
        self.journal = Journal(
            folder / "journal.sqlite",
            predictions_kept=self.settings.predictions_kept,
            events_kept=self.settings.events_kept,
        )
        self.metrics = Metrics()
        self.board = Board(network.preprocessing, classes=network.classes)
        self.pool = Pool(
            network.method,
            streams or folder / "streams",
            guard=self.guard,
            most_loaded=self.settings.most_loaded,
            most_streams=self.settings.most_streams,
            on_event=self._on_event,
        )
        self.engine = Engine(self.pool, self.settings, self._on_batch, workers=self._count_workers())
        self.board.start_from(self.journal.events(most=60), self.journal.accuracy())
        self.metrics.watch(
            queued=lambda: self.engine.queued,
            streams=lambda: (len(self.pool.loaded), len(self.pool.names)),
            readings=self._readings,
        )

    def _count_workers(self) -> int:
        """One on a GPU, which works on one batch at a time; on a CPU, as many as pay."""
        on_cpu = next(self.network.method.model.parameters()).device.type == "cpu"
        return min(torch.get_num_threads(), MOST_WORKERS, self.settings.most_loaded) if on_cpu else 1

    @property
    def calibrated(self) -> bool:
        return (self.pool.folder.parent / REFERENCE_FILE).exists()

    def calibrate(self, batches: Iterable[Tensor]) -> None:
        """Learn from clean batches what streams should look like; applies to streams created from now on."""
        device = next(self.network.method.model.parameters()).device
        reference = calibrate(self.network.method.fork(), (batch.to(device) for batch in batches))
        write_state(self.pool.folder.parent / REFERENCE_FILE, reference.state(), about={})

    @property
    def alive(self) -> bool:
        return self.engine.alive

    def start(self) -> None:
        self.engine.start()

    def stop(self) -> None:
        """Answer what is queued, write a last snapshot of every stream, and close the journal."""
        self.engine.drain()
        self.journal.close()
        self._let_go()

    # Requests of clients

    def predict(self, images: Tensor, *, stream: str, adapt: bool) -> Future[Answer]:
        """The future answer for pixels (n, size, size, 3) or network input (n, 3, size, size)."""
        self.pool.check_room(stream)
        return self.engine.submit(stream, images, adapt=adapt)

    def give_feedback(self, labels: Sequence[tuple[str, int]]) -> list[Label | None]:
        """Store labels of predictions; they are on disk when this returns. None for each unknown prediction."""
        try:
            found = self.journal.add_feedback(labels)
        except sqlite3.Error as error:
            log.error("feedback cannot be stored", extra={"reason": str(error)})
            raise RequestError(503, "the feedback cannot be stored; try again", retry_after=5) from None
        for label in found:
            if label is not None and label.before is None:
                self.metrics.feedback.labels(str(label.right).lower()).inc()
            if label is not None:
                self.board.add_label(label)
        return found

    # Changes to streams, by the engine between two batches of theirs

    def act(self, name: str, action: str) -> Future[dict[str, Any]]:
        """Pause, resume, roll back or reset a stream."""

        def do() -> dict[str, Any]:
            with self.pool.using(name) as stream:
                return {"stream": name, "action": getattr(stream, action)().action}

        return self._do(name, do)

    def fork(self, name: str, new: str) -> Future[dict[str, Any]]:
        def do() -> dict[str, Any]:
            self.pool.fork(name, new)
            with self.pool.using(new) as stream:
                return {"stream": new, "batches": stream.batches, "images": stream.images}

        return self._do(name, do, new)

    def remove(self, name: str) -> Future[None]:
        return self._do(name, lambda: self._part_with(name, self.pool.remove))

    def release(self, name: str) -> Future[None]:
        """Write a snapshot of a stream, and let another service have it."""
        return self.engine.ask(lambda: self._part_with(name, self.pool.store), name)

    def _part_with(self, name: str, how: Callable[[str], None]) -> None:
        how(name)
        self.board.remove(name)

    def read_state(self, name: str) -> Future[bytes]:
        """The stream as a snapshot: a safetensors file."""

        def do() -> bytes:
            with self.pool.using(name):
                pass
            self.pool.store(name)  # writes a snapshot
            folder = Folder(self.pool.folder / name)
            try:
                return folder.file(folder.numbers()[-1]).read_bytes()
            finally:
                folder.close()

        return self._do(name, do)

    def write_state(self, name: str, content: bytes) -> Future[dict[str, Any]]:
        """Let a stream, which may be new, continue from a snapshot: a safetensors file."""

        def do() -> dict[str, Any]:
            new = name not in self.pool
            try:
                with NamedTemporaryFile(suffix=".safetensors") as file, self.pool.using(name) as stream:
                    file.write(content)
                    file.flush()
                    return {"stream": name, "action": stream.load(file.name).action, "batches": stream.batches}
            except StateError as error:
                if new:
                    self.pool.remove(name)
                raise RequestError(400, str(error).replace(file.name, "that was sent")) from None
            except OSError as error:
                raise RequestError(503, f"the state cannot be kept ({error.strerror}); free the disk") from None

        self.pool.check_room(name)
        return self.engine.ask(do, name)

    def read_checkpoint(self, name: str) -> Future[bytes]:
        """The whole network with what the stream has learned: a safetensors file that `create_model` takes."""

        def do() -> bytes:
            with self.pool.using(name) as stream:
                return adapted_checkpoint(self.network, stream.method)

        return self._do(name, do)

    def _do(self, name: str, do: Callable[[], T], *others: str) -> Future[T]:
        """Do something with a stream that exists, and others that may not, while no batch of theirs runs."""
        if name not in self.pool:
            raise RequestError(404, f"there is no stream '{name}'; GET /streams lists them")
        return self.engine.ask(do, name, *others)

    def streams(self) -> list[dict[str, Any]]:
        """Every stream and its summary."""
        loaded, summaries = set(self.pool.loaded), self.board.summaries()
        return [summaries.get(name, {"name": name}) | {"loaded": name in loaded} for name in self.pool.names]

    def events(self, stream: str | None, most: int) -> list[dict[str, Any]]:
        """The newest events, of one stream or of all, oldest first."""
        return self.journal.events(stream=stream, most=most)

    # Callbacks of the engine and the streams

    def _on_event(self, stream: str, event: Event) -> None:
        number = 0
        try:
            number = self.journal.add_event(stream, event)
        except sqlite3.Error as error:
            self._lost("an event", error)
        self.metrics.events.labels(event.kind, event.action).inc()
        self.board.add_event(stream, number, event)
        log.info("event", extra={"stream": stream, "kind": event.kind, "action": event.action, "reason": event.reason})

    def _on_batch(self, batch: Batch) -> None:
        rows = [
            (name, int(row.argmax()))
            for answer in batch.answers
            if answer.output.ndim == 2
            for name, row in zip(answer.ids, answer.output, strict=True)
        ]
        try:
            self.journal.add_predictions(batch.name, rows)
        except sqlite3.Error as error:
            self._lost("predictions", error)
        self.metrics.images.labels(str(batch.result.adapted).lower()).inc(len(batch.images))
        self.metrics.batches.inc()
        self.metrics.batch_seconds.observe(batch.seconds)
        self.metrics.batch_images.observe(len(batch.images))
        self.board.add_batch(batch)

    def _lost(self, what: str, error: sqlite3.Error) -> None:
        self.metrics.journal_errors.inc()
        log.error(f"{what} cannot be written to the journal", extra={"reason": str(error)})

    def _readings(self) -> dict[str, dict[str, float | int | None]]:
        summaries = self.board.summaries()
        return {name: summaries[name]["reading"] for name in self.pool.loaded if name in summaries}


def adapted_checkpoint(network: Network, method: Method) -> bytes:
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
