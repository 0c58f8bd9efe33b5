"""Data sets with a label for every pixel: where pictures and label files lie, and what the labels mean.

Pascal VOC 2012, Pascal Context, ADE20K, Cityscapes, CamVid, and folders of the user's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trust_tta.data.classes import pixel_classes
from trust_tta.data.dataset import Dataset, FileImages, Images
from trust_tta.data.files import hash_listing, hash_pixels, hash_texts
from trust_tta.data.images import is_image
from trust_tta.data.masks import Mask, PixelProtocol, find_protocol, lookup_table, read_mask
from trust_tta.data.specs import DatasetSpec, DomainSpec
from trust_tta.errors import ConfigError, DataError
from trust_tta.overlap import IGNORED
from trust_tta.schema import did_you_mean
from trust_tta.textfiles import read_text

CLASSES_FILE = "classes.txt"
OWN_MASKS = "masks"  # the data set that is a folder of the user's own
ONLY_SPLIT = "all"
MOST_CLASSES = 255  # the last label means that a pixel does not count

# Cityscapes: the 19 classes that are scored, among the 34 of its files.
_TRAIN_IDS = dict(
    zip((7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33), range(19), strict=True)
)


class Pair(NamedTuple):
    """A picture and its label file, relative to the data set's folder."""

    image: str
    mask: str


@dataclass(frozen=True)
class Rules:
    """How a data set is read: its files, what its stored labels become, and its scales (width and height)."""

    list_pairs: Callable[[Path, DomainSpec], list[Pair]]
    table: Mask
    native: tuple[int, int]
    squash: tuple[int, int] = (224, 224)
    palette: tuple[str, ...] = ()


@dataclass(frozen=True)
class FileMasks:
    """Label files below `folder`; `table` (256,) says what each stored label becomes."""

    folder: Path
    names: tuple[str, ...]
    table: Mask

    def __len__(self) -> int:
        return len(self.names)

    def read(self, index: int) -> Mask:
        labels: Mask = self.table[read_mask(self.folder / self.names[index])]
        return labels

    def digest(self) -> str:
        listing = hash_listing((name, (self.folder / name).stat().st_size) for name in self.names)
        return hash_texts((listing, hash_pixels(self.table)))


@dataclass(frozen=True, eq=False, kw_only=True)
class PixelDataset(Dataset):
    """One split, sized by a protocol. `labels` has no meaning: `mask` gives those of a picture's pixels.

    `images` and `masks` are at the size of the files.
    """

    masks: FileMasks
    protocol: PixelProtocol
    palette: NDArray[np.uint8]  # (classes, 3)

    def image(self, index: int) -> NDArray[np.uint8]:
        """Picture `index` as a network gets it, uint8 (h, w, 3)."""
        return self.protocol.resize_image(self.images.read(index))

    def mask(self, index: int) -> Mask:
        """The labels of picture `index` at the size at which they are scored, uint8 (h, w)."""
        mask = self.masks.read(index)
        highest = mask[mask != IGNORED].max(initial=0)
        if highest >= len(self.class_names):
            raise DataError(
                f"the label file {self.masks.folder / self.masks.names[index]} has the label {highest}; "
                f"{self.name} has the labels 0..{len(self.class_names) - 1} and {IGNORED}"
            )
        return self.protocol.resize_mask(mask)

    def with_images(self, images: Images, *, domain: str, severity: int | None) -> PixelDataset:
        """The same labels under other pictures, as corrupted ones."""
        return replace(self, images=images, domain=domain, severity=severity)

    def renumber(self, outputs: NDArray[np.int64], names: tuple[str, ...]) -> PixelDataset:
        """The data set with label i as `outputs[i]`, under the class names of a network, colors included."""
        table, palette = lookup_table(dict(enumerate(outputs.tolist()))), np.zeros_like(self.palette)
        palette[outputs] = self.palette
        masks = replace(self.masks, table=table[self.masks.table])
        return replace(self, masks=masks, palette=palette, class_names=names)

    @cached_property
    def fingerprint(self) -> str:
        """A sha256 over names and sizes of the files, the rules for labels, and the protocol."""
        return hash_texts((self.images.digest(), self.masks.digest(), repr(self.protocol)))


