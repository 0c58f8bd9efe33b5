"""Streams by name over one frozen network: an LRU cache in memory, all others on disk.

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

DISK_RETRY_SECONDS = 30


class StreamCache:
    """Opens, closes, forks and removes streams, from any thread. A stream in use stays in memory.

    A thread may use one stream at a time, and at most `max_loaded` threads may use streams at the same time.
    """

    def __init__(
        self,
        method: Method,
        folder: Path,
        *,
        guard: Guard,
        max_loaded: int,
        max_streams: int,
        on_event: Callable[[str, Event], None],
    ) -> None:
        self.method, self.guard, self.folder = method, guard, folder
        self.max_loaded, self.max_streams = max_loaded, max_streams
        self._on_event = on_event
        self._loaded: OrderedDict[str, Stream] = OrderedDict()
        self._users: Counter[str] = Counter()
        self._lock = threading.Lock()  # guards these two; held briefly
        self._disk_lock = threading.RLock()  # held while streams are read or written
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def names(self) -> list[str]:
        """The names of all streams, in memory and on disk."""
        return sorted({*stream_names(self.folder), *self.loaded})

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
        if name not in self and (count := len(self.names)) >= self.max_streams:
            raise RequestError(429, f"there are {count} streams, and no more are accepted; use one of them")

    @contextmanager
    def using(self, name: str) -> Iterator[Stream]:
        """The stream, created or read from its folder where needed; another one may be moved to disk for it."""
        stream = self._acquire(name) or self._load(name)
        try:
            yield stream
        finally:
            with self._lock:
                self._users[name] -= 1

    def _acquire(self, name: str) -> Stream | None:
        with self._lock:
            if name not in self._loaded:
                return None
            self._users[name] += 1
            self._loaded.move_to_end(name)
            return self._loaded[name]

    def _load(self, name: str) -> Stream:
        with self._disk_lock:
            if (stream := self._acquire(name)) is not None:  # another thread was faster
                return stream
            self.check_room(name)
            self._evict()
            stream = self._open(name)
            with self._lock:
                self._loaded[name], self._users[name] = stream, 1
            return stream

    def _evict(self) -> None:
        """Move the least recently used streams that are not in use to disk until there is room for one."""
        while True:
            with self._lock:
                if len(self._loaded) < self.max_loaded:
                    return
                name = next(name for name in self._loaded if not self._users[name])
                del self._users[name]
                stream = self._loaded.pop(name)  # first: a thread that asks for it now waits for the disk
            self._write(name, stream)

    def fork(self, name: str, new: str) -> None:
        """Create a new stream that continues from this one."""
        with self._disk_lock:
            if new in self:
                raise RequestError(409, f"a stream '{new}' already exists; choose another name, or remove it first")
            self.check_room(new)
            with self.using(name) as stream:
                try:
                    # Closed, to be opened again with its own name in its events.
                    written = stream.fork(snapshots=self.folder / new).close()
                except (StateError, OSError):
                    written = False
            if not written:
                shutil.rmtree(self.folder / new, ignore_errors=True)
                reason = f"the stream '{new}' cannot be written; free or repair the disk"
                raise RequestError(503, reason, retry_after=DISK_RETRY_SECONDS)

    def remove(self, name: str) -> None:
        """Remove a stream and all its snapshots."""
        with self._disk_lock:
            self._drop(name)
            shutil.rmtree(self.folder / name, ignore_errors=True)
            if (self.folder / name).exists():
                reason = f"the folder of the stream '{name}' cannot be removed"
                raise RequestError(503, reason, retry_after=DISK_RETRY_SECONDS)

    def close(self) -> None:
        """Write a last snapshot of each stream in memory, and close it."""
        with self._disk_lock:
            for name in self.loaded:
                self._drop(name)

    def _open(self, name: str) -> Stream:
        folder, method = self.folder / name, self.method.fork()
        method.reset()
        try:
            if not folder.exists():
                folder.mkdir(parents=True)
                _link(self.folder.parent / REFERENCE_FILE, folder / REFERENCE_FILE)
            return Stream(method, guard=self.guard, snapshots=folder, on_event=lambda e: self._on_event(name, e))
        except OSError as error:
            reason = f"the stream '{name}' cannot be kept on disk ({error.strerror}); free or repair it"
            raise RequestError(503, reason, retry_after=DISK_RETRY_SECONDS) from error

    def store(self, name: str) -> None:
        """Write a snapshot of a stream and drop it from memory; it stays there if the snapshot cannot be written."""
        with self._disk_lock:
            stream = self._pop(name)
            if stream is not None:
                self._write(name, stream)

    def _write(self, name: str, stream: Stream) -> None:
        with suppress(OSError):
            (self.folder / name).mkdir(parents=True, exist_ok=True)  # someone may have removed it
        if not stream.close(even_unsaved=False):
            with self._lock:
                self._loaded[name] = stream
                self._loaded.move_to_end(name, last=False)
            reason = f"the stream '{name}' cannot be written, so it stays in memory and no other can be loaded"
            raise RequestError(503, f"{reason}; free or repair the disk", retry_after=DISK_RETRY_SECONDS)

    def _drop(self, name: str) -> None:
        stream = self._pop(name)
        if stream is not None:
            stream.close()

    def _pop(self, name: str) -> Stream | None:
        with self._lock:
            del self._users[name]
            return self._loaded.pop(name, None)


def stream_names(folder: Path) -> list[str]:
    """The names of all streams that have a folder here; none if it was removed."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries if STREAM_NAME.fullmatch(entry.name) and entry.is_dir())
    except OSError:
        return []


def _link(reference: Path, link: Path) -> None:
    """Share the reference file, which is only ever replaced as a whole."""
    if reference.exists():
        with suppress(OSError):
            os.link(reference, link)
            return
        shutil.copyfile(reference, link)
