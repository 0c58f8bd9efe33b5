"""Streams by name over one frozen network: an LRU cache in memory, all others on disk.

Several processes may share the folder; each stream belongs to the process that has it in memory.
"""

from __future__ import annotations

import os
import shutil
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from trust_tta.live.guard import Event, Guard
from trust_tta.live.stream import REFERENCE_FILE, Stream
from trust_tta.methods.base import Method
from trust_tta.serve.settings import STREAM_NAME, RequestError

DISK_RETRY_SECONDS = 30


class StreamCache:
    """Opens, closes and removes streams. Only the engine's thread does this; `names` may be read by any."""

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
        self._loaded: OrderedDict[str, Stream] = OrderedDict()  # the most recently used comes last
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def names(self) -> list[str]:
        """The names of all streams, in memory and on disk."""
        return sorted({*stream_names(self.folder), *self.loaded})

    @property
    def loaded(self) -> list[str]:
        return list(self._loaded)

    def __contains__(self, name: str) -> bool:
        return name in self._loaded or (self.folder / name).is_dir()

    def open(self, name: str) -> Stream:
        """The stream, created or read from its folder where needed; the least recently used one is moved to disk."""
        if name in self._loaded:
            self._loaded.move_to_end(name)
            return self._loaded[name]
        if name not in self and (count := len(self.names)) >= self.max_streams:
            raise RequestError(429, f"there are {count} streams, and no more are accepted; use one of them")
        while len(self._loaded) >= self.max_loaded:
            self.store(next(iter(self._loaded)))
        folder, method = self.folder / name, self.method.fork()
        method.reset()
        try:
            if not folder.exists():
                folder.mkdir(parents=True)
                if (reference := self.folder.parent / REFERENCE_FILE).exists():
                    try:
                        os.link(reference, folder / REFERENCE_FILE)  # it is only ever replaced as a whole
                    except OSError:
                        shutil.copyfile(reference, folder / REFERENCE_FILE)
            stream = Stream(method, guard=self.guard, snapshots=folder, on_event=lambda e: self._on_event(name, e))
        except OSError as error:
            reason = f"the stream '{name}' cannot be kept on disk ({error.strerror}); free or repair it"
            raise RequestError(503, reason, retry_after=DISK_RETRY_SECONDS) from error
        self._loaded[name] = stream
        return stream

    def store(self, name: str) -> None:
        """Write a snapshot of a stream and drop it from memory; it stays there if the snapshot cannot be written."""
        if name not in self._loaded:
            return
        with suppress(OSError):
            (self.folder / name).mkdir(parents=True, exist_ok=True)  # someone may have removed it
        if not self._loaded[name].close(even_unsaved=False):
            reason = f"the stream '{name}' cannot be written, so it stays in memory and no other can be loaded"
            raise RequestError(503, f"{reason}; free or repair the disk", retry_after=DISK_RETRY_SECONDS)
        del self._loaded[name]

    def remove(self, name: str) -> None:
        """Remove a stream and all its snapshots."""
        if name in self._loaded:
            self._loaded.pop(name).close()
        shutil.rmtree(self.folder / name, ignore_errors=True)
        if (self.folder / name).exists():
            reason = f"the folder of the stream '{name}' cannot be removed"
            raise RequestError(503, reason, retry_after=DISK_RETRY_SECONDS)

    def close(self) -> None:
        """Write a last snapshot of each stream in memory, and close it."""
        for name in self.loaded:
            self._loaded.pop(name).close()


def stream_names(folder: Path) -> list[str]:
    """The names of all streams that have a folder here; none if it was removed."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries if STREAM_NAME.fullmatch(entry.name) and entry.is_dir())
    except OSError:
        return []
