"""Fetching a file: resumed, retried after a pause, checked, and complete or not there.

An incomplete file stays next to its target as `<name>.part`, from which the next call continues. A file without a
pinned hash is hashed when it is first seen; the hash is kept as `<name>.sha256` and checked from then on.
"""

from __future__ import annotations

import email.utils
import hashlib
import http.client
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from trust_tta.atomic import flush_folder, replacing
from trust_tta.errors import DownloadError
from trust_tta.progress import SILENT, Progress

TIMEOUT_S = 30.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
ATTEMPTS = 6  # in a row without a new byte

_CHUNK = 1 << 18
_TRY_LATER = (408, 425, 429, 500, 502, 503, 504)
_PASSING = (ConnectionResetError, ConnectionAbortedError, BrokenPipeError, TimeoutError, http.client.HTTPException)
_PAGE = re.compile(rb"\s*(<!doctype html|<html|<head|<\?xml[^>]*>\s*<!doctype html)", re.IGNORECASE)


def fetch(url: str, path: str | os.PathLike[str], *, sha256: str | None = None, progress: Progress = SILENT) -> Path:
    """The file at `url` as `path`, fetched if it does not exist yet; its hash is checked either way.

    A server that is busy (429, 5xx) or breaks off is tried again, after the pause it asks for; a web page in place of
    the file, a body of another length or with another hash is refused.
    """
    target = Path(path)
    part = target.with_name(f"{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.is_file():
            with _locked(part):
                if not target.is_file():  # another process may have fetched it meanwhile
                    _fetch_new(url, target, part, sha256, progress)
                    return target
    except OSError as error:
        raise DownloadError(f"'{target}' cannot be written ({error.strerror or error}); is there room?") from error
    check_hash(target, file_sha256(target), pinned=sha256)
    return target


def check_hash(path: Path, found: str, *, pinned: str | None = None) -> None:
    """Refuse a file whose hash `found` is not the pinned or recorded one; record it if there is none."""
    known = pinned or recorded_hash(path)
    if known is None:
        _record(path, found)
    elif found != known:
        raise DownloadError(
            f"'{path}' has the sha256 {found} and must have {known}; delete the file (and '{_record_of(path).name}' "
            "if it was replaced on purpose) and try again"
        )


def recorded_hash(path: Path) -> str | None:
    """The sha256 that was recorded when `path` was first seen."""
    try:
        text = _record_of(path).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return None
    return text[:64] if re.fullmatch(r"[0-9a-f]{64}\s.*", text, re.DOTALL) else None


def file_sha256(path: Path) -> str:
    """sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _record_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _record(path: Path, digest: str) -> None:
    try:
        with replacing(_record_of(path)) as temporary:
            temporary.write_text(f"{digest}  {path.name}\n", encoding="ascii", errors="backslashreplace")
    except OSError:  # a folder that cannot be written keeps no record
        return


def _fetch_new(url: str, target: Path, part: Path, sha256: str | None, progress: Progress) -> None:
    """Fill `part`, check it, and rename it; with a wrong hash, a part from an earlier run is fetched anew once."""
    transfer = Transfer(url, part, progress, sha256)
    resumed = transfer.size > 0
    transfer.run()
    wanted = sha256 or recorded_hash(target)
    found = file_sha256(part)
    if resumed and wanted not in (None, found):
        transfer.restart()
        transfer.run()
        found = file_sha256(part)
    if wanted not in (None, found):
        transfer.restart()
        raise DownloadError(f"{url} has the sha256 {found} and must have {wanted}; it was discarded, try again later")
    if sha256 is None:
        _record(target, found)
    transfer.tag_file.unlink(missing_ok=True)
    os.replace(part, target)
    flush_folder(target.parent)


@dataclass
class Transfer:
    """The bytes of one URL on their way into `part`."""

    url: str
    part: Path
    progress: Progress
    sha256: str | None

    @property
    def tag_file(self) -> Path:
        """Keeps the server's tag of this version of the file, so that two versions are never joined."""
        return self.part.with_name(f"{self.part.name}.etag")

    @property
    def size(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    @property
    def tag(self) -> str:
        return self.tag_file.read_text(encoding="ascii") if self.tag_file.exists() else ""

    def restart(self) -> None:
        """Begin from nothing."""
        os.truncate(self.part, 0)
        self.tag_file.unlink(missing_ok=True)

    def run(self) -> None:
        """Request until the file is complete; give up after ATTEMPTS in a row without a new byte."""
        failures = 0
        try:
            while True:
                before = self.size
                pause, reason, hopeless = FIRST_PAUSE_S * 2**failures, "the connection was closed early", False
                try:
                    if self._receive():
                        return
                except urllib.error.HTTPError as error:
                    error.close()
                    reason, pause = f"HTTP {error.code}, {_one_line(error)}", _wanted_pause(error.headers, pause)
                    hopeless = error.code not in _TRY_LATER
                except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
                    reason = _one_line(error)
                    hopeless = not isinstance(getattr(error, "reason", error), _PASSING)
                failures = 0 if self.size > before else failures + 1
                if failures >= ATTEMPTS or hopeless:
                    advice = (
                        "the address and the connection" if hopeless else "the connection and run it again to resume"
                    )
                    raise DownloadError(f"{self.url} cannot be downloaded: {reason}; check {advice}")
                time.sleep(min(pause, LONGEST_PAUSE_S) if failures else 0)
        finally:
            self.progress.finish()

    def _receive(self) -> bool:
        """One request, from the end of `part` on; whether the file is complete now."""
        if not self.tag and self.sha256 is None:
            self.restart()  # nothing would show whether the rest belongs to this part
        start = self.size
        headers = {"User-Agent": "trust-tta", "Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
            if self.tag:
                headers["If-Range"] = self.tag
        try:
            response = urllib.request.urlopen(urllib.request.Request(self.url, headers=headers), timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE or not start:
                raise
            error.close()
            if error.headers.get("Content-Range", "").endswith(f"/{start}"):
                return True  # nothing lies beyond the last byte
            self.restart()
            return False
        with response:
            total = self._begin(response, start)
            return self._read(response, total)

    def _begin(self, response: Any, start: int) -> int | None:
        """Check the headers; returns the length of the whole file, None if the server does not state it."""
        headers = response.headers
        if headers.get_content_type() == "text/html" and not self.url.lower().endswith((".html", ".htm")):
            raise self._page()
        if start and not headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            self.restart()  # the server sends all of it
            start = 0
        if not start and (tag := _version_of(headers)):
            self.tag_file.write_text(tag, encoding="ascii")
        length = headers.get("Content-Length", "")
        if not length.isdecimal():
            if getattr(response, "chunked", False) or self.sha256 is not None:
                return None
            raise DownloadError(f"{self.url} states no length, and no sha256 is known to check it by; give its sha256")
        total = start + int(length)
        self.progress.start(total, f"downloading {self.part.name.removesuffix('.part')}")
        self.progress.advance(start)
        return total

    def _read(self, response: IO[bytes], total: int | None) -> bool:
        done = self.size
        with self.part.open("ab") as file:
            while chunk := response.read(_CHUNK):
                if not done and _PAGE.match(chunk):
                    raise self._page()
                done += len(chunk)
                if total is not None and done > total:
                    raise DownloadError(f"{self.url} sends more than the {total} bytes it states; try again later")
                file.write(chunk)
                self.progress.advance(len(chunk))
            file.flush()
            os.fsync(file.fileno())
        return total is None or done == total

    def _page(self) -> DownloadError:
        return DownloadError(
            f"{self.url} gives a web page instead of the file; does it need a login? fetch it in a browser"
        )


@contextmanager
def _locked(part: Path) -> Iterator[None]:
    """One process at a time writes to `part`; the others wait."""
    while True:
        with part.open("ab") as file:
            _wait_for_lock(file)
            if not _is_at(file, part):
                continue  # the process that had the lock renamed or removed it
            try:
                yield
            finally:
                if part.exists() and part.stat().st_size == 0:
                    part.unlink(missing_ok=True)
                    part.with_name(f"{part.name}.etag").unlink(missing_ok=True)
            return


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:  # asked for in one step: between two, another process may remove it
        return False


def _wait_for_lock(file: IO[bytes]) -> None:
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)
    except (ImportError, OSError):  # systems and file systems without locks
        return


def _version_of(headers: Any) -> str:
    """What an If-Range header may name: a strong ETag, or the date of the last change."""
    tag = str(headers.get("ETag") or "")
    if not tag or tag.startswith("W/"):
        tag = str(headers.get("Last-Modified") or "")
    return tag if tag.isascii() and tag.isprintable() else ""


def _wanted_pause(headers: Any, otherwise: float) -> float:
    """The seconds of a Retry-After header, given as a number or a date."""
    stated = (headers.get("Retry-After") or "").strip() if headers else ""
    if re.fullmatch(r"\d{1,9}", stated):
        return float(stated)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(stated).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return otherwise


def _one_line(error: BaseException) -> str:
    return " ".join(str(getattr(error, "reason", "") or error).split()) or type(error).__name__
