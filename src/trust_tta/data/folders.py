"""Image folders: one folder for each class, read in a fixed order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trust_tta.data.dataset import Dataset, FileImages
from trust_tta.data.imagenet import rendition_mask
from trust_tta.data.images import list_images
from trust_tta.data.locate import class_label, subfolders
from trust_tta.data.specs import DatasetSpec
from trust_tta.errors import DataError


def open_folder(
    spec: DatasetSpec, folder: Path, domain: str, *, severity: int | None = None, limit: int | None = None
) -> Dataset:
    """One domain from its class folders; `limit` takes images at even distances, so that all classes stay in."""
    labels_of, class_names = class_map(spec, folder)
    names: list[str] = []
    labels: list[int] = []
    for class_folder, label in sorted(labels_of.items(), key=lambda item: (item[1], item[0])):
        files = list_images(folder / class_folder)
        names += [f"{class_folder}/{file}" for file in files]
        labels += [label] * len(files)
    if not names:
        raise DataError(f"{folder} has no images; {spec.name} wants them as {domain}/<class>/<image>")
    chosen = spread(len(names), limit)
    return Dataset(
        name=spec.name,
        domain=domain,
        images=FileImages(folder, tuple(names[i] for i in chosen)),
        labels=np.array(labels, dtype=np.int64)[chosen],
        class_names=class_names,
        severity=severity,
        class_mask=rendition_mask() if spec.renditions else None,
    )


def class_map(spec: DatasetSpec, folder: Path) -> tuple[dict[str, int], tuple[str, ...]]:
    """The label of each class folder, and the names of all classes."""
    found = [child.name for child in subfolders(folder)]
    if not found:
        raise DataError(f"{folder} has no class folders; sort the images into one folder for each class")
    if spec.class_folders == "sorted":
        ordered = sorted(found, key=int) if all(name.isdecimal() for name in found) else found
        return {name: label for label, name in enumerate(ordered)}, tuple(ordered)
    labels = {name: class_label(spec, name) for name in found}
    if unknown := [name for name, label in labels.items() if label is None]:
        raise DataError(f"{folder / unknown[0]} is no class of {spec.name}; allowed are {_allowed(spec)}")
    return {name: label for name, label in labels.items() if label is not None}, spec.class_names


def spread(count: int, limit: int | None) -> NDArray[np.int64]:
    """`limit` of `count` indices at even distances, or all of them."""
    if limit is None or limit >= count:
        return np.arange(count, dtype=np.int64)
    return np.arange(limit, dtype=np.int64) * count // limit


def _allowed(spec: DatasetSpec) -> str:
    if spec.class_folders == "named":
        return ", ".join(spec.class_names)
    kind = "its 200 WordNet ids" if spec.renditions else "the 1000 WordNet ids of ILSVRC 2012, as n01440764"
    return f"{kind}, or the numbers 0..999" if spec.class_folders == "number-or-wnid" else kind
