"""Files that appear whole or not at all."""

from __future__ import annotations

import errno
import glob
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STALE_S = 3600.0


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary name beside `path`; when the block ends well, flush it to disk and rename it to `path`.

    Where a link leads is replaced, the link stays; a folder or a device is refused before anything is written.
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
        raise
    finally:
        temporary.unlink(missing_ok=True)


def temporary_name(path: Path) -> Path:
    """A hidden name in the folder of `path` that no other process uses."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")


def remove_stale(path: Path) -> None:
    """Remove what killed runs left beside `path`: temporary files that nobody has written to for an hour."""
    for file in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        try:
            if time.time() - file.stat().st_mtime > STALE_S:
                file.unlink()
        except OSError:  # another run was faster, or may not
            continue


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
