"""Find and open data sets by name; folder names may differ in spelling and nesting."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trust_tta import plugins
from trust_tta.data.arrays import CIFAR_ARRAYS, OFFICIAL_BATCHES, open_cifar, open_corrupted
from trust_tta.data.class_matching import fold_name, imagenet_r_labels, spelling_variants
from trust_tta.data.class_names import imagenet_classes, label_of_wnid
from trust_tta.data.corruptions.table import SEVERITIES
from trust_tta.data.dataset import Dataset, FileImages, python_dataset
from trust_tta.data.images import is_image, list_images, subfolders
from trust_tta.data.registry import DATASETS, GROUP, DatasetSpec, DomainSpec, find_domain, find_spec
from trust_tta.data.segmentation import list_splits, open_segmentation
from trust_tta.errors import ConfigError, DataError
from trust_tta.schema import did_you_mean

ONLY_DOMAIN = "all"
"""The name of the domain of a data set without domains."""

_GROUPS = ("noise", "blur", "weather", "digital", "extra")  # the archives that ImageNet-C comes in


def open_dataset(
    name: str,
    root: Path | str,
    *,
    domain: str | None = None,
    severity: int = 5,
    options: Mapping[str, Any] | None = None,
) -> Dataset:
    """One domain of the data set `name`, found under `root` or in `root` itself.

    `domain` may be omitted where there is only one; `severity` counts for corrupted sets only; `options` are the
    arguments of a plugin data set, or for segmentation the `protocol` ("squash" or "native") and its `scale`.
    """
    spec = find_spec(name)
    _check_request(spec, severity, options)
    if spec.layout == "python":
        content, plugin = _load_plugin(spec, Path(root), options)
        chosen = _choose_domain(domain, tuple(plugin), where=spec.name)
        return python_dataset(content, plugin[chosen], name=spec.name, domain=chosen)
    if spec.layout == "segmentation":
        return open_segmentation(spec, locate(spec, Path(root)), domain, options=options)
    if not spec.domains:
        domains = generic_domains(locate(spec, Path(root)))
        chosen = _choose_domain(domain, tuple(domains), where=root)
        return open_folder(spec, domains[chosen], chosen)
    known = find_domain(spec, domain)
    folder = locate(spec, Path(root))
    if spec.layout == "cifar":
        return open_cifar(spec, folder, known.name)
    if spec.layout == "array-c":
        return open_corrupted(spec, folder, known.name, severity=severity)
    place = domain_folder(spec, folder, known)
    if place is None:
        here = ", ".join(available_domains(name, root)) or "none"
        raise DataError(f"{folder} has no domain {known.name}; it has {here}")
    if spec.layout == "domains":
        return open_folder(spec, place, known.name)
    if not (place / str(severity)).is_dir():
        raise DataError(f"{place} has no severity {severity}; it must hold a folder named {severity}")
    return open_folder(spec, place / str(severity), known.name, severity=severity)


def _check_request(spec: DatasetSpec, severity: int, options: Mapping[str, Any] | None) -> None:
    if spec.has_severities and severity not in SEVERITIES:
        raise ConfigError(f"severity is {severity}; choose one of {', '.join(map(str, SEVERITIES))}")
    if options and spec.layout not in ("python", "segmentation"):
        raise ConfigError(f"{spec.name} takes no options, but {', '.join(options)} is given; omit it")


def available_domains(
    name: str, root: Path | str, *, options: Mapping[str, Any] | None = None, held_out: bool = False
) -> tuple[str, ...]:
    """The target domains of the data set that are on disk, in the field's order; `held_out`: all its domains."""
    spec = find_spec(name)
    if spec.layout == "python":
        return tuple(_load_plugin(spec, Path(root), options)[1])
    folder = locate(spec, Path(root))
    if spec.layout == "segmentation":
        return tuple(split.name for split in list_splits(spec, folder) if split.target or held_out)
    if not spec.domains:
        return tuple(generic_domains(folder))
    targets = [domain for domain in spec.domains if domain.target or held_out]
    if spec.layout == "array-c":
        return tuple(domain.name for domain in targets if (folder / f"{domain.name}.npy").is_file())
    if spec.layout == "cifar":
        return tuple(domain.name for domain in targets)
    return tuple(domain.name for domain in targets if domain_folder(spec, folder, domain) is not None)


# image folders


