"""Finding data sets on disk, whatever spelling and nesting their folders have."""

from __future__ import annotations

import os
from pathlib import Path

from trust_tta.data.cifar_files import TEST_BATCH, TRAIN_BATCHES
from trust_tta.data.imagenet import imagenet_classes, label_of_wnid
from trust_tta.data.images import is_image
from trust_tta.data.specs import DATASETS, DatasetSpec, DomainSpec, fold_name
from trust_tta.errors import DataError

CIFAR_ARRAYS = ("test_images.npy", "train_images.npy")
OFFICIAL_PARTS: dict[str, dict[str, tuple[str, ...]]] = {
    "cifar10": {"train": TRAIN_BATCHES, "test": (TEST_BATCH,)},
    "cifar100": {"train": ("train",), "test": ("test",)},
}
ONLY_DOMAIN = "all"
"""The domain of a generic folder that has classes and no domains."""

_GROUPS = ("noise", "blur", "weather", "digital", "extra")  # the archives that ImageNet-C comes in


def subfolders(folder: Path) -> list[Path]:
    """The folders in `folder` by name, without hidden ones and those that archivers leave behind."""
    try:
        with os.scandir(folder) as entries:
            names = [e.name for e in entries if e.is_dir() and not e.name.startswith(".") and e.name != "__MACOSX"]
    except OSError:
        return []
    return [folder / name for name in sorted(names)]


def class_label(spec: DatasetSpec, name: str) -> int | None:
    """The label that a class folder called `name` stands for, None where the data set has no such class."""
    if spec.class_folders == "named":
        return {fold_name(known): label for label, known in enumerate(spec.class_names)}.get(fold_name(name))
    if spec.class_folders == "number-or-wnid" and name.isdecimal():
        return int(name) if int(name) < spec.classes else None
    label = label_of_wnid().get(name.lower())
    if spec.renditions and label is not None and not imagenet_classes()[label].rendition:
        return None
    return label


def find_dataset(spec: DatasetSpec, root: Path) -> Path | None:
    """The folder under `root`, or `root` itself, that holds the content of the data set."""
    if not spec.folders:
        return root if _holds(spec, root) else None
    own = {fold_name(name) for name in spec.folders}
    candidates = [child for child in subfolders(root) if fold_name(child.name) in own]
    others = {fold_name(name) for other in DATASETS if other is not spec for name in other.folders}
    if fold_name(root.resolve().name) not in others - own:
        candidates.append(root)
    for candidate in candidates:
        found = _descend(spec, candidate)
        if found is not None:
            return found
    return None


def locate(spec: DatasetSpec, root: Path) -> Path:
    """The folder that holds the data set, or an error that says what was looked for."""
    if not root.is_dir():
        raise DataError(f"{root} is not a folder; give the folder that holds your data sets")
    found = find_dataset(spec, root)
    if found is None:
        name = f" in a folder named {' or '.join(spec.folders)}" if spec.folders else ""
        raise DataError(f"{spec.name} is not in {root}: it wants {spec.wanted}{name}; get it from {spec.source}")
    return found


def domain_folder(spec: DatasetSpec, folder: Path, part: DomainSpec) -> Path | None:
    """Where in the data set's folder the domain's class folders (or severities) lie."""
    names = _names(part)
    children = subfolders(folder)
    if spec.layout == "folder-c":
        children += [inner for child in children if child.name.lower() in _GROUPS for inner in subfolders(child)]
    for child in children:
        if fold_name(child.name) in names:
            return child
    if spec.layout != "domains" or spec.class_folders == "named" or not _has_classes(spec, folder):
        return None
    # The folder is a domain itself: the one of its name, or the first.
    named = [other for other in spec.parts if fold_name(folder.name) in _names(other)]
    return folder if part == (named or spec.parts)[0] else None


def _names(part: DomainSpec) -> set[str]:
    return {fold_name(name) for name in (part.name, *part.folders)}


def generic_domains(folder: Path) -> dict[str, Path]:
    """The domains of a generic image folder: its subfolders where these hold folders, else the folder as a whole."""
    children = subfolders(folder)
    if any(has_images(child) for child in children):
        return {ONLY_DOMAIN: folder}
    return {child.name: child for child in children if any(has_images(inner) for inner in subfolders(child))}


def has_images(folder: Path) -> bool:
    """Whether an image file lies directly in `folder`."""
    try:
        with os.scandir(folder) as entries:
            return any(is_image(entry.name) for entry in entries)
    except OSError:
        return False


def _descend(spec: DatasetSpec, folder: Path) -> Path | None:
    """`folder`, or the first folder within that holds the content, going through known nestings only."""
    if _holds(spec, folder):
        return folder
    nested = {fold_name(name) for name in spec.nested}
    for child in subfolders(folder):
        if fold_name(child.name) in nested:
            found = _descend(spec, child)
            if found is not None:
                return found
    return None


def _holds(spec: DatasetSpec, folder: Path) -> bool:
    """Whether the content of the data set, or a part of it, lies directly in `folder`."""
    if spec.layout == "cifar":
        official = (name for names in OFFICIAL_PARTS[spec.name].values() for name in names)
        return any((folder / name).is_file() for name in (*CIFAR_ARRAYS, *official))
    if spec.layout == "array-c":
        return any((folder / f"{part.name}.npy").is_file() for part in spec.parts)
    if not spec.parts:
        return bool(generic_domains(folder))
    found = (domain_folder(spec, folder, part) for part in spec.parts)
    return any(domain is not None and _is_domain(spec, domain) for domain in found)


def _is_domain(spec: DatasetSpec, folder: Path) -> bool:
    if spec.layout == "folder-c":
        return any(child.name.isdecimal() and _has_classes(spec, child) for child in subfolders(folder))
    return _has_classes(spec, folder)


def _has_classes(spec: DatasetSpec, folder: Path) -> bool:
    children = subfolders(folder)
    return (
        bool(children)
        if spec.class_folders == "sorted"
        else any(class_label(spec, c.name) is not None for c in children)
    )
