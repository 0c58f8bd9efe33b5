"""Streams by name over one frozen network: those in use are in memory, the others on disk.

Several processes may share the folder; each stream belongs to the process that has it in memory.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from trust_tta.errors import StateError
from trust_tta.live.guard import Event, Guard
from trust_tta.live.stream import REFERENCE_FILE, Stream
from trust_tta.methods.base import Method
from trust_tta.serve.settings import STREAM_NAME, RequestError

PATIENCE = 30  # seconds after which to try again what the disk did not take


class Pool:
    """Opens, closes, forks and removes streams, in the engine's thread alone; any thread may ask for names."""

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
        self._lock = threading.Lock()  # of `_loaded`
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

    def get(self, name: str) -> Stream:
        """The stream, created or read from its folder where it is not in memory; another may have to go to disk."""
        if name in self._loaded:
            self._loaded.move_to_end(name)
            return self._loaded[name]
        self.check_room(name)
        while len(self._loaded) >= self.most_loaded:
            self.store(next(iter(self._loaded)))
        stream = self._open(name)
        with self._lock:
            self._loaded[name] = stream
        return stream

    def fork(self, name: str, new: str) -> Stream:
        """A new stream that continues from this one."""
        if new in self:
            raise RequestError(409, f"a stream '{new}' already exists; choose another name, or remove it first")
        self.check_room(new)
        stream = self.get(name)
        try:
            # Closed and opened again, so that its events carry its own name.
            written = stream.fork(snapshots=self.folder / new).close()
        except (StateError, OSError):
            written = False
        if not written:
            shutil.rmtree(self.folder / new, ignore_errors=True)
            raise RequestError(
                503, f"the stream '{new}' cannot be written; free or repair the disk", retry_after=PATIENCE
            )
        return self.get(new)

    def remove(self, name: str) -> None:
        """Remove a stream and all its snapshots."""
        self._drop(name)
        shutil.rmtree(self.folder / name, ignore_errors=True)
        if (self.folder / name).exists():
            raise RequestError(503, f"the folder of the stream '{name}' cannot be removed", retry_after=PATIENCE)

    def close(self) -> None:
        """Write a last snapshot of each."""
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
        stream = self._loaded.get(name)
        if stream is not None and not stream.close(even_unsaved=False):
            reason = f"the stream '{name}' cannot be written, so it stays in memory and no other can be loaded"
            raise RequestError(503, f"{reason}; free or repair the disk", retry_after=PATIENCE)
        self._drop(name)

    def _drop(self, name: str) -> None:
        with self._lock:
            stream = self._loaded.pop(name, None)
        if stream is not None:
            stream.close()


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
