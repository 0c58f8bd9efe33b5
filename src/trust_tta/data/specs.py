"""The data sets we know, as data: classes, domains, layout on disk, counts, license and homepage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from trust_tta import plugins
from trust_tta.data.classes import CIFAR10_CLASSES, CIFAR100_CLASSES, PACS_CLASSES, fold_name, imagenet_classes
from trust_tta.data.corruptions.table import CORRUPTIONS, EXTRA_CORRUPTIONS
from trust_tta.errors import ConfigError
from trust_tta.schema import did_you_mean

DiskLayout: TypeAlias = Literal["cifar", "array-c", "folder-c", "domains", "python"]
"""cifar: clean arrays or official batches; array-c: `<corruption>.npy` + `labels.npy`;
folder-c: `<corruption>/<severity>/<class>/`; domains: `<domain>/<class>/`, or `<class>/` where there is one domain;
python: whatever an object from outside the package reads."""

ClassFolders: TypeAlias = Literal["named", "wnid", "number-or-wnid", "sorted"]
"""named: one of the spec's class names; wnid: WordNet ids in the 1000; sorted: whatever is there, in order."""

GROUP: plugins.Group = "trust_tta.datasets"

_WANTED: dict[DiskLayout, str] = {
    "cifar": "test_images.npy and test_labels.npy, or the official Python batches",
    "array-c": "<corruption>.npy and labels.npy",
    "folder-c": "<corruption>/<severity>/<class>/<image>",
    "domains": "<domain>/<class>/<image>",
    "python": "whatever its class reads",
}
_NO_LICENSE = "none stated; cite the authors"
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
        return _WANTED[self.layout]

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
)
