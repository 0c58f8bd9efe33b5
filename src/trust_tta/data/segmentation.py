"""Segmentation data sets: images, masks, class names and colors.

Pascal VOC 2012, Pascal Context, ADE20K, Cityscapes, CamVid, and folders of the user's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self, cast

import numpy as np
from numpy.typing import NDArray

from trust_tta.config_io import read_class_names, read_text
from trust_tta.data.dataset import Dataset, FileImages
from trust_tta.data.file_io import hash_array, hash_strings
from trust_tta.data.images import list_images
from trust_tta.data.masks import Mask, ResizeProtocol, lookup_table, read_mask
from trust_tta.data.registry import DatasetSpec, DomainSpec, SegmentationSpec, find_domain
from trust_tta.data.segmentation_metrics import IGNORED
from trust_tta.errors import DataError
from trust_tta.schema import Count, Schema, parse

CLASSES_FILE = "classes.txt"
OWN_MASKS = "masks"  # the data set that is a folder of the user's own
ONLY_SPLIT = "all"
MAX_CLASSES = 255  # the last label is for ignored pixels


@dataclass(frozen=True)
class FileMasks(FileImages):
    """Masks below `folder`; `table` (256,) maps stored labels to class labels."""

    table: Mask

    def read(self, index: int) -> Mask:
        labels: Mask = self.table[read_mask(self.folder / self.names[index])]
        return labels

    def digest(self) -> str:
        return hash_strings((super().digest(), hash_array(self.table)))


@dataclass(frozen=True, eq=False, kw_only=True)
class SegmentationDataset(Dataset):
    """One split of a segmentation data set, resized by a protocol; `labels` is all zeros, see `mask`.

    `images` and `masks` read the files at their own size.
    """

    masks: FileMasks
    protocol: ResizeProtocol
    palette: NDArray[np.uint8]  # (classes, 3)

    def image(self, index: int) -> NDArray[np.uint8]:
        """Image `index`, resized for the network, uint8 (h, w, 3)."""
        return self.protocol.resize_image(self.images.read(index))

    def mask(self, index: int) -> Mask:
        """The mask of image `index` at the size at which it is scored, uint8 (h, w)."""
        mask = self.masks.read(index)
        highest = mask[mask != IGNORED].max(initial=0)
        if highest >= len(self.class_names):
            raise DataError(
                f"the mask {self.masks.folder / self.masks.names[index]} has the label {highest}; "
                f"{self.name} has the labels 0..{len(self.class_names) - 1} and {IGNORED}"
            )
        return self.protocol.resize_mask(mask)

    def pick(self, indices: NDArray[np.int64]) -> Self:
        """The images at `indices` (n,) with their masks."""
        masks = replace(self.masks, names=tuple(self.masks.names[i] for i in indices))
        return replace(super().pick(indices), masks=masks)

    def renumber(self, outputs: NDArray[np.int64], names: tuple[str, ...]) -> SegmentationDataset:
        """The data set with label i as `outputs[i]`, under the class names of a network, colors included."""
        table, palette = lookup_table(dict(enumerate(outputs.tolist()))), np.zeros((len(names), 3), np.uint8)
        palette[outputs] = self.palette
        masks = replace(self.masks, table=table[self.masks.table])
        return replace(self, masks=masks, palette=palette, class_names=names)

    @cached_property
    def fingerprint(self) -> str:
        """A sha256 over the names and sizes of the files, the label table and the protocol."""
        return hash_strings((self.images.digest(), self.masks.digest(), repr(self.protocol)))


class ResizeOptions(Schema):
    """Changes of a data set's `ResizeProtocol`."""

    protocol: Literal["squash", "native"] | None = None
    scale: tuple[Count, Count] | None = None


