"""Check the data sets in a folder: which are there, what is missing, what is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from trust_tta.data.arrays import LABELS, find_blocks, open_cifar, open_images, open_labels, recorded_severities
from trust_tta.data.class_matching import are_numeric, fold_name, imagenet_r_labels, match_classes, spelling_variants
from trust_tta.data.dataset import ArrayImages, FileImages
from trust_tta.data.fetch import CIFAR10_PINS
from trust_tta.data.file_io import hash_array
from trust_tta.data.images import check_image, is_image, list_images, read_image
from trust_tta.data.loading import (
    available_domains,
    class_label,
    domain_folder,
    find_dataset,
    generic_domains,
    open_dataset,
    subfolders,
)
from trust_tta.data.registry import DATASETS, DatasetSpec, DomainSpec, find_spec
from trust_tta.data.segmentation import SegmentationDataset, class_names_and_colors, list_splits, open_segmentation
from trust_tta.errors import DataError, TrustError, reason_of
from trust_tta.progress import SILENT, Progress

Status: TypeAlias = Literal["ok", "warning", "error"]
Note: TypeAlias = tuple[Status, Path, str]
Item = TypeVar("Item")

# what a folder with an unknown name may hold, in the order in which they are tried
_UNNAMED = (
    "cifar10",
    "pacs",
    "imagenet-c",
    "imagenet",
    "imagenet-v2",
    "array-c",
    "folder-c",
    "camvid",
    "masks",
    "folder",
)
_CIFAR_SHAPE = (32, 32, 3)
_THREADS = 4
_CHUNK = 256


@dataclass(frozen=True)
class Finding:
    """One statement about a file or folder; `dataset` is empty where it belongs to none."""

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
    findings: list[Finding] = []
    for spec, folder in present:
        check = {"cifar": _check_cifar, "array-c": _check_corrupted, "segmentation": _check_segmentation}
        notes = check.get(spec.layout, _check_folders)(spec, folder, thorough=thorough, progress=progress)
        try:
            for status, path, message in chain(notes, _check_class_names(spec, folder, classes)):
                findings.append(Finding(status, spec.name, path, message))
        except (OSError, DataError) as error:
            findings.append(Finding("error", spec.name, folder, str(error)))
    if not present:
        names = ", ".join(spec.folders[0] for spec in DATASETS if spec.folders)
        findings.append(Finding("error", "", root, f"holds no data set; known folders are {names}, in any spelling"))
    names_of = {fold_name(name): spec for spec in DATASETS for name in spec.folders}
    if fold_name(root.resolve().name) in names_of or any(folder == root for _, folder in present):
        return findings
    for child in subfolders(root):
        named = names_of.get(fold_name(child.name))
        if any(folder.is_relative_to(child) for _, folder in present):
            continue
        if named is None:
            findings.append(Finding("warning", "", child, "is not a known data set; skipped"))
        else:
            missing = f"has none of its files; {named.name} wants {named.wanted}"
            findings.append(Finding("error", named.name, child, missing))
    return findings


def check_plugin_dataset(
    name: str, root: Path | str, *, classes: Sequence[str] | None = None, thorough: bool = False
) -> list[Finding]:
    """Check a plugin data set: every domain, and its first and last image (`thorough`: all)."""
    findings = []
    for domain in available_domains(name, root):
        try:
            dataset = open_dataset(name, root, domain=domain)
            for index in range(len(dataset)) if thorough else (0, len(dataset) - 1):
                dataset.image(index)
            if classes is not None:
                match_classes(dataset.class_names, classes, data=name)
        except TrustError as error:
            findings.append(Finding("error", name, Path(root), f"{domain}: {error}"))
        else:
            findings.append(Finding("ok", name, Path(root), f"{domain}: {_count(len(dataset), dataset.class_names)}"))
    return findings


def find_present(root: Path) -> list[tuple[DatasetSpec, Path]]:
    """The data sets under `root` by the names of their folders; without any, what `root` itself holds."""
    named = []
    for spec in DATASETS:
        own = {fold_name(name) for name in spec.folders}
        near = any(fold_name(folder.name) in own for folder in (root.resolve(), *subfolders(root)))
        folder = find_dataset(spec, root) if near else None
        if folder is not None:
            named.append((spec, folder))
    if named:
        return named
    for spec in map(find_spec, _UNNAMED):
        folder = find_dataset(spec, root)
        if folder is not None and _is_whole(spec, folder):
            return [(spec, folder)]
    return []


def _is_whole(spec: DatasetSpec, folder: Path) -> bool:
    """Whether a folder of another name has all classes of the data set, so that it is not just some image folder."""
    if spec.layout != "domains" or spec.class_folders == "sorted":
        return True
    places = [domain_folder(spec, folder, domain) for domain in spec.domains]
    found = [place for place in places if place is not None]
    if spec.class_folders == "named" and len(found) < len(places):
        return False
    if spec.class_folders == "number-or-wnid" and folder in found:
        return False  # any data set may have numbers for class folders
    return all({class_label(spec, c.name) for c in subfolders(f)} == set(range(spec.classes)) for f in found)


def _check_class_names(spec: DatasetSpec, folder: Path, network: Sequence[str] | None) -> Iterator[Note]:
    """Compare the class folders between domains, and with the classes of a network."""
    names = list(spec.class_names)
    if spec.class_folders == "sorted":
        places = [place for _, place, _ in _list_domains(spec, folder) if place is not None]
        listed = {place: [child.name for child in subfolders(place)] for place in places}
        names = sorted({name for found in listed.values() for name in found})
        for place, found in listed.items():
            lacking = [name for name in names if name not in found]
            if variants := spelling_variants(found, lacking):
                pairs = ", ".join(f"'{name}' is '{other}' elsewhere" for name, other in variants)
                yield "error", place, f"classes are spelled in two ways: {pairs}; rename one of each pair"
            elif lacking:
                yield "warning", place, f"lacks classes that other domains have: {', '.join(lacking[:5])}"
    if network is None or not names or are_numeric(names):
        return
    try:
        match = match_classes(names, network, data=spec.name)
    except TrustError as error:
        yield "error", folder, str(error)
        return
    part = f"are {len(names)} of the network's {len(network)}" if match.is_subset else "are the network's"
    yield "ok", folder, f"its {len(names)} classes {part}" + ("" if match.is_identity else ", matched by name")


# arrays


def _check_cifar(spec: DatasetSpec, folder: Path, *, thorough: bool, progress: Progress) -> Iterator[Note]:
    """The clean test and training sets; CIFAR-10's pixels are compared with their known sha256."""
    for domain in spec.domains:
        place = folder / domain.name
        try:
            dataset = open_cifar(spec, folder, domain.name, limit=None)
        except DataError as error:
            yield "error" if domain.target else "warning", place, str(error)
            continue
        images = cast(ArrayImages, dataset.images).array
        problems = list(_label_problems(spec, dataset.labels))
        if images.shape != (domain.images, *_CIFAR_SHAPE):
            problems.append(f"images have the shape {images.shape}; it must be {(domain.images, *_CIFAR_SHAPE)}")
        elif spec.name == "cifar10":
            for part, array in (("images", images), ("labels", dataset.labels)):
                if hash_array(array) != CIFAR10_PINS[f"{domain.name}_{part}"]:
                    problems.append(f"the {part} are not CIFAR-10's (sha256 differs); download it again")
        yield from (("error", place, problem) for problem in problems)
        if not problems:
            yield "ok", place, _count(len(dataset), spec.class_names)


