"""Check the data sets in a folder by opening each: present, missing or broken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal, TypeAlias, cast

import numpy as np

from trust_tta.data.arrays import recorded_severities
from trust_tta.data.class_matching import are_numeric, fold_name, imagenet_r_labels, match_classes
from trust_tta.data.dataset import ArrayImages, Dataset, FileImages
from trust_tta.data.fetch import CIFAR10_PINS
from trust_tta.data.file_io import hash_array
from trust_tta.data.images import check_image, subfolders
from trust_tta.data.loading import available_domains, domain_folder, find_dataset, open_dataset
from trust_tta.data.parallel import map_in_order
from trust_tta.data.registry import DATASETS, DatasetSpec, find_spec
from trust_tta.data.segmentation import SegmentationDataset
from trust_tta.errors import DataError, TrustError, reason_of
from trust_tta.progress import SILENT, Progress

Status: TypeAlias = Literal["ok", "warning", "error"]
Note: TypeAlias = tuple[Status, str]

_UNNAMED = ("cifar10", "array-c", "folder-c", "masks", "folder")  # tried in turn for a folder of another name


@dataclass(frozen=True)
class Finding:
    """A finding about a file, a folder or a domain in it; `dataset` is empty where it belongs to none."""

    status: Status
    dataset: str
    path: Path
    message: str

    def __str__(self) -> str:
        return f"{self.status}: {self.path}: {self.message}"


def check_root(
    root: Path | str, *, thorough: bool = False, classes: Sequence[str] | None = None, progress: Progress = SILENT
) -> list[Finding]:
    """Check every data set under `root`, or `root` as a data set itself; broken data is reported, never raised.

    The header of every array and image is read; with `thorough`, every pixel. `classes` are those of a network, to
    which the classes of the data are compared.
    """
    root = Path(root)
    if not root.is_dir():
        return [Finding("error", "", root, "is not a folder; give the folder that holds your data sets")]
    present = find_present(root)
    findings = [
        finding
        for spec, _ in present
        for finding in check_dataset(spec.name, root, thorough=thorough, classes=classes, progress=progress)
    ]
    if not present:
        names = ", ".join(spec.folders[0] for spec in DATASETS if spec.folders)
        findings.append(Finding("error", "", root, f"holds no data set; known folders are {names}, in any spelling"))
    specs = {fold_name(name): spec for spec in DATASETS for name in spec.folders}
    if fold_name(root.resolve().name) in specs or any(folder == root for _, folder in present):
        return findings  # the folders inside are parts of the data set
    for child in subfolders(root):
        spec = specs.get(fold_name(child.name))
        if any(folder.is_relative_to(child) for _, folder in present):
            continue
        if spec is None:
            findings.append(Finding("warning", "", child, "is not a known data set; skipped"))
        else:
            missing = f"has none of its files; {spec.name} wants {spec.wanted}"
            findings.append(Finding("error", spec.name, child, missing))
    return findings


def check_dataset(
    name: str,
    root: Path | str,
    *,
    thorough: bool = False,
    classes: Sequence[str] | None = None,
    progress: Progress = SILENT,
) -> list[Finding]:
    """Open every domain of a data set that is on disk, at every severity, and check its counts, classes and images."""
    spec, root, findings = find_spec(name), Path(root), list[Finding]()
    folder = root if spec.layout == "python" else find_dataset(spec, root) or root
    opened: dict[str, Dataset] = {}
    for domain in available_domains(name, root, held_out=True):
        for severity in _severities(spec, folder, domain):
            part = domain if severity is None else f"{domain}/{severity}"
            try:
                opened[part] = open_dataset(name, root, domain=domain, severity=severity or 5)
            except (OSError, TrustError) as error:
                optional = any(known.name == domain and not known.target for known in spec.domains)
                findings.append(Finding("warning" if optional else "error", name, folder, f"{part}: {error}"))
    present = {part.partition("/")[0] for part in opened} | {f.message.partition(":")[0] for f in findings}
    for missing in (d.name for d in spec.domains if spec.folders and d.target and d.name not in present):
        findings.append(Finding("warning", name, folder, f"{missing} is missing"))
    for part, dataset in opened.items():
        broken = list(_check_images(dataset, part, thorough=thorough, progress=progress))
        notes = list(_check_content(spec, dataset, folder))
        findings += [Finding("error", name, path, message) for path, message in broken]
        findings += [Finding(status, name, folder, f"{part}: {message}") for status, message in notes]
        if not broken and all(status == "warning" for status, _ in notes):
            found = f"{len(dataset)} images in {len(dataset.class_names)} classes"
            findings.append(Finding("ok", name, folder, f"{part}: {found}"))
    if classes is not None and opened:
        dataset = next(iter(opened.values()))
        try:
            match = match_classes(dataset.class_names, classes, data=dataset.name)
        except TrustError as error:
            return [*findings, Finding("error", name, folder, str(error))]
        part = f"are {len(match.outputs)} of the network's {len(classes)}" if match.is_subset else "are the network's"
        matched = f"its {len(match.outputs)} classes {part}" + ("" if match.is_identity else ", matched by name")
        findings.append(Finding("ok", name, folder, matched))
    return findings


def find_present(root: Path) -> list[tuple[DatasetSpec, Path]]:
    """The data sets under `root`, found by folder name; if there are none, the one that `root` itself holds."""
    folders = {fold_name(folder.name) for folder in (root.resolve(), *subfolders(root))}
    named = [spec for spec in DATASETS if folders & spec.folder_names]
    found = [(spec, folder) for spec in named if (folder := find_dataset(spec, root)) is not None]
    own = ((spec, folder) for spec in map(find_spec, _UNNAMED) if (folder := find_dataset(spec, root)) is not None)
    return found or [*islice(own, 1)]


def _severities(spec: DatasetSpec, folder: Path, name: str) -> list[int | None]:
    """The severities of a domain that are folders; of an array, the last, since all have the same labels."""
    if spec.layout == "array-c":
        return [(recorded_severities(folder) or (None,))[-1]]
    if spec.layout != "folder-c":
        return [None]
    known = next((domain for domain in spec.domains if domain.name == name), None)
    place = folder / name if known is None else domain_folder(spec, folder, known)
    return [int(child.name) for child in subfolders(place or folder) if child.name in "12345"]


def _check_content(spec: DatasetSpec, dataset: Dataset, folder: Path) -> Iterator[Note]:
    """The number of images, the classes without images, and the pixels of CIFAR-10 by their sha256."""
    expected = next((domain.images for domain in spec.domains if domain.name == dataset.domain), 0)
    if expected and len(dataset) != expected and not recorded_severities(folder):
        yield (
            "warning" if spec.segmentation else "error",
            f"there are {len(dataset)} images; the whole domain has {expected}",
        )
    elif spec.name == "cifar10":
        for part, array in (("images", cast(ArrayImages, dataset.images).array), ("labels", dataset.labels)):
            if hash_array(array) != CIFAR10_PINS[f"{dataset.domain}_{part}"]:
                yield "error", f"the {part} are not CIFAR-10's (sha256 differs); download it again"
    if isinstance(dataset, SegmentationDataset) or are_numeric(dataset.class_names):
        return
    wanted = imagenet_r_labels() if spec.imagenet_r else np.arange(len(dataset.class_names))
    if len(empty := np.setdiff1d(wanted, dataset.labels)):
        names = ", ".join(dataset.class_names[label] for label in empty[:5])
        yield "warning", f"{len(empty)} of {len(wanted)} classes have no images, such as {names}"


def _check_images(dataset: Dataset, part: str, *, thorough: bool, progress: Progress) -> Iterator[tuple[Path, str]]:
    """The broken images of a domain, each with its path; in several threads."""
    in_files = isinstance(dataset.images, FileImages)
    indices: Sequence[int] = range(len(dataset))
    if not thorough and not in_files:  # no headers to read: a plugin's first and last image
        indices = [] if isinstance(dataset.images, ArrayImages) else [0, len(dataset) - 1]
    inspect = partial(_image_problem, dataset, thorough=thorough or not in_files)
    progress.start(len(indices), f"checking {dataset.name}/{part}")
    with ThreadPoolExecutor(4, thread_name_prefix="check") as executor:
        for problem in map_in_order(executor, inspect, indices):
            progress.advance()
            if problem is not None:
                yield problem
    progress.finish()


def _image_problem(dataset: Dataset, index: int, *, thorough: bool) -> tuple[Path, str] | None:
    """The path and the problem of an image or its mask; None if there is none."""
    images = dataset.images
    path = images.folder / images.names[index] if isinstance(images, FileImages) else Path(f"image {index}")
    try:
        size = check_image(path) if isinstance(images, FileImages) else None
        if isinstance(dataset, SegmentationDataset):
            path = dataset.masks.folder / dataset.masks.names[index]
            mask_size = check_image(path)
            if size is not None and size != mask_size:
                return path, f"has {mask_size[0]}x{mask_size[1]} labels for {size[0]}x{size[1]} pixels"
            if thorough:
                dataset.mask(index)
        if thorough and not dataset.image(index).any() and isinstance(images, ArrayImages):
            return path, f"of {dataset.domain} is entirely black"
    except DataError as error:
        return path, f"cannot be read: {reason_of(error.__cause__ or error)}"
    return None
