"""A download that resumes where it was cut off and is refused when its hash is wrong."""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from trust_tta.data.files import make_folder
from trust_tta.errors import DataError

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with what is going on, the amount done and the whole amount (0 where unknown)."""

_CHUNK = 1 << 20
_TIMEOUT_S = 30.0
_ATTEMPTS = 5


@dataclass(frozen=True)
class Archive:
    """A file to download: its address and the hash that it must have."""

    url: str
    algorithm: str
    digest: str

    @property
    def name(self) -> str:
        return self.url.split("?")[0].rsplit("/", 1)[-1]


def download(archive: Archive, folder: Path, *, progress: Progress | None = None) -> Path:
    """Fetch `archive` into `folder`; an interrupted transfer stays as `.part` and the next call goes on with it."""
    target = folder / archive.name
    part = folder / f"{archive.name}.part"
    make_folder(folder)
    resumed = part.exists()
    _transfer(archive.url, part, progress=progress)
    if resumed and not _matches(part, archive):
        # the old part may be of another file: one try from nothing before giving up
        part.unlink()
        _transfer(archive.url, part, progress=progress)
    if not _matches(part, archive):
        part.unlink()
        raise DataError(
            f"{archive.url} does not have the {archive.algorithm} {archive.digest}; it was discarded, try again later"
        )
    os.replace(part, target)
    return target


def _transfer(url: str, part: Path, *, progress: Progress | None) -> None:
    """Fill `part` up to the length that the server states, resuming after broken connections."""
    reason: Exception | str = "the connection was closed early"
    for _ in range(_ATTEMPTS):
        before = _size(part)
        try:
            if _receive(url, part, progress=progress):
                return
        except urllib.error.HTTPError as error:
            raise DataError(f"{url} cannot be downloaded: {error}") from error
        except (OSError, http.client.HTTPException) as error:
            reason = error
        if _size(part) <= before:
            break
    raise DataError(f"{url} cannot be downloaded: {reason}; check the connection and run it again to resume")


def _receive(url: str, part: Path, *, progress: Progress | None) -> bool:
    """One request, from the end of `part` on; whether the file is now complete."""
    start = _size(part)
    headers = {"User-Agent": "trust-tta", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT_S)
    except urllib.error.HTTPError as error:
        error.close()
        if start and error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return True  # nothing lies beyond our last byte; the hash decides whether it is the right file
        raise
    with response:
        if response.status != http.HTTPStatus.PARTIAL_CONTENT:
            start = 0
        length = response.headers.get("Content-Length")
        total = start + int(length) if length else 0
        done = start
        with part.open("ab" if start else "wb") as file:
            while chunk := response.read(_CHUNK):
                file.write(chunk)
                done += len(chunk)
                if progress is not None:
                    progress(f"downloading {url}", done, total)
            file.flush()
            os.fsync(file.fileno())
    return total in (0, done)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _matches(path: Path, archive: Archive) -> bool:
    with path.open("rb") as file:
        return hashlib.file_digest(file, archive.algorithm).hexdigest() == archive.digest
