"""Downloads from a real server that cuts, refuses, lies and comes back."""

from __future__ import annotations

import hashlib
import threading
import time
from email.utils import formatdate
from pathlib import Path

import pytest

from tests.web import Reply, serving
from trust_tta.data import download
from trust_tta.data.download import fetch
from trust_tta.errors import DownloadError

CONTENT = bytes(range(256)) * 5000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
RECORD = f"{SHA256}  net.pth\n"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "FIRST_PAUSE_S", 0.001)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def refused(url: str, path: Path, words: str, **options: str) -> None:
    with pytest.raises(DownloadError, match=words) as caught:
        fetch(url, path, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert not path.exists()


def test_a_file_is_fetched_once_and_its_hash_kept(tmp_path: Path) -> None:
    path = tmp_path / "new" / "net.pth"
    with serving(CONTENT) as site:
        assert fetch(site.url, path) == path
        fetch(site.url, path)
        assert len(site.requests) == 1
    assert path.read_bytes() == CONTENT
    assert (path.parent / "net.pth.sha256").read_text() == RECORD
    assert names(path.parent) == ["net.pth", "net.pth.sha256"]


def test_a_pinned_file_needs_no_record(tmp_path: Path) -> None:
    with serving(CONTENT) as site:
        fetch(site.url, tmp_path / "net.pth", sha256=SHA256)
    assert names(tmp_path) == ["net.pth"]


@pytest.mark.parametrize("pinned", [True, False])
def test_a_file_that_changed_on_disk_is_refused(tmp_path: Path, pinned: bool) -> None:
    path = tmp_path / "net.pth"
    with serving(CONTENT) as site:
        fetch(site.url, path, sha256=SHA256 if pinned else None)
        path.write_bytes(CONTENT[:-1])
        with pytest.raises(DownloadError, match=f"must have {SHA256}; delete the file"):
            fetch(site.url, path, sha256=SHA256 if pinned else None)


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("etag", ['"one"', 'W/"weak"', None])
def test_a_connection_that_breaks_is_taken_up_again(tmp_path: Path, ranges: bool, etag: str | None) -> None:
    replies = [Reply(cut=cut, ranges=ranges) for cut in (300_000, 500_000)]
    with serving(CONTENT, *replies, Reply(ranges=ranges), etag=etag) as site:
        assert fetch(site.url, tmp_path / "net.pth").read_bytes() == CONTENT
        asked = [request.get("Range") for request in site.requests]
    if ranges and etag == '"one"':
        assert asked == [None, "bytes=300000-", "bytes=800000-"]
    assert names(tmp_path) == ["net.pth", "net.pth.sha256"]


def test_a_later_run_goes_on_where_the_last_one_stopped(tmp_path: Path) -> None:
    with serving(CONTENT, Reply(cut=700_000), Reply(status=404)) as site:
        refused(site.url, tmp_path / "net.pth", "HTTP 404")
        assert (tmp_path / "net.pth.part").stat().st_size == 700_000
        site.replies = [Reply()]
        assert fetch(site.url, tmp_path / "net.pth").read_bytes() == CONTENT
        assert site.requests[-1]["Range"] == "bytes=700000-"
    assert names(tmp_path) == ["net.pth", "net.pth.sha256"]


def test_two_versions_of_a_file_are_never_joined(tmp_path: Path) -> None:
    with serving(CONTENT, Reply(cut=700_000), Reply(status=404)) as site:
        refused(site.url, tmp_path / "net.pth", "HTTP 404")
        site.replies, site.content, site.etag = [Reply()], CONTENT[::-1], '"two"'
        assert fetch(site.url, tmp_path / "net.pth").read_bytes() == CONTENT[::-1]


@pytest.mark.parametrize("etag", ['"one"', None])
def test_a_part_of_another_file_is_thrown_away(tmp_path: Path, etag: str | None) -> None:
    (tmp_path / "net.pth.part").write_bytes(b"x" * 1000)
    with serving(CONTENT, etag=etag) as site:
        fetch(site.url, tmp_path / "net.pth", sha256=SHA256)
    assert (tmp_path / "net.pth").read_bytes() == CONTENT


def test_a_part_that_is_too_long_is_thrown_away(tmp_path: Path) -> None:
    (tmp_path / "net.pth.part").write_bytes(CONTENT + b"x")
    with serving(CONTENT) as site:
        fetch(site.url, tmp_path / "net.pth", sha256=SHA256)
    assert (tmp_path / "net.pth").read_bytes() == CONTENT


def test_a_complete_part_is_taken(tmp_path: Path) -> None:
    (tmp_path / "net.pth.part").write_bytes(CONTENT)
    with serving(CONTENT) as site:
        fetch(site.url, tmp_path / "net.pth", sha256=SHA256)
        assert len(site.requests) == 1
    assert names(tmp_path) == ["net.pth"]


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_a_busy_server_is_asked_again(tmp_path: Path, status: int) -> None:
    busy = Reply(status=status, headers={"Retry-After": "0"}, body=b"<html>busy</html>")
    with serving(CONTENT, busy, busy, Reply()) as site:
        assert fetch(site.url, tmp_path / "net.pth").read_bytes() == CONTENT
        assert len(site.requests) == 3


def test_the_pause_that_a_server_asks_for_is_kept_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    stated = ["7", formatdate(time.time() + 30, usegmt=True), "999999999", "nonsense", formatdate(0, usegmt=True)]
    replies = [Reply(status=429, headers={"Retry-After": text}) for text in stated]
    with serving(CONTENT, *replies, Reply()) as site:
        fetch(site.url, tmp_path / "net.pth")
    assert pauses[0] == 7
    assert 25 < pauses[1] <= 30
    assert pauses[2] == download.LONGEST_PAUSE_S
    assert pauses[3:] == [0.001 * 2**3, 0]


def test_a_server_that_stays_busy_is_given_up(tmp_path: Path) -> None:
    with serving(CONTENT, Reply(status=429, headers={"Retry-After": "0"})) as site:
        refused(site.url, tmp_path / "net.pth", "HTTP 429, Too Many Requests; check the connection and run it again")
        assert len(site.requests) == download.ATTEMPTS
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "page",
    [
        Reply(headers={"Content-Type": "text/html; charset=utf-8"}, body=b"please log in"),
        Reply(body=b"\n <!DOCTYPE html><html>please log in</html>"),
        Reply(body=b"<HTML><body>please log in"),
    ],
)
def test_a_login_page_is_no_file(tmp_path: Path, page: Reply) -> None:
    with serving(CONTENT, page) as site:
        refused(site.url, tmp_path / "net.pth", "gives a web page instead of the file; does it need a login")
    assert names(tmp_path) == []


