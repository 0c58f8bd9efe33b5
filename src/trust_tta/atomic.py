"""Files that appear whole or not at all."""

from __future__ import annotations

import errno
import glob
import os
import platform
import re
import time
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

STALE_S = 3600.0

_OWNER = re.compile(r"\.(?:(?P<machine>[0-9a-f]{8})-(?P<process>[0-9]+)-[0-9a-f]{16}|[0-9a-f]{32})\.tmp$")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name next to `path`; when the block ends well, the file is flushed to disk and renamed to `path`.

    A link stays, and its target is replaced; a folder or a device is refused before anything is written.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise FileExistsError(errno.EEXIST, "is a folder or a device; give the name of a file", str(path))
    remove_stale(target)
    temporary = temporary_name(target)
    try:
        yield temporary
        flush_file(temporary)
        os.replace(temporary, target)
        flush_folder(target.parent)
    except OSError as error:
        if error.filename in (None, str(temporary)):
            error.filename = str(path)  # the name that the caller knows
        if isinstance(error.strerror, str):
            error.strerror = error.strerror.replace(str(temporary), str(path))
        raise
    finally:
        with suppress(OSError):  # a read-only disk refuses this too; the first error matters more
            temporary.unlink(missing_ok=True)


def write_whole(path: Path, content: str | bytes | memoryview) -> None:
    """Write a file, text as UTF-8, whole or not at all; folders above it are made where they are missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def temporary_name(path: Path) -> Path:
    """A hidden name in the folder of `path` that no other process uses; it identifies its process."""
    return path.with_name(f".{path.name}.{_machine():08x}-{os.getpid()}-{uuid.uuid4().hex[:16]}.tmp")


def remove_stale(path: Path) -> None:
    """Remove what killed runs left next to `path`, or anywhere in it if it is a folder."""
    folder, pattern = (path, ".*.tmp") if path.is_dir() else (path.parent, f".{glob.escape(path.name)}.*.tmp")
    for file in folder.glob(pattern):
        with suppress(OSError):  # another run was faster, or this one lacks permission
            if _is_stale(file):
                file.unlink()


def _is_stale(file: Path) -> bool:
    """Whether the process that wrote a temporary file is gone; if unknown, whether the file is an hour old."""
    owner = _OWNER.search(file.name)
    if owner is None:
        return False
    if owner["machine"] is not None and int(owner["machine"], 16) == _machine() and os.name == "posix":
        try:
            os.kill(int(owner["process"]), 0)
        except ProcessLookupError:
            return True
        except OSError:  # it runs, as another user
            return False
    return time.time() - file.stat().st_mtime > STALE_S


def _machine() -> int:
    return zlib.crc32(platform.node().encode())


def flush_file(path: Path) -> None:
    """Wait until the bytes of `path` are on disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Wait until the names in `folder` are on disk, where the system can do that."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
