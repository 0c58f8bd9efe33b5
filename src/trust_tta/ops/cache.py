"""The user's cache folder, and bytes kept there under a key."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from trust_tta.atomic import write_whole


def cache_folder() -> Path:
    """Folder of downloaded checkpoints and compiled kernels: $TRUST_TTA_CACHE, or the user's cache folder."""
    root = os.environ.get("TRUST_TTA_CACHE") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "trust-tta")
    return Path(root).expanduser()


def read_cached(name: str) -> bytes | None:
    """The bytes kept under `name`; None where there are none, or not those that were written."""
    with suppress(OSError, RuntimeError):  # RuntimeError: no home folder
        content = (cache_folder() / name).read_bytes()
        digest, data = content[:32], content[32:]
        return data if hashlib.sha256(data).digest() == digest else None
    return None


def write_cached(name: str, data: bytes) -> bool:
    """Keep bytes under `name`; False where nothing can be written."""
    try:
        write_whole(cache_folder() / name, hashlib.sha256(data).digest() + data)
    except (OSError, RuntimeError):
        return False
    return True