def open_folder(spec: DatasetSpec, folder: Path, domain: str, *, severity: int | None = None) -> Dataset:
    """One domain from its class folders."""
    labels_of, class_names = class_map(spec, folder, domain)
    names: list[str] = []
    labels: list[int] = []
    for class_folder, label in sorted(labels_of.items(), key=lambda item: (item[1], item[0])):
        files = list_images(folder / class_folder)
        names += [f"{class_folder}/{file}" for file in files]
        labels += [label] * len(files)
    if not names:
        raise DataError(f"{folder} has no images; {spec.name} wants them as {domain}/<class>/<image>")
    return Dataset(
        name=spec.name,
        domain=domain,
        images=FileImages(folder, tuple(names)),
        labels=np.array(labels, dtype=np.int64),
        class_names=class_names,
        severity=severity,
        class_mask=imagenet_r_labels() if spec.imagenet_r else None,
    )


def class_map(spec: DatasetSpec, folder: Path, domain: str) -> tuple[dict[str, int], tuple[str, ...]]:
    """The label of each class folder, and the names of all classes: of the data set, or of all its domains."""
    found = [child.name for child in subfolders(folder)]
    if not found:
        raise DataError(f"{folder} has no class folders; sort the images into one folder for each class")
    if spec.class_folders == "sorted":
        names = _all_classes(spec, folder, domain, found)
        return {name: label for label, name in enumerate(names) if name in found}, names
    labels = {name: class_label(spec, name) for name in found}
    if unknown := [name for name, label in labels.items() if label is None]:
        allowed = ", ".join(spec.class_names)
        if spec.class_folders != "named":
            allowed = "its 200 WordNet ids" if spec.imagenet_r else "the 1000 WordNet ids of ILSVRC 2012, as n01440764"
            allowed += ", or the numbers 0..999" if spec.class_folders == "number-or-wnid" else ""
        raise DataError(f"{folder / unknown[0]} is not a class of {spec.name}; allowed are {allowed}")
    return {name: label for name, label in labels.items() if label is not None}, spec.class_names


def _all_classes(spec: DatasetSpec, folder: Path, domain: str, found: list[str]) -> tuple[str, ...]:
    """The classes of all domains in order; two spellings of one class are refused."""
    siblings: list[Path] = []
    if domain != ONLY_DOMAIN and spec.layout == "domains":
        siblings = list(generic_domains(folder.parent).values())
    elif domain != ONLY_DOMAIN:  # <corruption>/<severity>/<class>
        levels = (level for corruption in subfolders(folder.parent.parent) for level in subfolders(corruption))
        siblings = [level for level in levels if level.name.isdecimal()]
    names = set(found)
    for sibling in siblings:
        others = [child.name for child in subfolders(sibling)]
        if misses := spelling_variants(found, others):
            ours, theirs = misses[0]
            raise DataError(
                f"the class '{ours}' of {folder} is spelled '{theirs}' in {sibling}; rename one of them "
                f"({folder.name} has {', '.join(found)}; {sibling.name} has {', '.join(others)})"
            )
        names.update(others)
    return tuple(sorted(names, key=int) if all(name.isdecimal() for name in names) else sorted(names))


def class_label(spec: DatasetSpec, name: str) -> int | None:
    """The label of a class folder called `name`; None if the data set has no such class."""
    if spec.class_folders == "named":
        return {fold_name(known): label for label, known in enumerate(spec.class_names)}.get(fold_name(name))
    if spec.class_folders == "number-or-wnid" and name.isdecimal():
        return int(name) if len(name) < 8 and int(name) < spec.classes else None
    label = label_of_wnid().get(name.lower())
    if spec.imagenet_r and label is not None and not imagenet_classes()[label].rendition:
        return None
    return label


def _choose_domain(domain: str | None, domains: tuple[str, ...], *, where: object) -> str:
    if domain is None and len(domains) == 1:
        return domains[0]
    if domain is None or domain not in domains:
        raise ConfigError(f"{where} has no domain {domain!r}; {did_you_mean(domain or '', domains)}")
    return domain


# locating data sets on disk


def find_dataset(spec: DatasetSpec, root: Path) -> Path | None:
    """The folder under `root`, or `root` itself, that holds the content of the data set."""
    if not spec.folders:
        return root if _holds(spec, root) else None
    candidates = [child for child in subfolders(root) if fold_name(child.name) in spec.folder_names]
    others = set[str]().union(*(other.folder_names for other in DATASETS if other is not spec))
    if fold_name(root.resolve().name) not in others - spec.folder_names:
        candidates.append(root)
    nested = {fold_name(name) for name in spec.nested}
    seen: set[Path] = set()
    while candidates:  # depth first, through known nestings only
        candidate = candidates.pop(0)
        if _holds(spec, candidate):
            return candidate
        if (place := candidate.resolve()) not in seen:  # folders may link to each other
            seen.add(place)
            candidates[:0] = [child for child in subfolders(candidate) if fold_name(child.name) in nested]
    return None


