"""What commands print and where they write: text without control characters, files that are tried before the work."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TextIO

from trust_tta.errors import TrustError


def say(text: str = "", *, stream: TextIO | None = None) -> None:
    """Print a line; all commands print through here, so that names and labels never control the terminal."""
    from trust_tta.report.text import printable

    print(printable(text), file=stream, flush=True)


def try_folder(flag: str, path: str | os.PathLike[str]) -> Path:
    """Refuse a folder that cannot be written or created, and remove what killed runs left in it."""
    folder = Path(path).expanduser()
    _try(f"{flag} {path}", folder)
    return folder


def try_file(flag: str, path: str | os.PathLike[str]) -> Path:
    """Refuse a file that cannot be written: its folder is tried, and no folder or device is replaced."""
    file = Path(path).expanduser()
    if file.exists() and not file.is_file():
        raise TrustError(f"{flag} {path}: this is a folder or a device; give the name of a file")
    if file.exists() and not os.access(file, os.W_OK):
        raise TrustError(f"{flag} {path}: the file cannot be written; give another, or change its permissions")
    _try(f"{flag} {path}", file.absolute().parent)
    return file


def _try(what: str, folder: Path) -> None:
    from trust_tta.atomic import remove_stale

    nearest = next(parent for parent in (folder, *folder.absolute().parents) if os.path.lexists(parent))
    if not nearest.is_dir():
        raise TrustError(f"{what}: '{nearest}' is not a folder; give another")
    try:
        with tempfile.TemporaryFile(dir=nearest, prefix=".", suffix=".tmp"):
            pass
    except OSError as error:
        raise TrustError(f"{what}: '{nearest}' cannot be written ({error.strerror}); give another") from error
    if nearest == folder:
        remove_stale(folder)