def open_pixels(
    spec: DatasetSpec,
    folder: Path,
    split: str | None,
    *,
    limit: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> PixelDataset:
    """One split of a data set in `folder`; `options`: the `protocol`, and the `scale` (width and height) of it."""
    rules = rules_of(spec)
    domain = _split_of(spec, folder, split)
    pairs = rules.list_pairs(folder, domain)
    if not pairs:
        raise DataError(f"{folder} has no pictures of {spec.name}/{domain.name}; it wants {spec.wanted}")
    chosen = np.arange(len(pairs)) if limit is None else np.arange(min(limit, len(pairs))) * len(pairs) // limit
    names, colors = classes_of(spec, folder)
    kept = [pairs[i] for i in chosen]
    return PixelDataset(
        name=spec.name,
        domain=domain.name,
        images=FileImages(folder, tuple(pair.image for pair in kept)),
        labels=np.zeros(len(kept), dtype=np.int64),
        class_names=names,
        masks=FileMasks(folder, tuple(pair.mask for pair in kept), rules.table),
        protocol=_protocol(rules, options or {}),
        palette=colors,
    )


def _protocol(rules: Rules, options: Mapping[str, Any]) -> PixelProtocol:
    if unknown := [name for name in options if name not in ("protocol", "scale")]:
        raise ConfigError(f"there is no option {unknown[0]}; {did_you_mean(unknown[0], ('protocol', 'scale'))}")
    found = find_protocol(options.get("protocol", "squash"), native=rules.native, squash=rules.squash)
    scale = options.get("scale")
    if scale is None:
        return found
    if not (isinstance(scale, list | tuple) and len(scale) == 2 and all(type(s) is int and s > 0 for s in scale)):
        raise ConfigError(f"scale is {scale!r}; give a width and a height, as (224, 224)")
    return replace(found, scale=(scale[0], scale[1]))


def classes_of(spec: DatasetSpec, folder: Path) -> tuple[tuple[str, ...], NDArray[np.uint8]]:
    """Names and colors (classes, 3): of a known data set, or of the classes.txt of a folder."""
    if spec.class_names:
        return spec.class_names, _colors(rules_of(spec).palette)
    path = folder / CLASSES_FILE
    if not path.is_file():
        raise DataError(f"{folder} has no {CLASSES_FILE}; write the names of its classes there, one per line from 0 on")
    names = tuple(line.strip() for line in read_text(path, error=DataError).splitlines() if line.strip())
    if not 1 <= len(names) <= MOST_CLASSES or len(set(names)) != len(names):
        raise DataError(f"{path} has {len(names)} names; give 1 to {MOST_CLASSES} different ones, one per line")
    return names, _colors(distinct_colors(len(names)))


def _colors(palette: tuple[str, ...]) -> NDArray[np.uint8]:
    return np.array([[int(color[i : i + 2], 16) for i in (0, 2, 4)] for color in palette], dtype=np.uint8)


def distinct_colors(count: int) -> tuple[str, ...]:
    """Pascal VOC's rule, from the second color on: the bits of a number spread over red, green and blue."""
    colors = []
    for number in range(1, count + 1):
        channels = [sum((number >> (3 * bit + k) & 1) << (7 - bit) for bit in range(3)) for k in range(3)]
        colors.append("".join(f"{channel:02x}" for channel in channels))
    return tuple(colors)


# which splits there are, and their files


def splits_of(spec: DatasetSpec, folder: Path) -> tuple[DomainSpec, ...]:
    """The splits of which `folder` has pictures."""
    rules = rules_of(spec)
    known = spec.domains or tuple(DomainSpec(name, 0) for name in _own_splits(folder))
    return tuple(split for split in known if rules.list_pairs(folder, split))


def holds_pixels(spec: DatasetSpec, folder: Path) -> bool:
    """Whether the files of the data set, or some of them, lie in `folder`."""
    return bool(splits_of(spec, folder))


def _split_of(spec: DatasetSpec, folder: Path, name: str | None) -> DomainSpec:
    splits = spec.domains or splits_of(spec, folder)
    wanted = next((s.name for s in splits if s.target), None) if name is None else name
    for split in splits:
        if wanted is not None and wanted.lower() in (split.name, *split.folders):
            return split
    names = [split.name for split in splits]
    raise ConfigError(f"{spec.name} has no split {name!r}; {did_you_mean(name or '', names)}")


def _own_splits(folder: Path) -> list[str]:
    inner = sorted(p.name for p in (folder / "images").iterdir() if p.is_dir()) if (folder / "images").is_dir() else []
    return [name for name in inner if (folder / "masks" / name).is_dir()] or [ONLY_SPLIT]


def _listed(images: str, masks: str, lists: str) -> Callable[[Path, DomainSpec], list[Pair]]:
    """Files named in a list, as Pascal VOC has them."""

    def list_pairs(folder: Path, split: DomainSpec) -> list[Pair]:
        path = folder / lists / f"{split.name}.txt"
        if not path.is_file() or not (folder / masks).is_dir():
            return []
        ids = read_text(path, error=DataError).split()
        return [Pair(f"{images}/{name}.jpg", f"{masks}/{name}.png") for name in ids]

    return list_pairs


def _beside(images: str, masks: str) -> Callable[[Path, DomainSpec], list[Pair]]:
    """A folder of pictures and a folder of label files with the same names but for the suffix."""

    def list_pairs(folder: Path, split: DomainSpec) -> list[Pair]:
        for name in (split.name, *split.folders):
            part = "" if name == ONLY_SPLIT else name
            places = [text.format(split=part).rstrip("/") for text in (images, masks)]
            if all((folder / place).is_dir() for place in places):
                found = sorted(p.name for p in (folder / places[0]).iterdir() if is_image(p.name))
                return [Pair(f"{places[0]}/{f}", f"{places[1]}/{Path(f).stem}.png") for f in found]
        return []

    return list_pairs


def _list_cityscapes(folder: Path, split: DomainSpec) -> list[Pair]:
    found = sorted((folder / "leftImg8bit" / split.name).glob("*/*_leftImg8bit.png"))
    return [
        Pair(
            path.relative_to(folder).as_posix(),
            f"gtFine/{split.name}/{path.parent.name}/{path.name.replace('_leftImg8bit', '_gtFine_labelIds')}",
        )
        for path in found
    ]


_VOC = _listed("JPEGImages", "SegmentationClass", "ImageSets/Segmentation")
_CONTEXT = _listed("JPEGImages", "SegmentationClassContext", "ImageSets/SegmentationContext")
_STORED, _REDUCED = lookup_table(), lookup_table(reduce_zero=True)

_RULES: Mapping[str, Rules] = {
    "voc21": Rules(_VOC, _STORED, (2048, 512), palette=pixel_classes("voc").colors),
    "voc20": Rules(_VOC, _REDUCED, (2048, 512), palette=pixel_classes("voc").colors[1:]),
    "context59": Rules(_CONTEXT, _REDUCED, (520, 520), palette=pixel_classes("context").colors[1:]),
    "context60": Rules(_CONTEXT, _STORED, (520, 520), palette=pixel_classes("context").colors),
    "ade20k": Rules(
        _beside("images/{split}", "annotations/{split}"), _REDUCED, (2048, 512), palette=pixel_classes("ade20k").colors
    ),
    "cityscapes": Rules(
        _list_cityscapes,
        lookup_table(_TRAIN_IDS, only=True),
        (2048, 1024),
        squash=(1120, 560),
        palette=pixel_classes("cityscapes").colors,
    ),
    "camvid": Rules(
        _beside("{split}", "{split}annot"),
        lookup_table({11: IGNORED}),
        (240, 180),
        palette=pixel_classes("camvid").colors,
    ),
    OWN_MASKS: Rules(_beside("images/{split}", "masks/{split}"), _STORED, (2048, 512)),
}


def rules_of(spec: DatasetSpec) -> Rules:
    return _RULES[spec.name]
