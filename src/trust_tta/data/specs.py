"""The data sets we know, as data: classes, domains, layout on disk, counts, licence and source."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import resources
from typing import Literal, TypeAlias

from trust_tta.data.corruptions.table import CORRUPTIONS, EXTRA_CORRUPTIONS
from trust_tta.data.imagenet import imagenet_classes
from trust_tta.errors import ConfigError

Layout: TypeAlias = Literal["cifar", "array-c", "folder-c", "domains"]
"""cifar: clean arrays or official batches; array-c: `<corruption>.npy` + `labels.npy`;
folder-c: `<corruption>/<severity>/<class>/`; domains: `<domain>/<class>/`, or `<class>/` where there is one domain."""

ClassFolders: TypeAlias = Literal["named", "wnid", "number-or-wnid", "sorted"]
"""named: one of the spec's class names; wnid: WordNet ids in the 1000; sorted: whatever is there, in order."""

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR100_CLASSES = tuple(
    resources.files("trust_tta").joinpath("assets/cifar100_classes.txt").read_text(encoding="utf-8").split()
)
PACS_CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")

_WANTED: dict[Layout, str] = {
    "cifar": "test_images.npy and test_labels.npy, or the official Python batches",
    "array-c": "<corruption>.npy and labels.npy",
    "folder-c": "<corruption>/<severity>/<class>/<image>",
    "domains": "<domain>/<class>/<image>",
}
_NO_LICENCE = "none stated; cite the authors"
_RESEARCH = "non-commercial research, by ImageNet's terms of access"


@dataclass(frozen=True)
class DomainSpec:
    """One domain: its number of images (at one severity), the names its folder may have beside its own."""

    name: str
    images: int
    folders: tuple[str, ...] = ()
    target: bool = True  # part of the benchmark; training parts and held-out corruptions are not


@dataclass(frozen=True)
class DatasetSpec:
    """One data set; folder names are compared by `fold_name`. No `parts`: a generic one whose domains are on disk."""

    name: str
    layout: Layout
    class_folders: ClassFolders
    class_names: tuple[str, ...]  # empty: those on disk
    parts: tuple[DomainSpec, ...]
    licence: str
    source: str
    folders: tuple[str, ...] = ()
    nested: tuple[str, ...] = ()  # folders that some copies put between the data set and its content
    renditions: bool = False  # has ImageNet-R's 200 classes only

    @property
    def classes(self) -> int:
        """The number of classes, 0 where the folders on disk decide."""
        return len(self.class_names)

    @property
    def domains(self) -> tuple[str, ...]:
        """The target domains, in the field's order."""
        return tuple(part.name for part in self.parts if part.target)

    @property
    def wanted(self) -> str:
        """The files it consists of, in words."""
        return _WANTED[self.layout]

    @property
    def has_severities(self) -> bool:
        return self.layout in ("array-c", "folder-c")


