"""Checking a data root: what is there, what is missing, what is broken."""

from __future__ import annotations

import os
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
from trust_tta.data.dataset import ArrayImages, Dataset, FileImages
from trust_tta.data.fetch import CIFAR10_PINS
from trust_tta.data.file_io import hash_array
from trust_tta.data.images import check_image, is_image, list_images, read_image
from trust_tta.data.loading import (
    ONLY_DOMAIN,
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
"""What a `Finding` says of a data set that is known."""

_UNNAMED = "cifar10 pacs imagenet-c imagenet imagenet-v2 array-c folder-c camvid masks folder"
"""What a folder with an unknown name may be, in the order in which they are tried."""

Item = TypeVar("Item")

_CIFAR_SHAPE = (32, 32, 3)
_THREADS = 4
_CHUNK = 256


@dataclass(frozen=True)
class Finding:
    """One statement about one file or folder; `dataset` is empty where it belongs to none."""

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

    Every array's and every image's header is opened; with `thorough`, every pixel is read. `classes` are those of a
    network, with which the names of class folders are compared.
    """
    root = Path(root)
    if not root.is_dir():
        return [Finding("error", "", root, "is not a folder; give the folder that holds your data sets")]
    present = find_present(root)
    findings: list[Finding] = []
    for spec, folder in present:
        try:
            notes = _check_dataset(spec, folder, thorough=thorough, progress=progress)
            for status, path, message in chain(notes, _check_classes(spec, folder, classes)):
                findings.append(Finding(status, spec.name, path, message))
        except (OSError, DataError) as error:
            findings.append(Finding("error", spec.name, folder, str(error)))
    if not present:
        names = ", ".join(spec.folders[0] for spec in DATASETS if spec.folders)
        findings.append(Finding("error", "", root, f"holds no data set; folders we know are {names}, in any spelling"))
    if not _is_itself(root, present):
        findings += _check_leftovers(root, present)
    return findings


def check_plugin_dataset(
    name: str, root: Path | str, *, classes: Sequence[str] | None = None, thorough: bool = False
) -> list[Finding]:
    """Check a data set from outside the package: every domain, and its first and last image (`thorough`: all)."""
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
    """The data sets under `root`, each with the folder that holds it; else what `root` itself seems to be."""
    named = []
    for spec in DATASETS:
        own = {fold_name(name) for name in spec.folders}
        near = any(fold_name(folder.name) in own for folder in (root.resolve(), *subfolders(root)))
        folder = find_dataset(spec, root) if near else None
        if folder is not None:
            named.append((spec, folder))
    if named:
        return named
    found = ((spec, find_dataset(spec, root)) for spec in map(find_spec, _UNNAMED.split()))
    return [(spec, folder) for spec, folder in found if folder is not None and _is_beyond_doubt(spec, folder)][:1]


def _is_beyond_doubt(spec: DatasetSpec, folder: Path) -> bool:
    """Whether an unnamed folder is this data set: domains called `photo` and `sketch` alone do not make it PACS."""
    if spec.class_folders != "named" or spec.layout != "domains":
        return True
    places = [domain_folder(spec, folder, domain) for domain in spec.domains]
    classes = [{class_label(spec, child.name) for child in subfolders(place)} for place in places if place is not None]
    return len(classes) == len(places) and all(found == set(range(spec.classes)) for found in classes)


def _is_itself(root: Path, present: list[tuple[DatasetSpec, Path]]) -> bool:
    """Whether `root` is a data set rather than a folder of data sets."""
    named = {fold_name(name) for spec, _ in present for name in spec.folders}
    return any(folder == root for _, folder in present) or fold_name(root.resolve().name) in named


def _check_leftovers(root: Path, present: list[tuple[DatasetSpec, Path]]) -> Iterator[Finding]:
    """Folders that belong to no data set or hold nothing of theirs, and the data sets that are not there."""
    names = {fold_name(name): spec for spec in DATASETS for name in spec.folders}
    for child in subfolders(root):
        spec = names.get(fold_name(child.name))
        if any(folder.is_relative_to(child) for _, folder in present):
            continue
        if spec is None:
            yield Finding("warning", "", child, "is not a known data set; skipped")
        else:
            yield Finding("error", spec.name, child, f"has none of its files; {spec.name} wants {spec.wanted}")
    known = {spec.name for spec, _ in present}
    if absent := [spec.name for spec in DATASETS if spec.folders and spec.name not in known]:
        yield Finding("ok", "", root, f"not here: {', '.join(absent)}")


def _check_dataset(spec: DatasetSpec, folder: Path, *, thorough: bool, progress: Progress) -> Iterator[Note]:
    if spec.layout == "cifar":
        yield from _check_cifar(spec, folder)
    elif spec.layout == "array-c":
        yield from _check_corrupted(spec, folder, thorough=thorough, progress=progress)
    elif spec.layout == "segmentation":
        yield from _check_segmentation(spec, folder, thorough=thorough, progress=progress)
    else:
        for domain, place, images in _domains(spec, folder):
            if place is None:
                yield "warning", folder / domain, "this domain is missing"
            else:
                yield from _check_domain(spec, place, domain, images, thorough=thorough, progress=progress)


def _domains(spec: DatasetSpec, folder: Path) -> Iterator[tuple[str, Path | None, int]]:
    """Name, folder (None: missing) and expected number of images (0: any) of what should be in an image folder."""
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


# the names of classes


def _check_classes(spec: DatasetSpec, folder: Path, network: Sequence[str] | None) -> Iterator[Note]:
    """What the class folders are called, compared between domains, with known data sets, and with a network."""
    names = list(spec.class_names)
    if spec.class_folders == "sorted":
        places = [place for _, place, _ in _domains(spec, folder) if place is not None]
        listed = {place: [child.name for child in subfolders(place)] for place in places}
        names = sorted({name for found in listed.values() for name in found})
        for place, found in listed.items():
            yield from _compare_domain(place, found, names)
        yield from _compare_known(folder, names)
    if network is not None and names and not are_numeric(names):
        try:
            match = match_classes(names, network, data=spec.name)
        except TrustError as error:
            yield "error", folder, str(error)
        else:
            order = "" if match.is_identity else ", in another order, and are matched by name"
            yield "ok", folder, f"its {len(names)} classes are the network's{order}"


def _compare_domain(place: Path, found: list[str], every: list[str]) -> Iterator[Note]:
    lacking = [name for name in every if name not in found]
    if misses := spelling_variants(found, lacking):
        pairs = ", ".join(f"'{name}' is '{other}' elsewhere" for name, other in misses)
        yield "error", place, f"classes are spelled in two ways: {pairs}; rename one of each pair"
    elif lacking:
        yield "warning", place, f"lacks classes that other domains have: {', '.join(lacking[:5])}"


def _compare_known(folder: Path, names: list[str]) -> Iterator[Note]:
    for known in DATASETS:
        same = {fold_name(name) for name in names} == {fold_name(name) for name in known.class_names}
        if same and known.layout in ("cifar", "domains") and (misses := spelling_variants(names, known.class_names)):
            pairs = ", ".join(f"'{name}' for '{other}'" for name, other in misses[:5])
            message = f"its classes are those of {known.name} but for the spelling: {pairs}; its networks refuse them"
            yield "warning", folder, message


# arrays


def _check_cifar(spec: DatasetSpec, folder: Path) -> Iterator[Note]:
    """The clean test and training sets; CIFAR-10's pixels are compared with their known hash."""
    for domain in spec.domains:
        place = folder / domain.name
        try:
            dataset = open_cifar(spec, folder, domain.name, limit=None)
        except DataError as error:
            yield "error" if domain.target else "warning", place, str(error)
            continue
        problems = [*_cifar_problems(spec, domain, dataset), *_empty_classes(spec, dataset.labels)]
        yield from (("error", place, problem) for problem in problems)
        if not problems:
            yield "ok", place, _count(len(dataset), spec.class_names)


def _cifar_problems(spec: DatasetSpec, domain: DomainSpec, dataset: Dataset) -> Iterator[str]:
    images = cast(ArrayImages, dataset.images).array
    if images.shape[1:] != _CIFAR_SHAPE:
        yield f"images have the shape {images.shape[1:]}; they must have {_CIFAR_SHAPE}"
    elif len(images) != domain.images:
        yield f"holds {len(images)} images; there must be {domain.images}"
    elif spec.name == "cifar10" and hash_array(images) != CIFAR10_PINS[f"{domain.name}_images"]:
        yield "the pixels are not CIFAR-10's (sha256 differs); fetch it again"
    elif spec.name == "cifar10" and hash_array(dataset.labels) != CIFAR10_PINS[f"{domain.name}_labels"]:
        yield "the labels are not CIFAR-10's (sha256 differs); fetch it again"


def _check_corrupted(spec: DatasetSpec, folder: Path, *, thorough: bool, progress: Progress) -> Iterator[Note]:
    """The labels and each `<corruption>.npy`."""
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
    problems: list[str] = []
    held = ""
    try:
        images = open_images(path)
        problems += _corruption_problems(spec, domain, path, images)
        if thorough:
            problems += _black_images(images)
        if labels is not None:
            blocks = find_blocks(path, len(images), labels, one=domain.images)
            severities = ", ".join(map(str, blocks.severities))
            held = f"{blocks.size} images for each severity ({severities})"
            if not severities:
                held = f"{blocks.size} images of one severity, which nothing states; any that is asked for gives them"
    except DataError as error:
        problems.append(str(error))
    yield from (("error", path, problem) for problem in problems)
    if not problems and held:
        yield "ok", path, held


def _corruption_problems(spec: DatasetSpec, domain: DomainSpec, path: Path, images: NDArray[np.uint8]) -> Iterator[str]:
    if spec.folders and images.shape[1:] != _CIFAR_SHAPE:
        yield f"images have the shape {images.shape[1:]}; they must have {_CIFAR_SHAPE}"
    whole = (domain.images, 5 * domain.images)
    if domain.images and len(images) not in whole and not recorded_severities(path.parent):
        yield f"holds {len(images)} images; there must be {whole[1]} (five severities) or {whole[0]} (one)"


def _label_problems(spec: DatasetSpec, labels: NDArray[np.int64]) -> Iterator[str]:
    high = spec.classes or np.iinfo(np.int64).max
    wrong = np.flatnonzero((labels < 0) | (labels >= high))
    if len(wrong):
        first = int(wrong[0])
        yield f"{len(wrong)} labels are not in 0..{high - 1}, the first is number {first} with {labels[first]}"
    else:
        yield from _empty_classes(spec, labels)


def _empty_classes(spec: DatasetSpec, labels: NDArray[np.int64]) -> Iterator[str]:
    present = set(np.unique(labels).tolist())
    if empty := [name for label, name in enumerate(spec.class_names) if label not in present]:
        yield f"{len(empty)} classes have no images, such as {', '.join(empty[:5])}"


def _black_images(images: NDArray[np.uint8]) -> Iterator[str]:
    """Read every pixel; images that are zero throughout are the mark of a file that was never written to its end."""
    try:
        if black := [i for i in range(len(images)) if not images[i].any()]:
            yield f"{len(black)} images are black throughout, the first is number {black[0]}"
    except OSError as error:
        yield f"cannot be read to its end: {error}"


# files of images


def _check_segmentation(spec: DatasetSpec, folder: Path, *, thorough: bool, progress: Progress) -> Iterator[Note]:
    """The pictures and label files of each split: the headers of both, and with `thorough` every label."""
    names, _ = class_names_and_colors(spec, folder)
    splits = list_splits(spec, folder)
    for missing in (split for split in spec.domains if split not in splits and split.target):
        yield "warning", folder / missing.name, "this split is missing"
    for split in splits:
        dataset = open_segmentation(spec, folder, split.name)
        inspect = partial(_pair_problem, dataset, thorough=thorough)
        what = f"checking {spec.name}/{split.name}"
        problems = list(_inspect_all(range(len(dataset)), inspect, what=what, progress=progress))
        yield from problems
        if split.images and len(dataset) != split.images:
            yield "warning", folder, f"{split.name} has {len(dataset)} pictures; the whole split has {split.images}"
        if not problems:
            yield "ok", folder, f"{split.name}: {_count(len(dataset), names)}"


def _pair_problem(dataset: SegmentationDataset, index: int, *, thorough: bool) -> tuple[Path, str] | None:
    """What is wrong with a picture and its label file."""
    image = dataset.masks.folder / cast(FileImages, dataset.images).names[index]
    mask = dataset.masks.folder / dataset.masks.names[index]
    for path in (image, mask):
        if not path.is_file():
            return path, "is missing"
    try:
        size, labeled = check_image(image), check_image(mask)
        if size != labeled:
            return mask, f"has {labeled[0]}x{labeled[1]} labels for {size[0]}x{size[1]} pixels of {image.name}"
        if thorough:
            read_image(image)
            dataset.mask(index)
    except DataError as error:
        return mask if str(mask) in str(error) else image, str(error)
    return None


def _check_domain(
    spec: DatasetSpec, folder: Path, domain: str, images: int, *, thorough: bool, progress: Progress
) -> Iterator[Note]:
    """The class folders of one domain and every image in them; `images` is the number expected, 0 for any."""
    generic = spec.class_folders == "sorted"
    classes = [child for child in subfolders(folder) if generic or class_label(spec, child.name) is not None]
    notes = list(_check_structure(spec, folder, classes))
    files = [child / name for child in classes for name in list_images(child)]
    if images and len(files) != images:
        notes.append(("error", folder, f"holds {len(files)} images; the whole domain has {images}"))
    inspect = partial(_image_problem, read_image if thorough else check_image)
    what = f"checking {spec.name}" + ("" if domain == ONLY_DOMAIN else f"/{domain}")
    notes += _inspect_all(files, inspect, what=what, progress=progress)
    yield from notes
    if not any(status == "error" for status, _, _ in notes):
        yield "ok", folder, _count(len(files), classes)


def _check_structure(spec: DatasetSpec, folder: Path, classes: list[Path]) -> Iterator[Note]:
    """Unknown, missing and empty classes, images outside of classes, files that are no images."""
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
        files = sorted(name for name in os.listdir(child) if not name.startswith("."))
        if strange := [name for name in files if not is_image(name)]:
            yield "warning", child, f"{len(strange)} files are not images and are skipped, such as {strange[0]}"
    for child in classes:
        if not list_images(child):
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
    """The files that are not in order among `items`, and why, in several threads."""
    progress.start(len(items), what)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="check") as executor:
        for start in range(0, len(items), _CHUNK):
            chunk = items[start : start + _CHUNK]
            yield from (("error", *problem) for problem in executor.map(inspect, chunk) if problem is not None)
            progress.advance(len(chunk))
    progress.finish()


def _count(images: int, classes: Sequence[object]) -> str:
    return f"{images} images in {len(classes)} classes"