def _check_corrupted(spec: DatasetSpec, folder: Path, *, thorough: bool, progress: Progress) -> Iterator[Note]:
    """`labels.npy` and each `<corruption>.npy`."""
    labels: NDArray[np.int64] | None = None
    try:
        labels = open_labels(folder / LABELS)
        yield from (("error", folder / LABELS, problem) for problem in _label_problems(spec, labels))
    except DataError as error:
        yield "error", folder / LABELS, str(error)
    progress.start(len(spec.domains), f"checking {spec.name}")
    for domain in spec.domains:
        path = folder / f"{domain.name}.npy"
        if path.exists():
            yield from _check_corruption(spec, domain, path, labels, thorough=thorough)
        elif domain.target and spec.folders:
            yield "warning", path, "this corruption is missing"
        progress.advance()
    progress.finish()


def _check_corruption(
    spec: DatasetSpec, domain: DomainSpec, path: Path, labels: NDArray[np.int64] | None, *, thorough: bool
) -> Iterator[Note]:
    problems = []
    try:
        images = open_images(path)
        if spec.folders and images.shape[1:] != _CIFAR_SHAPE:
            problems.append(f"images have the shape {images.shape[1:]}; they must have {_CIFAR_SHAPE}")
        one, five = domain.images, 5 * domain.images
        if domain.images and len(images) not in (one, five) and not recorded_severities(path.parent):
            problems.append(f"holds {len(images)} images; there must be {five} (five severities) or {one} (one)")
        if thorough and (black := [i for i in range(len(images)) if not images[i].any()]):
            problems.append(f"{len(black)} images are black throughout, the first is number {black[0]}")
        if labels is not None:
            blocks = find_blocks(path, len(images), labels, one=one)
            severities = f"each severity ({', '.join(map(str, blocks.severities))})"
            held = f"{blocks.size} images for {severities if blocks.severities else 'one unknown severity'}"
    except (OSError, DataError) as error:
        problems.append(str(error))
    yield from (("error", path, problem) for problem in problems)
    if not problems and labels is not None:
        yield "ok", path, held