def fold_name(name: str) -> str:
    """`name` without case, dashes, dots, underscores and spaces, so that all spellings of a folder compare equal."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def find_spec(name: str) -> DatasetSpec:
    """The data set called `name`, in any spelling."""
    for spec in DATASETS:
        if fold_name(spec.name) == fold_name(name):
            return spec
    raise ConfigError(f"unknown data set {name!r}; known are {', '.join(spec.name for spec in DATASETS)}")


def find_domain(spec: DatasetSpec, name: str | None) -> DomainSpec:
    """The domain called `name`, in any spelling; None stands for the only target there is."""
    targets = [part for part in spec.parts if part.target]
    if name is None and len(targets) == 1:
        return targets[0]
    for part in spec.parts:
        if name is not None and fold_name(name) in {fold_name(known) for known in (part.name, *part.folders)}:
            return part
    known = ", ".join(part.name for part in spec.parts)
    raise ConfigError(f"{spec.name} has no domain {name!r}; choose one of {known}")


def _corruptions(images: int) -> tuple[DomainSpec, ...]:
    held_out = tuple(DomainSpec(name, images, target=False) for name in EXTRA_CORRUPTIONS)
    return tuple(DomainSpec(name, images) for name in CORRUPTIONS) + held_out


def _cifar(name: str, class_names: tuple[str, ...], batches: str) -> DatasetSpec:
    return DatasetSpec(
        name=name,
        layout="cifar",
        class_folders="named",
        class_names=class_names,
        parts=(DomainSpec("test", 10_000), DomainSpec("train", 50_000, target=False)),
        licence=_NO_LICENCE,
        source="https://www.cs.toronto.edu/~kriz/cifar.html",
        folders=(name, batches),
        nested=(batches,),
    )


def _cifar_c(name: str, class_names: tuple[str, ...], record: int) -> DatasetSpec:
    return DatasetSpec(
        name=name,
        layout="array-c",
        class_folders="named",
        class_names=class_names,
        parts=_corruptions(10_000),
        licence="CC BY 4.0",
        source=f"https://zenodo.org/records/{record}",
        folders=(name,),
        nested=(name,),
    )


_IMAGENET_NAMES = tuple(c.name for c in imagenet_classes())

DATASETS = (
    _cifar("cifar10", CIFAR10_CLASSES, "cifar-10-batches-py"),
    _cifar("cifar100", CIFAR100_CLASSES, "cifar-100-python"),
    _cifar_c("cifar10-c", CIFAR10_CLASSES, 2535967),
    _cifar_c("cifar100-c", CIFAR100_CLASSES, 3555552),
    DatasetSpec(
        name="imagenet",
        layout="domains",
        class_folders="wnid",
        class_names=_IMAGENET_NAMES,
        parts=(
            DomainSpec("val", 50_000, folders=("validation", "ILSVRC2012_img_val")),
            DomainSpec("train", 1_281_167, folders=("ILSVRC2012_img_train",), target=False),
        ),
        licence=_RESEARCH,
        source="https://www.image-net.org/download.php",
        folders=("imagenet", "imagenet2012", "imagenet-1k", "ILSVRC2012", "ILSVRC"),
        nested=("Data", "CLS-LOC", "images"),
    ),
    DatasetSpec(
        name="imagenet-c",
        layout="folder-c",
        class_folders="wnid",
        class_names=_IMAGENET_NAMES,
        parts=_corruptions(50_000),
        licence="CC BY 4.0; the images by ImageNet's terms of access",
        source="https://zenodo.org/records/2235448",
        folders=("imagenet-c",),
        nested=("imagenet-c",),
    ),
    DatasetSpec(
        name="imagenet-sketch",
        layout="domains",
        class_folders="wnid",
        class_names=_IMAGENET_NAMES,
        parts=(DomainSpec("sketch", 50_889),),
        licence="MIT",
        source="https://github.com/HaohanWang/ImageNet-Sketch",
        folders=("imagenet-sketch", "imagenet-s"),
    ),
    DatasetSpec(
        name="imagenet-v2",
        layout="domains",
        class_folders="number-or-wnid",
        class_names=_IMAGENET_NAMES,
        parts=tuple(
            DomainSpec(name, 10_000, folders=(f"imagenetv2-{name}-format-val", f"imagenetv2-{name}"))
            for name in ("matched-frequency", "threshold0.7", "top-images")
        ),
        licence="MIT",
        source="https://huggingface.co/datasets/vaishaal/ImageNetV2",
        folders=("imagenet-v2",),
        nested=("imagenet-v2",),
    ),
    DatasetSpec(
        name="imagenet-r",
        layout="domains",
        class_folders="wnid",
        class_names=_IMAGENET_NAMES,
        parts=(DomainSpec("renditions", 30_000),),
        licence="MIT",
        source="https://github.com/hendrycks/imagenet-r",
        folders=("imagenet-r", "imagenet-rendition"),
        nested=("imagenet-r",),
        renditions=True,
    ),
    DatasetSpec(
        name="pacs",
        layout="domains",
        class_folders="named",
        class_names=PACS_CLASSES,
        parts=(
            DomainSpec("art_painting", 2048, folders=("art",)),
            DomainSpec("cartoon", 2344),
            DomainSpec("photo", 1670),
            DomainSpec("sketch", 3929),
        ),
        licence=_NO_LICENCE,
        source="https://domaingeneralization.github.io/#data",
        folders=("pacs", "pacs_data"),
        nested=("kfold", "pacs", "pacs_data", "images", "raw_images"),
    ),
    DatasetSpec(
        name="folder",
        layout="domains",
        class_folders="sorted",
        class_names=(),
        parts=(),
        licence="yours",
        source="any folder of `<class>/<image>` or `<domain>/<class>/<image>`",
    ),
    DatasetSpec(
        name="folder-c",
        layout="folder-c",
        class_folders="sorted",
        class_names=(),
        parts=_corruptions(0),
        licence="yours",
        source="an image folder put through `trust-tta corrupt`",
    ),
    DatasetSpec(
        name="array-c",
        layout="array-c",
        class_folders="named",
        class_names=(),
        parts=_corruptions(0),
        licence="yours",
        source="an image array put through `trust-tta corrupt`",
    ),
)
