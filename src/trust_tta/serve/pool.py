"""Streams by name over one frozen network: those in use are in memory, the others on disk.

Several processes may share the folder; each stream belongs to the process that has it in memory.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trust_tta.errors import StateError
from trust_tta.live.guard import Event, Guard
from trust_tta.live.stream import REFERENCE_FILE, Stream
from trust_tta.methods.base import Method
from trust_tta.serve.settings import STREAM_NAME, RequestError

PATIENCE = 30  # seconds after which to try again what the disk did not take


class Pool:
    """Opens, closes, forks and removes streams, from any thread. A stream in use is not dropped from memory.

    Whoever uses a stream asks for no other: at most `most_loaded` threads may do so at the same time.
    """

    def __init__(
        self,
        method: Method,
        folder: Path,
        *,
        guard: Guard,
        most_loaded: int,
        most_streams: int,
        on_event: Callable[[str, Event], None],
    ) -> None:
        self.method, self.guard, self.folder = method, guard, folder
        self.most_loaded, self.most_streams = most_loaded, most_streams
        self._on_event = on_event
        self._loaded: OrderedDict[str, Stream] = OrderedDict()
        self._users: Counter[str] = Counter()
        self._lock = threading.Lock()  # of these two, held for moments
        self._disk = threading.RLock()  # held while streams come from disk, or go there
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def names(self) -> list[str]:
        return stream_names(self.folder)

    @property
    def loaded(self) -> list[str]:
        with self._lock:
            return list(self._loaded)

    def __contains__(self, name: str) -> bool:
        with self._lock:
            if name in self._loaded:
                return True
        return (self.folder / name).is_dir()

    def check_room(self, name: str) -> None:
        """Refuse a new stream where there are too many."""
        if name not in self and (there := len(self.names)) >= self.most_streams:
            raise RequestError(429, f"there are {there} streams, and no more are accepted; use one of them")

    @contextmanager
    def using(self, name: str) -> Iterator[Stream]:
        """The stream, created or read from its folder where it is not in memory; another may have to go to disk."""
        stream = self._begin_use(name) or self._load(name)
        try:
            yield stream
        finally:
            with self._lock:
                self._users[name] -= 1

    def _begin_use(self, name: str) -> Stream | None:
        with self._lock:
            if name not in self._loaded:
                return None
            self._users[name] += 1
            self._loaded.move_to_end(name)
            return self._loaded[name]

    def _load(self, name: str) -> Stream:
        with self._disk:
            if (stream := self._begin_use(name)) is not None:  # another thread was faster
                return stream
            self.check_room(name)
            self._make_room()
            stream = self._open(name)
            with self._lock:
                self._loaded[name], self._users[name] = stream, 1
            return stream

    def _make_room(self) -> None:
        """Let the least recently used of those that nobody uses go to disk."""
        while True:
            with self._lock:
                if len(self._loaded) < self.most_loaded:
                    return
                name = next(name for name in self._loaded if not self._users[name])
                del self._users[name]
                stream = self._loaded.pop(name)  # first: who asks for it from now on waits for the disk
            self._put_away(name, stream)

    def fork(self, name: str, new: str) -> None:
        """Make a new stream that continues from this one."""
        with self._disk:
            if new in self:
                raise RequestError(409, f"a stream '{new}' already exists; choose another name, or remove it first")
            self.check_room(new)
            with self.using(name) as stream:
                try:
                    # Closed, to be opened again, so that its events carry its own name.
                    written = stream.fork(snapshots=self.folder / new).close()
                except (StateError, OSError):
                    written = False
            if not written:
                shutil.rmtree(self.folder / new, ignore_errors=True)
                reason = f"the stream '{new}' cannot be written; free or repair the disk"
                raise RequestError(503, reason, retry_after=PATIENCE)

    def remove(self, name: str) -> None:
        """Remove a stream and all its snapshots."""
        with self._disk:
            self._drop(name)
            shutil.rmtree(self.folder / name, ignore_errors=True)
            if (self.folder / name).exists():
                raise RequestError(503, f"the folder of the stream '{name}' cannot be removed", retry_after=PATIENCE)

    def close(self) -> None:
        """Write a last snapshot of each."""
        with self._disk:
            for name in self.loaded:
                self._drop(name)

    def _open(self, name: str) -> Stream:
        folder, method = self.folder / name, self.method.fork()
        method.reset()
        try:
            if not folder.exists():
                folder.mkdir()
                _link(self.folder.parent / REFERENCE_FILE, folder / REFERENCE_FILE)
            return Stream(method, guard=self.guard, snapshots=folder, on_event=lambda e: self._on_event(name, e))
        except OSError as error:
            reason = f"the stream '{name}' cannot be kept on disk ({error.strerror}); free or repair it"
            raise RequestError(503, reason, retry_after=PATIENCE) from error

    def store(self, name: str) -> None:
        """Write a snapshot of a stream and drop it from memory; it stays there if the snapshot cannot be written."""
        with self._disk:
            stream = self._forget(name)
            if stream is not None:
                self._put_away(name, stream)

    def _put_away(self, name: str, stream: Stream) -> None:
        if not stream.close(even_unsaved=False):
            with self._lock:
                self._loaded[name] = stream
                self._loaded.move_to_end(name, last=False)
            reason = f"the stream '{name}' cannot be written, so it stays in memory and no other can be loaded"
            raise RequestError(503, f"{reason}; free or repair the disk", retry_after=PATIENCE)

    def _drop(self, name: str) -> None:
        stream = self._forget(name)
        if stream is not None:
            stream.close()

    def _forget(self, name: str) -> Stream | None:
        with self._lock:
            del self._users[name]
            return self._loaded.pop(name, None)


def stream_names(folder: Path) -> list[str]:
    """The names of all streams that have a folder here."""
    with os.scandir(folder) as entries:  # which knows folders without asking for each
        return sorted(entry.name for entry in entries if STREAM_NAME.fullmatch(entry.name) and entry.is_dir())


def _link(reference: Path, link: Path) -> None:
    """Let streams share the reference file, which is only ever replaced as a whole."""
    if reference.exists():
        with suppress(OSError):
            os.link(reference, link)
            return
        shutil.copyfile(reference, link)