def open_segmentation(
    spec: DatasetSpec, folder: Path, split: str | None, *, options: Mapping[str, Any] | None = None
) -> SegmentationDataset:
    """One split of a data set in `folder`; `options`: the `protocol`, and the `scale` (width and height) of it."""
    rules, given = segmentation_spec(spec), parse(ResizeOptions, options or {}, where=f"the options of {spec.name}")
    name = given.protocol or rules.protocol
    splits = spec.domains or list_splits(spec, folder)
    first = next((known.name for known in splits if known.target), None)
    domain = find_domain(spec.changed(domains=splits), split or first)
    pairs = list_pairs(spec, folder, domain)
    if not pairs:
        raise DataError(f"{folder} has no images of {spec.name}/{domain.name}; it wants {spec.wanted}")
    class_names, colors = class_names_and_colors(spec, folder)
    if rules.scored:
        table = lookup_table({old: new for new, old in enumerate(rules.scored)}, only=True)
    else:
        table = lookup_table(dict.fromkeys(rules.ignored, IGNORED), reduce_zero=rules.reduce_zero)
    return SegmentationDataset(
        name=spec.name,
        domain=domain.name,
        images=FileImages(folder, tuple(image for image, _ in pairs)),
        labels=np.zeros(len(pairs), dtype=np.int64),
        class_names=class_names,
        masks=FileMasks(folder, tuple(mask for _, mask in pairs), table),
        protocol=ResizeProtocol(name, given.scale or (rules.native if name == "native" else rules.squash)),
        palette=colors,
    )


def class_names_and_colors(spec: DatasetSpec, folder: Path) -> tuple[tuple[str, ...], NDArray[np.uint8]]:
    """Names and colors (classes, 3): of a known data set, or of the classes.txt of a folder."""
    if spec.class_names:
        colors = [tuple(bytes.fromhex(color)) for color in segmentation_spec(spec).palette]
        return spec.class_names, np.array(colors, dtype=np.uint8)
    path = folder / CLASSES_FILE
    if not path.is_file():
        raise DataError(f"{folder} has no {CLASSES_FILE}; write the names of its classes there, one per line from 0 on")
    if len(names := read_class_names(path)) > MAX_CLASSES:
        raise DataError(f"{path} has {len(names)} names; give at most {MAX_CLASSES}")
    return names, distinct_colors(len(names))


def distinct_colors(count: int) -> NDArray[np.uint8]:
    """Pascal VOC's color map from the second color on, (count, 3)."""
    numbers, channels = np.arange(1, count + 1)[:, None], np.arange(3)
    bits = [((numbers >> (3 * bit + channels)) & 1) << (7 - bit) for bit in range(3)]
    colors: NDArray[np.uint8] = np.sum(bits, axis=0).astype(np.uint8)
    return colors


# which splits there are, and their files


def list_splits(spec: DatasetSpec, folder: Path) -> tuple[DomainSpec, ...]:
    """The splits that have images and masks in `folder`."""
    known = spec.domains
    if not known:
        inner = sorted(path.name for path in (folder / "images").glob("*/"))
        own = [name for name in inner if (folder / "masks" / name).is_dir()] or [ONLY_SPLIT]
        known = tuple(DomainSpec(name=name, images=0) for name in own)
    return tuple(split for split in known if list_pairs(spec, folder, split))


def list_pairs(spec: DatasetSpec, folder: Path, split: DomainSpec) -> list[tuple[str, str]]:
    """The paths in `folder` of each image of a split and its mask; empty where the split or its masks are missing."""
    rules = segmentation_spec(spec)
    if spec.name == "cityscapes":
        found = sorted((folder / "leftImg8bit" / split.name).glob("*/*_leftImg8bit.png"))
        ids = [f"{split.name}/{path.parent.name}/{path.name.removesuffix('_leftImg8bit.png')}" for path in found]
        return [(f"leftImg8bit/{i}_leftImg8bit.png", f"gtFine/{i}_gtFine_labelIds.png") for i in ids]
    if rules.lists:  # as Pascal VOC names its files
        path = folder / rules.lists / f"{split.name}.txt"
        ids = read_text(path, error=DataError).split() if path.is_file() and (folder / rules.masks).is_dir() else []
        return [(f"{rules.images}/{name}.jpg", f"{rules.masks}/{name}.png") for name in ids]
    for name in (split.name, *split.folders):
        part = "" if name == ONLY_SPLIT else name
        images, masks = (text.format(split=part).rstrip("/") for text in (rules.images, rules.masks))
        if (folder / images).is_dir() and (folder / masks).is_dir():
            return [(f"{images}/{file}", f"{masks}/{Path(file).stem}.png") for file in list_images(folder / images)]
    return []


def segmentation_spec(spec: DatasetSpec) -> SegmentationSpec:
    return cast(SegmentationSpec, spec.segmentation)
