"""A stream: one method that adapts while it serves. Locking, inputs and the folder; the policy is in `session.py`."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trust_tta.errors import ConfigError, ShapeError, StateError, TrustWarning
from trust_tta.live.calibration import Reference, calibrate
from trust_tta.live.guard import Event, Guard
from trust_tta.live.monitor import Monitor
from trust_tta.live.session import Result, Session
from trust_tta.live.snapshots import Folder, Memory, read_state, write_state
from trust_tta.live.stream_statistics import Reading
from trust_tta.methods.base import Method

MAX_FINGERPRINTED = 8  # tensors of the adapted weights
FINGERPRINT_EVERY = 16  # calls: comparing fingerprints synchronizes with the device
REFERENCE_FILE = "reference.safetensors"

_streams: weakref.WeakSet[Stream] = weakref.WeakSet()  # no two may adapt the same weights
_streams_lock = threading.Lock()


class Stream:
    """Adapts a method on what it predicts, undoes harmful updates, and resumes from its folder.

    `guard`: None adapts without monitoring. `snapshots`: a folder of its own; None keeps them in memory. `reference`:
    what `calibrate` returned; by default what the folder holds, and none is needed. `on_event` is called with every
    event. Calls from several threads are safe and run one after the other.
    """

    def __init__(
        self,
        method: Method,
        *,
        guard: Guard | None = Guard(),  # noqa: B008, it is frozen
        snapshots: str | Path | None = None,
        reference: Reference | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        if not isinstance(method, Method):
            raise ConfigError(f"the method is a {type(method).__name__}; give what tt.create_method makes")
        self.method, self.guard = method, guard
        self._on_event = on_event
        self._lock = threading.RLock()
        self._closed = False
        self._like = next(method.model.parameters())  # looked up once: walking through modules is slow
        some = [*method.adapted][:: -(-len(method.adapted) // MAX_FINGERPRINTED) or 1]
        self._callers: list[Tensor] = [method.shared.network.get_parameter(name) for name in some]
        self._weights: list[Tensor] = [method.adapted[name] for name in some]
        self._folder: Folder | None = None
        self._claim()
        try:
            self._folder = None if snapshots is None else Folder(snapshots)
            file = None if self._folder is None else self._folder.path / REFERENCE_FILE
            if reference is None and file is not None and file.exists():
                self.reference = Reference.from_state(read_state(file)[0])
            else:
                self.reference = reference
            self._session = Session(
                method, guard, self._folder or Memory(), reference=self.reference, on_event=on_event
            )
            if reference is not None:
                self._store_reference(reference)
            self._session.resume()
            self._take_fingerprint()
        except BaseException:
            self._release()
            raise

    def __call__(self, images: Any, *, adapt: bool = True) -> Result:
        """Predict a batch, and adapt on it unless told not to or an alarm forbids it; the guard checks it either way.

        images: float (n, c, h, w) or (c, h, w) as the network wants them; or, for a network that has a `preprocessing`,
        uint8 arrays (n, h, w, 3) or (h, w, 3), PIL images, or a list of them.
        """
        batch = self._prepare(images)
        with self._exclusive():
            return self._session.step(batch, adapt=adapt)

    def feedback(self, result: Result, labels: Any) -> tuple[Event, ...]:
        """Tell the guard the classes (n,) of images that were predicted, -1 where unknown; returns an alarm, if any.

        Labels enter the guard's test and weigh its mixture, at any later time. Only those of images that the source
        predicted too count: `result.compared` says which.
        """
        found = torch.as_tensor(labels).cpu()
        if found.shape != (len(result.logits),) or found.is_floating_point():
            wanted = f"one class number for each of the {len(result.logits)} images, -1 where it is unknown"
            raise ConfigError(f"the labels are {found.dtype} {tuple(found.shape)}; give {wanted}")
        if result.compared is None:
            return ()
        known = (found >= 0) & (result.compared[:, 1] >= 0)
        return self.add_labels(result.compared[known], found[known], batch=result.batch)

    def add_labels(self, compared: Tensor, labels: Tensor, *, batch: int) -> tuple[Event, ...]:
        """`feedback` by rows (m, 2) of `Result.compared`, where the result itself was not kept."""
        with self._exclusive():
            return self._session.add_labels(compared, labels, batch=batch)

    def rollback(self) -> Event:
        """Restore the last good snapshot."""
        return self._request("rollback", self._session.restore_good)

    def reset(self) -> Event:
        """Return to the source network."""
        return self._request("source", self._session.start_over)

    def load(self, snapshot: str | Path) -> Event:
        """Continue from the file of a snapshot, of this stream or of another of the same method and network."""
        state = read_state(Path(snapshot))[0]
        return self._request("load", lambda: self._session.take(state))

    def pause(self) -> Event:
        """Predict without adapting until `resume`."""
        return self._request("pause", lambda: setattr(self._session.counters, "paused", True))

    def resume(self) -> Event:
        """Adapt again."""
        return self._request("resume", lambda: setattr(self._session.counters, "paused", False))

    @property
    def saved(self) -> bool:
        """Whether the last snapshot was written."""
        return self._session.saved

    @property
    def paused(self) -> bool:
        return self._session.counters.paused

    @property
    def batches(self) -> int:
        """The number of batches, over all restarts."""
        return self._session.counters.batches

    @property
    def images(self) -> int:
        return self._session.counters.images

    @property
    def reading(self) -> Reading | None:
        """State of the guard after the last batch."""
        return self._session.reading

    def calibrate(
        self, batches: Iterable[Tensor], *, expected_batches_between_false_alarms: float | None = None
    ) -> Reference:
        """Measure the guard's tolerance on clean batches, and store it with the snapshots."""
        if expected_batches_between_false_alarms is not None:
            warnings.warn(
                "expected_batches_between_false_alarms is ignored; Guard(alpha=...) replaces it",
                TrustWarning,
                stacklevel=2,
            )
        with self._exclusive():
            self.reference = calibrate(self.method, batches)
            self._store_reference(self.reference)
            if self.guard is not None:
                self._session.monitor = Monitor(self.method, self.guard, reference=self.reference)
            self._session.save()
            return self.reference

    def fork(self, *, snapshots: str | Path | None = None) -> Stream:
        """An independent stream that continues from here, over the same frozen weights."""
        with self._exclusive():
            twin = Stream(
                self.method.fork(),
                guard=self.guard,
                snapshots=snapshots,
                reference=self.reference,
                on_event=self._on_event,
            )
            last = twin._session.counters.last_snapshot  # the folder may have held another state
            twin._session.load({"method": self.method.state_dict(), **self._session.state()})
            twin._session.counters.last_snapshot, twin._session.counters.candidate_snapshot = last, 0
            twin._take_fingerprint()
            twin._session.save(good=True)
            return twin

    def close(self, *, even_unsaved: bool = True) -> bool:
        """Write a last snapshot, and release the folder and the network; True if it was written.

        Without `even_unsaved`, a stream that could not be written stays open.
        """
        with self._lock:
            if self._closed:
                return True
            saved = self._session.save()
            if saved or even_unsaved:
                self._release()
            return saved

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _prepare(self, images: Any) -> Tensor:
        """A float batch (n, c, h, w) of the network's dtype and device, preprocessed unless it is a float tensor."""
        if isinstance(images, Tensor) and images.is_floating_point():
            if images.dim() not in (3, 4) or images.numel() == 0:
                shape = tuple(images.shape)
                raise ShapeError(f"images have shape {shape}; give (n, channels, h, w) or (channels, h, w)")
            return (images if images.dim() == 4 else images[None]).to(self._like)
        preprocessing = getattr(self.method.model, "preprocessing", None)
        if preprocessing is None:
            raise ConfigError(
                f"images are {type(images).__name__} and this network has no preprocessing; give a float tensor "
                "(n, channels, h, w) as the network wants it, or a network from a checkpoint that states it"
            )
        batch: Tensor = preprocessing(images.numpy() if isinstance(images, Tensor) else images)
        return batch.to(self._like)

    def _request(self, action: str, do: Callable[[], str | None]) -> Event:
        with self._exclusive():
            return self._session.on_request(action, do)

    def _store_reference(self, reference: Reference) -> None:
        if self._folder is not None:
            write_state(self._folder.path / REFERENCE_FILE, reference.state(), about={})

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Lock out other threads; refuse to continue with weights that something else has changed."""
        with self._lock:
            if self._closed:
                raise StateError("this stream is closed; create another over the same folder")
            before, batches = self._fingerprint, self._session.counters.batches
            due = batches < FINGERPRINT_EVERY or batches % FINGERPRINT_EVERY == 0
            if due or self._versions != [p._version for p in self._callers]:
                now = self._take_fingerprint()
                if before is not None and now is not None and before.device == now.device and not before.equal(now):
                    raise StateError(
                        "the adapted weights changed between two calls: another method or a training uses the same "
                        "network; give each its own (method.fork(), or a copy of the network)"
                    )
            try:
                yield
            finally:
                self._take_fingerprint()

    def _take_fingerprint(self) -> Tensor | None:
        """Copy some of the adapted weights, (m,), in one kernel: an update changes all of them."""
        # PyTorch's counts of in-place changes to the caller's network; other methods over its tensors do not show.
        self._versions = [p._version for p in self._callers]
        with torch.no_grad():
            parts = [p.reshape(-1) for p in self._weights]
            self._fingerprint = torch.cat(parts) if parts else None
        return self._fingerprint

    def _claim(self) -> None:
        with _streams_lock:
            for other in _streams:
                if other.method is self.method or _storages(other.method) & _storages(self.method):
                    raise StateError(
                        "another stream adapts this network; close it, or give this one a method of its own: "
                        "method.fork() shares the frozen weights"
                    )
            _streams.add(self)

    def _release(self) -> None:
        self._closed = True
        if self._folder is not None:
            self._folder.close()
        with _streams_lock:
            _streams.discard(self)


def _storages(method: Method) -> set[int]:
    return {p.untyped_storage().data_ptr() for p in method.adapted.values()}