def _label_problems(spec: DatasetSpec, labels: NDArray[np.int64]) -> Iterator[str]:
    high = spec.classes or np.iinfo(np.int64).max
    wrong = np.flatnonzero((labels < 0) | (labels >= high))
    if len(wrong):
        first = int(wrong[0])
        yield f"{len(wrong)} labels are not in 0..{high - 1}, the first is number {first} with {labels[first]}"
    elif empty := [name for label, name in enumerate(spec.class_names) if label not in set(labels.tolist())]:
        yield f"{len(empty)} classes have no images, such as {', '.join(empty[:5])}"


# files


def _check_segmentation(spec: DatasetSpec, folder: Path, *, thorough: bool, progress: Progress) -> Iterator[Note]:
    """The images and masks of each split: the headers of both, and with `thorough` every label."""
    names, _ = class_names_and_colors(spec, folder)
    splits = list_splits(spec, folder)
    for missing in (split for split in spec.domains if split not in splits and split.target):
        yield "warning", folder / missing.name, "this split is missing"
    for split in splits:
        dataset = open_segmentation(spec, folder, split.name)
        inspect = partial(_mask_problem, dataset, thorough=thorough)
        what = f"checking {spec.name}/{split.name}"
        problems = list(_inspect_all(range(len(dataset)), inspect, what=what, progress=progress))
        yield from problems
        if split.images and len(dataset) != split.images:
            yield "warning", folder, f"{split.name} has {len(dataset)} images; the whole split has {split.images}"
        if not problems:
            yield "ok", folder, f"{split.name}: {_count(len(dataset), names)}"


def _mask_problem(dataset: SegmentationDataset, index: int, *, thorough: bool) -> tuple[Path, str] | None:
    """The problem of an image or its mask, in a few words; None if there is none."""
    image = dataset.masks.folder / cast(FileImages, dataset.images).names[index]
    mask = dataset.masks.folder / dataset.masks.names[index]
    for path in (image, mask):
        if not path.is_file():
            return path, "is missing"
    try:
        size, mask_size = check_image(image), check_image(mask)
        if size != mask_size:
            return mask, f"has {mask_size[0]}x{mask_size[1]} labels for {size[0]}x{size[1]} pixels of {image.name}"
        if thorough:
            read_image(image)
            dataset.mask(index)
    except DataError as error:
        return mask if str(mask) in str(error) else image, str(error)
    return None


