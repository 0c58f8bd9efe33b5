"""Downloads from a real server that drops connections, is busy, sends another file, or is not there."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import pytest

from tests.web import Reply, serving
from trust_tta.data.download import MAX_RETRIES, download
from trust_tta.errors import DownloadError
from trust_tta.progress import Progress

CONTENT = bytes(range(256)) * 5000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture(autouse=True)
def no_pauses_and_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pooch.core.time.sleep", lambda seconds: None)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def assert_refused(url: str, path: Path, words: str, *, sha256: str | None = None) -> None:
    with pytest.raises(DownloadError, match=words) as caught:
        download(url, path, sha256=sha256)
    assert "\n" not in str(caught.value)
    assert not path.exists()


def test_a_file_is_downloaded_once_and_its_hash_recorded(tmp_path: Path) -> None:
    path = tmp_path / "new" / "net.pth"
    with serving(CONTENT) as site:
        assert download(site.url, path) == path
        download(site.url, path)
        assert len(site.requests) == 1
    assert path.read_bytes() == CONTENT
    assert (path.parent / "net.pth.sha256").read_text() == f"{SHA256}  net.pth\n"
    assert names(path.parent) == ["net.pth", "net.pth.sha256"]


def test_a_pinned_file_needs_no_record(tmp_path: Path) -> None:
    with serving(CONTENT) as site:
        download(site.url, tmp_path / "net.pth", sha256=SHA256)
    assert names(tmp_path) == ["net.pth"]


@pytest.mark.parametrize("pinned", [True, False])
def test_a_file_that_changed_on_disk_is_refused(tmp_path: Path, pinned: bool) -> None:
    path = tmp_path / "net.pth"
    with serving(CONTENT) as site:
        download(site.url, path, sha256=SHA256 if pinned else None)
        path.write_bytes(CONTENT[:-1])
        with pytest.raises(DownloadError, match=f"must have {SHA256}; delete the file"):
            download(site.url, path, sha256=SHA256 if pinned else None)


def test_a_recorded_hash_holds_for_the_next_download(tmp_path: Path) -> None:
    path = tmp_path / "net.pth"
    with serving(CONTENT) as site:
        download(site.url, path)
        path.unlink()
        site.content = CONTENT[::-1]
        assert_refused(site.url, path, f"does not have the sha256 {SHA256}")


@pytest.mark.parametrize(
    "failure", [Reply(cut=300_000), Reply(status=429), Reply(status=503, body=b"<html>busy</html>")]
)
def test_failed_requests_are_retried(tmp_path: Path, failure: Reply) -> None:
    with serving(CONTENT, failure, failure, Reply()) as site:
        assert download(site.url, tmp_path / "net.pth").read_bytes() == CONTENT
        assert len(site.requests) == 3


def test_a_truncated_body_never_gets_the_final_name(tmp_path: Path) -> None:
    with serving(CONTENT, Reply(cut=1000)) as site:
        assert_refused(site.url, tmp_path / "net.pth", "cannot be downloaded: .*; check the address and the connection")
        assert len(site.requests) == 1 + MAX_RETRIES
    assert names(tmp_path) == []


def test_a_missing_file_is_not_retried(tmp_path: Path) -> None:
    with serving(CONTENT, Reply(status=404)) as site:
        assert_refused(site.url, tmp_path / "net.pth", "HTTP 404; check the address")
        assert len(site.requests) == 1
    assert names(tmp_path) == []


@pytest.mark.parametrize("page", [b"\n <!DOCTYPE html><html>please log in</html>", b"<HTML><body>please log in"])
def test_a_login_page_is_refused(tmp_path: Path, page: bytes) -> None:
    with serving(CONTENT, Reply(body=page)) as site:
        assert_refused(site.url, tmp_path / "net.pth", "gives a web page instead of the file; does it need a login")
    assert names(tmp_path) == []


def test_another_hash_is_refused_and_discarded(tmp_path: Path) -> None:
    with serving(CONTENT) as site:
        assert_refused(site.url, tmp_path / "net.pth", "sha256 0000.*discarded", sha256="0" * 64)
    assert names(tmp_path) == []


def test_an_unreachable_server_is_reported(tmp_path: Path) -> None:
    with serving(CONTENT) as site:
        url = site.url
    assert_refused(url, tmp_path / "net.pth", "cannot be downloaded: .*refused|cannot be downloaded: .*Max retries")
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert_refused("http://127.0.0.1:9/x", tmp_path / "file" / "net.pth", "file/net.pth' cannot be written")


def test_concurrent_downloads_leave_one_whole_file(tmp_path: Path) -> None:
    with serving(CONTENT) as site:
        threads = [threading.Thread(target=download, args=(site.url, tmp_path / "net.pth")) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (tmp_path / "net.pth").read_bytes() == CONTENT
    assert names(tmp_path) == ["net.pth", "net.pth.sha256"]


class Bar(Progress):
    """A progress that remembers its calls."""

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
        download(site.url, tmp_path / "net.pth", progress=bar)
    assert (bar.total, bar.done, bar.finished) == (len(CONTENT), len(CONTENT), True)
