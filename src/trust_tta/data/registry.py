"""The registry of data sets: classes, domains, layout on disk, number of images, license and homepage."""

from __future__ import annotations

import tomllib
from typing import Any, Literal, TypeAlias

from trust_tta import plugins
from trust_tta.config_io import read_asset
from trust_tta.data.class_matching import fold_name
from trust_tta.data.class_names import (
    CIFAR10_CLASSES,
    CIFAR100_CLASSES,
    PACS_CLASSES,
    imagenet_classes,
    segmentation_classes,
)
from trust_tta.data.corruptions.table import ALL_CORRUPTIONS, CORRUPTIONS
from trust_tta.errors import ConfigError
from trust_tta.schema import Schema, did_you_mean

DiskLayout: TypeAlias = Literal["cifar", "array-c", "folder-c", "domains", "segmentation", "python"]
"""cifar: clean arrays or official batches; array-c: `<corruption>.npy` + `labels.npy`;
folder-c: `<corruption>/<severity>/<class>/`; domains: `<domain>/<class>/`, or `<class>/` where there is one domain;
segmentation: images and masks; python: a class or function of a plugin."""

ClassFolders: TypeAlias = Literal["named", "wnid", "number-or-wnid", "sorted"]
"""named: one of the spec's class names; wnid: WordNet ids in the 1000; sorted: all folders, in order."""

GROUP: plugins.Group = "trust_tta.datasets"

_WANTED: dict[DiskLayout, str] = {
    "cifar": "test_images.npy and test_labels.npy, or the official Python batches",
    "array-c": "<corruption>.npy and labels.npy",
    "folder-c": "<corruption>/<severity>/<class>/<image>",
    "domains": "<domain>/<class>/<image>",
    "segmentation": "images and masks",
    "python": "files that its class reads",
}


class DomainSpec(Schema):
    """One domain: its number of images (at one severity), other names of its folder."""

    name: str
    images: int
    folders: tuple[str, ...] = ()
    target: bool = True  # evaluated by the benchmark; training sets and held-out corruptions are not

    def is_named(self, name: str) -> bool:
        """Whether `name` is a spelling of its name or of its folder's."""
        return fold_name(name) in {fold_name(known) for known in (self.name, *self.folders)}


class SegmentationSpec(Schema):
    """Paths of the images and masks of a split, the meaning of stored labels, and the scales.

    `palette`: a color for each class, as RRGGBB, empty where the classes are those on disk.
    """

    images: str
    masks: str
    lists: str = ""  # the folder of lists that name the files, where there are any
    reduce_zero: bool = False  # 0 is ignored and every other label decreases by one
    scored: tuple[int, ...] = ()  # the stored label of each class, all others ignored; empty: all labels are classes
    ignored: tuple[int, ...] = ()  # stored labels that are ignored
    native: tuple[int, int]  # width and height, as of `squash`
    squash: tuple[int, int] = (224, 224)
    protocol: Literal["squash", "native"] = "squash"  # unless another is asked for
    palette: tuple[str, ...] = ()


class DatasetSpec(Schema):
    """One data set; folder names are compared by `fold_name`. Without `domains`: those that are on disk."""

    name: str
    layout: DiskLayout
    class_folders: ClassFolders = "named"
    class_names: tuple[str, ...] = ()  # empty: those on disk
    domains: tuple[DomainSpec, ...] = ()
    license: str
    homepage: str
    folders: tuple[str, ...] = ()
    nested: tuple[str, ...] = ()  # folders that some copies put between the data set and its content
    imagenet_r: bool = False  # has ImageNet-R's 200 classes only
    files: str = ""  # description for messages, where the layout does not give it
    segmentation: SegmentationSpec | None = None

    @property
    def classes(self) -> int:
        """The number of classes, 0 where the folders on disk decide."""
        return len(self.class_names)

    @property
    def targets(self) -> tuple[str, ...]:
        """The names of the target domains, in the field's order."""
        return tuple(domain.name for domain in self.domains if domain.target)

    @property
    def wanted(self) -> str:
        """The files of the data set, for messages."""
        return self.files or _WANTED[self.layout]

    @property
    def folder_names(self) -> set[str]:
        """The names of its folder, folded."""
        return {fold_name(name) for name in self.folders}

    @property
    def has_severities(self) -> bool:
        return self.layout in ("array-c", "folder-c")


def find_spec(name: str) -> DatasetSpec:
    """The data set called `name`: one of ours in any spelling, an installed one, or "package.module:Name"."""
    for spec in DATASETS:
        if isinstance(name, str) and fold_name(spec.name) == fold_name(name):
            return spec
    plugins.resolve(name, {spec.name: spec for spec in DATASETS}, group=GROUP)
    return DatasetSpec(
        name=name,
        layout="python",
        class_folders="sorted",
        license="stated by its package",
        homepage="an installed package or a module of yours",
    )


def find_domain(spec: DatasetSpec, name: str | None) -> DomainSpec:
    """The domain called `name`, in any spelling; None: the only target domain."""
    targets = [domain for domain in spec.domains if domain.target]
    if name is None and len(targets) == 1:
        return targets[0]
    for domain in spec.domains:
        if name is not None and domain.is_named(name):
            return domain
    if name is None:
        raise ConfigError(f"{spec.name} has several domains; choose one of {', '.join(d.name for d in spec.domains)}")
    raise ConfigError(f"{spec.name} has no domain {name!r}; {did_you_mean(name, [d.name for d in spec.domains])}")


def _complete(name: str) -> dict[str, Any]:
    """The table of a data set, with missing fields taken from the data set it is `like`."""
    table = dict(_TABLES[name])
    origin = _complete(table.pop("like")) if "like" in table else {}
    if "segmentation" in origin:
        table["segmentation"] = {**origin["segmentation"], **table.get("segmentation", {})}
    return {**origin, **table}


def _fields(table: dict[str, Any]) -> dict[str, Any]:
    """The fields of a spec, with the names of class and corruption lists replaced by the lists."""
    classes, first = table.pop("classes", None), 0 if table.pop("background", True) else 1
    if classes in _CLASSES:
        table["class_names"] = _CLASSES[classes]
    elif classes is not None:
        colors = segmentation_classes(classes)
        table["class_names"] = tuple(colors)[first:]
        table["segmentation"] = {**table["segmentation"], "palette": tuple(colors.values())[first:]}
    if (images := table.pop("corrupted", None)) is not None:
        table["domains"] = [{"name": c, "images": images, "target": c in CORRUPTIONS} for c in ALL_CORRUPTIONS]
    return table


_CLASSES = {
    "cifar10": CIFAR10_CLASSES,
    "cifar100": CIFAR100_CLASSES,
    "pacs": PACS_CLASSES,
    "imagenet": tuple(c.name for c in imagenet_classes()),
}
_TABLES = tomllib.loads(read_asset("datasets.toml"))
DATASETS = tuple(DatasetSpec(name=name, **_fields(_complete(name))) for name in _TABLES)