def _check_folders(spec: DatasetSpec, folder: Path, *, thorough: bool, progress: Progress) -> Iterator[Note]:
    """The class folders of each domain, and every image in them."""
    read = read_image if thorough else check_image
    for domain, place, expected in _list_domains(spec, folder):
        if place is None:
            yield "warning", folder / domain, "this domain is missing"
            continue
        known = spec.class_folders == "sorted"
        classes = [child for child in subfolders(place) if known or class_label(spec, child.name) is not None]
        files = [child / name for child in classes for name in list_images(child)]
        notes = list(_check_class_folders(spec, place, classes))
        if expected and len(files) != expected:
            notes.append(("error", place, f"holds {len(files)} images; the whole domain has {expected}"))
        what = f"checking {spec.name}/{domain}"
        notes += _inspect_all(files, partial(_image_problem, read), what=what, progress=progress)
        yield from notes
        if not any(status == "error" for status, _, _ in notes):
            yield "ok", place, _count(len(files), classes)


def _list_domains(spec: DatasetSpec, folder: Path) -> Iterator[tuple[str, Path | None, int]]:
    """Name, folder (None: missing) and expected number of images (0: any) of each domain and severity."""
    if not spec.domains:
        yield from ((name, place, 0) for name, place in generic_domains(folder).items())
    for domain in spec.domains:
        place = domain_folder(spec, folder, domain)
        levels = [place] if place is not None else []
        if spec.layout == "folder-c":
            levels = [level for child in levels for level in subfolders(child) if level.name.isdecimal()]
        for level in levels:
            yield domain.name if level == place else f"{domain.name}/{level.name}", level, domain.images
        if not levels and (place is not None or (domain.target and spec.folders)):
            yield domain.name, None, domain.images


def _check_class_folders(spec: DatasetSpec, folder: Path, classes: list[Path]) -> Iterator[Note]:
    """Unknown, missing and empty classes, images outside of classes, files that are not images."""
    for child in subfolders(folder):
        if child not in classes:
            yield "error", child, f"is not a class of {spec.name}"
    if loose := list_images(folder):
        yield "error", folder, f"{len(loose)} images lie outside class folders, such as {loose[0]}"
    found = {class_label(spec, child.name) for child in classes}
    expected = imagenet_r_labels().tolist() if spec.imagenet_r else range(spec.classes)
    if missing := [label for label in expected if label not in found]:
        names = ", ".join(spec.class_names[label] for label in missing[:5])
        yield "warning", folder, f"{len(missing)} of {len(expected)} classes have no folder, such as {names}"
    for child in classes:
        files = sorted(path.name for path in child.iterdir() if not path.name.startswith("."))
        if others := [name for name in files if not is_image(name)]:
            yield "warning", child, f"{len(others)} files are not images and are skipped, such as {others[0]}"
        if len(others) == len(files):
            yield "error", child, "this class has no images"


def _image_problem(read: Callable[[Path], object], path: Path) -> tuple[Path, str] | None:
    try:
        read(path)
    except DataError as error:
        return path, f"cannot be read: {reason_of(error.__cause__ or error)}"
    return None


def _inspect_all(
    items: Sequence[Item], inspect: Callable[[Item], tuple[Path, str] | None], *, what: str, progress: Progress
) -> Iterator[Note]:
    """The problems that `inspect` finds among `items`, in several threads."""
    progress.start(len(items), what)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="check") as executor:
        for start in range(0, len(items), _CHUNK):
            chunk = items[start : start + _CHUNK]
            yield from (("error", *problem) for problem in executor.map(inspect, chunk) if problem is not None)
            progress.advance(len(chunk))
    progress.finish()


def _count(images: int, classes: Sequence[object]) -> str:
    return f"{images} images in {len(classes)} classes"
