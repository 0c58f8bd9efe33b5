"""Downloads through pooch: retried, checked against a sha256, and complete or absent.

Where no sha256 is known in advance, the hash of the first download is kept as `<name>.sha256` and checked from then on.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from trust_tta.atomic import replacing
from trust_tta.errors import DownloadError, reason_of
from trust_tta.progress import SILENT, Progress

MAX_RETRIES = 3
TIMEOUT_S = 30.0

_RETRIED_STATUS = (408, 425, 429, 500, 502, 503, 504)
_HTML = re.compile(rb"\s*(<!doctype html|<html|<head|<\?xml[^>]*>\s*<!doctype html)", re.IGNORECASE)


def download(url: str, path: str | os.PathLike[str], *, sha256: str | None = None, progress: Progress = SILENT) -> Path:
    """Download `url` to `path` unless the file exists, and check its sha256 either way."""
    target = Path(path)
    if not target.is_file():
        import pooch
        from requests.exceptions import RequestException

        known_hash = sha256 or recorded_hash(target)
        pooch.get_logger().setLevel("WARNING")
        files = pooch.create(
            path=target.parent,
            base_url="",
            registry={target.name: known_hash},
            urls={target.name: url},
            retry_if_failed=MAX_RETRIES,
        )
        try:
            files.fetch(target.name, downloader=lambda url, output, _: _get(url, output, target.name, progress))
            target.chmod(0o644)  # pooch's temporary files are private to the user
        except RequestException as error:
            raise DownloadError(
                f"{url} cannot be downloaded: {reason_of(error)}; check the address and the connection"
            ) from error
        except ValueError as error:
            raise DownloadError(
                f"{url} does not have the sha256 {known_hash}; it was discarded, try again later"
            ) from error
        except OSError as error:
            raise DownloadError(f"'{target}' cannot be written ({error.strerror or error}); is there room?") from error
        finally:
            progress.finish()
    check_hash(target, file_sha256(target), pinned=sha256)
    return target


def check_hash(path: Path, found: str, *, pinned: str | None = None) -> None:
    """Refuse a file whose sha256 `found` is not the pinned or recorded one; record it if there is neither."""
    known = pinned or recorded_hash(path)
    record = _record_path(path)
    if known is None:
        try:
            with replacing(record) as temporary:
                temporary.write_text(f"{found}  {path.name}\n", encoding="ascii", errors="backslashreplace")
        except OSError:  # a read-only folder keeps no record
            return
    elif found != known:
        raise DownloadError(
            f"'{path}' has the sha256 {found} and must have {known}; delete the file (and '{record.name}' "
            "if it was replaced on purpose) and try again"
        )


def recorded_hash(path: Path) -> str | None:
    """The sha256 that was recorded when `path` was first downloaded."""
    try:
        text = _record_path(path).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return None
    return text[:64] if re.fullmatch(r"[0-9a-f]{64}\s.*", text, re.DOTALL) else None


def file_sha256(path: Path) -> str:
    """The sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _record_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _get(url: str, output: str, name: str, progress: Progress) -> None:
    """Write the content of `url` to the file `output`; pooch retries after the errors of requests."""
    import requests

    headers = {"User-Agent": "trust-tta", "Accept-Encoding": "identity"}
    with requests.get(url, headers=headers, timeout=TIMEOUT_S, stream=True) as answer, open(output, "wb") as file:
        if answer.status_code >= 400 and answer.status_code not in _RETRIED_STATUS:
            raise DownloadError(f"{url} cannot be downloaded: HTTP {answer.status_code}; check the address")
        answer.raise_for_status()
        progress.start(int(answer.headers.get("content-length", 0)) or None, f"downloading {name}")
        for number, chunk in enumerate(answer.iter_content(1 << 16)):
            if number == 0 and _HTML.match(chunk):
                raise DownloadError(
                    f"{url} gives a web page instead of the file; does it need a login? download it in a browser"
                )
            file.write(chunk)
            progress.advance(len(chunk))