def locate(spec: DatasetSpec, root: Path) -> Path:
    """The folder that holds the data set; raises DataError if there is none."""
    if not root.is_dir():
        raise DataError(f"{root} is not a folder; give the folder that holds your data sets")
    found = find_dataset(spec, root)
    if found is None:
        name = f" in a folder named {' or '.join(spec.folders)}" if spec.folders else ""
        raise DataError(f"{spec.name} is not in {root}: it wants {spec.wanted}{name}; get it from {spec.homepage}")
    return found


def domain_folder(spec: DatasetSpec, folder: Path, domain: DomainSpec) -> Path | None:
    """Folder that holds the domain's class folders or severities."""
    children = subfolders(folder)
    if spec.layout == "folder-c":
        children += [inner for child in children if child.name.lower() in _GROUPS for inner in subfolders(child)]
    for child in children:
        if domain.is_named(child.name):
            return child
    if spec.layout != "domains" or spec.class_folders == "named" or not _has_classes(spec, folder):
        return None
    # The folder is a domain itself: the one of its name, or the first.
    named = [other for other in spec.domains if other.is_named(folder.name)]
    return folder if domain == (named or spec.domains)[0] else None


def generic_domains(folder: Path) -> dict[str, Path]:
    """The domains of a generic image folder: its subfolders where these hold folders, else the folder as a whole."""
    children = subfolders(folder)
    if any(has_images(child) for child in children):
        return {ONLY_DOMAIN: folder}
    return {child.name: child for child in children if any(has_images(inner) for inner in subfolders(child))}


def has_images(folder: Path) -> bool:
    """Whether `folder` itself holds an image file."""
    try:
        with os.scandir(folder) as entries:
            return any(is_image(entry.name) for entry in entries)
    except OSError:
        return False


def _holds(spec: DatasetSpec, folder: Path) -> bool:
    """Whether `folder` itself holds the content of the data set, or some of it."""
    if spec.layout == "cifar":
        official = (name for names in OFFICIAL_BATCHES[spec.name].values() for name in names)
        return any((folder / name).is_file() for name in (*CIFAR_ARRAYS, *official))
    if spec.layout == "array-c":
        return any((folder / f"{domain.name}.npy").is_file() for domain in spec.domains)
    if spec.layout == "segmentation":
        return bool(list_splits(spec, folder))
    if not spec.domains:
        return bool(generic_domains(folder))
    found = [place for domain in spec.domains if (place := domain_folder(spec, folder, domain)) is not None]
    if spec.layout == "folder-c":
        found = [level for place in found for level in subfolders(place) if level.name.isdecimal()]
    return any(_has_classes(spec, place) for place in found)


def _has_classes(spec: DatasetSpec, folder: Path) -> bool:
    children = subfolders(folder)
    if spec.class_folders == "sorted":
        return bool(children)
    return any(class_label(spec, child.name) is not None for child in children)


# plugin data sets


def _load_plugin(
    spec: DatasetSpec, root: Path, options: Mapping[str, Any] | None
) -> tuple[Any, dict[str, NDArray[np.int64]]]:
    """A plugin data set, and the indices of each domain's images, in the order in which domains first appear."""
    plain = ((key, tuple(value) if isinstance(value, list) else value) for key, value in (options or {}).items())
    content = _make_plugin(spec.name, root, tuple(plain))
    given = getattr(content, "domains", None)
    if given is None:
        return content, {ONLY_DOMAIN: np.arange(len(content.labels), dtype=np.int64)}
    names = np.array([str(name) for name in given])
    if len(names) != len(content.labels):
        raise DataError(
            f"{spec.name} has {len(names)} domains for {len(content.labels)} labels; give one name for each image"
        )
    return content, {name: np.flatnonzero(names == name) for name in dict.fromkeys(names.tolist())}


@lru_cache(maxsize=2)  # the domains of one experiment come out of one object
def _make_plugin(name: str, root: Path, options: tuple[tuple[str, Any], ...]) -> Any:
    make = plugins.resolve(name, {}, group=GROUP)
    if not callable(make):
        raise ConfigError(f"the data set '{name}' is a {type(make).__name__}; give a class or a function of a folder")
    try:
        content = make(root, **dict(options))
    except TypeError as error:
        raise ConfigError(f"the data set '{name}' cannot be made from a folder and {dict(options)}: {error}") from error
    lacking = [field for field in ("images", "labels", "class_names") if not hasattr(content, field)]
    if lacking:
        raise DataError(f"the data set '{name}' has no {' and no '.join(lacking)}; see docs/guides/adding_a_dataset.md")
    return content