def test_a_short_body_never_gets_its_final_name(tmp_path: Path) -> None:
    with serving(CONTENT, Reply(cut=1000, ranges=False), etag=None) as site:
        refused(site.url, tmp_path / "net.pth", "the connection was closed early; .* run it again to resume")
    assert "net.pth" not in names(tmp_path)


def test_a_body_of_unknown_length_needs_a_hash(tmp_path: Path) -> None:
    with serving(CONTENT, Reply(silent=True, cut=1000), Reply(silent=True)) as site:
        refused(site.url, tmp_path / "net.pth", "states no length, and no sha256 is known")
        fetch(site.url, tmp_path / "net.pth", sha256=SHA256)


def test_another_hash_is_refused_and_thrown_away(tmp_path: Path) -> None:
    with serving(CONTENT) as site:
        refused(site.url, tmp_path / "net.pth", "must have 0000.*discarded", sha256="0" * 64)
    assert names(tmp_path) == []


def test_nobody_there(tmp_path: Path) -> None:
    with serving(CONTENT) as site:
        url = site.url
    refused(url, tmp_path / "net.pth", "cannot be downloaded: .*refused")
    refused((tmp_path / "absent").as_uri(), tmp_path / "net.pth", "cannot be downloaded")
    assert names(tmp_path) == []


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused("http://127.0.0.1:9/x", tmp_path / "file" / "net.pth", "file/net.pth' cannot be written")


def test_several_at_once_fetch_one_file(tmp_path: Path) -> None:
    with serving(CONTENT) as site:
        threads = [threading.Thread(target=fetch, args=(site.url, tmp_path / "net.pth")) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(site.requests) == 1
    assert names(tmp_path) == ["net.pth", "net.pth.sha256"]


class Bar:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.total: int | None = 0
        self.done = 0
        self.finished = False

    def start(self, total: int | None, what: str) -> None:
        self.total, self.done = total, 0
        assert what == "downloading net.pth"

    def advance(self, n: int = 1) -> None:
        self.done += n

    def note(self, text: str) -> None:
        raise AssertionError(text)

    def finish(self) -> None:
        self.finished = True


def test_progress_counts_bytes(tmp_path: Path) -> None:
    bar = Bar()
    with serving(CONTENT, Reply(cut=300_000), Reply()) as site:
        fetch(site.url, tmp_path / "net.pth", progress=bar)
    assert (bar.total, bar.done, bar.finished) == (len(CONTENT), len(CONTENT), True)
