"""Triton's cache of compiled kernels, with a temporary folder where its own is read-only or full."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import ClassVar

from triton import knobs
from triton.runtime.cache import FileCacheManager

from trust_tta.errors import TrustWarning


def use_fallback() -> None:
    """Let Triton compile without a cache folder that it can write; keeps a cache manager of the user's."""
    if knobs.cache.manager_class is None:
        knobs.cache.manager_class = FallbackCache


class FallbackCache(FileCacheManager):  # type: ignore[misc]
    """Triton's cache, whose files go to a folder of this process where its own cannot be written."""

    fallback: ClassVar[str] = ""  # that folder, if not a new one

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        try:
            super().__init__(key, override=override, dump=dump)
        except OSError as error:
            self._move(key, error)
        self.key = key

    def put(self, data: bytes | str, filename: str, binary: bool = True) -> str:
        try:
            path: str = super().put(data, filename, binary)
        except OSError as error:
            self._move(self.key, error)
            path = super().put(data, filename, binary)
        return path

    def _move(self, key: str, error: OSError) -> None:
        """Use the folder of this process from now on."""
        _warn_once(knobs.cache.dir, error.strerror or str(error))
        folder = Path(self.fallback or temporary_folder(), key)
        folder.mkdir(exist_ok=True)
        self.cache_dir, self.lock_path = str(folder), os.path.join(folder, "lock")


@functools.cache
def temporary_folder() -> str:
    """A folder that is removed at the end of this process."""
    folder = tempfile.mkdtemp(prefix="trust-tta-triton-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def _warn_once(folder: str, reason: str) -> None:
    warnings.warn(
        f"Triton's cache '{folder}' cannot be written ({reason}): its kernels are compiled anew in every process; "
        "set TRITON_CACHE_DIR to a folder that can be written",
        TrustWarning,
        stacklevel=2,
    )
