"""Checking a data root: what is there, what is missing, what is broken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trust_tta.data.check_arrays import check_cifar, check_corrupted
from trust_tta.data.check_folders import check_domain
from trust_tta.data.download import Progress
from trust_tta.data.findings import Finding
from trust_tta.data.locate import domain_folder, find_dataset, generic_domains, subfolders
from trust_tta.data.specs import DATASETS, DatasetSpec, find_spec, fold_name
from trust_tta.errors import DataError

_UNNAMED = ("cifar10", "pacs", "imagenet-c", "imagenet", "imagenet-v2", "array-c", "folder-c", "folder")
"""What a folder without a telling name may be, in the order in which it is tried."""


def check_root(root: Path | str, *, thorough: bool = False, progress: Progress | None = None) -> list[Finding]:
    """Look at every data set under `root`, or at `root` as a data set itself; broken data is reported, never raised.

    Every array's and every image's header is opened; with `thorough`, every pixel is read.
    """
    root = Path(root)
    if not root.is_dir():
        return [Finding("error", "", root, "is not a folder; give the folder that holds your data sets")]
    present = find_present(root)
    findings: list[Finding] = []
    for spec, folder in present:
        try:
            findings += _check_dataset(spec, folder, thorough=thorough, progress=progress)
        except (OSError, DataError) as error:
            findings.append(Finding("error", spec.name, folder, str(error)))
    if not present:
        names = ", ".join(spec.folders[0] for spec in DATASETS if spec.folders)
        findings.append(Finding("error", "", root, f"holds no data set; folders we know are {names}, in any spelling"))
    if not _is_itself(root, present):
        findings += _check_leftovers(root, present)
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
    found = ((spec, find_dataset(spec, root)) for spec in map(find_spec, _UNNAMED))
    return [(spec, folder) for spec, folder in found if folder is not None][:1]


def _is_itself(root: Path, present: list[tuple[DatasetSpec, Path]]) -> bool:
    """Whether `root` is a data set rather than a folder of data sets."""
    named = {fold_name(name) for spec, _ in present for name in spec.folders}
    return any(folder == root for _, folder in present) or fold_name(root.resolve().name) in named


def _check_dataset(spec: DatasetSpec, folder: Path, *, thorough: bool, progress: Progress | None) -> Iterator[Finding]:
    if spec.layout == "cifar":
        yield from check_cifar(spec, folder)
    elif spec.layout == "array-c":
        yield from check_corrupted(spec, folder, thorough=thorough, progress=progress)
    else:
        for domain, place, images in _domains(spec, folder):
            if place is None:
                yield Finding("warning", spec.name, folder / domain, "this domain is missing")
            else:
                yield from check_domain(spec, place, domain, images, thorough=thorough, progress=progress)


def _domains(spec: DatasetSpec, folder: Path) -> Iterator[tuple[str, Path | None, int]]:
    """Name, folder (None: missing) and expected number of images (0: any) of what should be in an image folder."""
    if not spec.parts:
        yield from ((name, place, 0) for name, place in generic_domains(folder).items())
    for part in spec.parts:
        place = domain_folder(spec, folder, part)
        levels = [place] if place is not None else []
        if spec.layout == "folder-c":
            levels = [level for child in levels for level in subfolders(child) if level.name.isdecimal()]
        for level in levels:
            yield part.name if level == place else f"{part.name}/{level.name}", level, part.images
        if not levels and (place is not None or (part.target and spec.folders)):
            yield part.name, None, part.images


def _check_leftovers(root: Path, present: list[tuple[DatasetSpec, Path]]) -> Iterator[Finding]:
    """Folders that belong to no data set or hold nothing of theirs, and the data sets that are not there."""
    names = {fold_name(name): spec for spec in DATASETS for name in spec.folders}
    for child in subfolders(root):
        spec = names.get(fold_name(child.name))
        if any(folder.is_relative_to(child) for _, folder in present):
            continue
        if spec is None:
            yield Finding("warning", "", child, "is no data set that we know; skipped")
        else:
            yield Finding("error", spec.name, child, f"has none of its files; {spec.name} wants {spec.wanted}")
    known = {spec.name for spec, _ in present}
    absent = [spec.name for spec in DATASETS if spec.folders and spec.name not in known]
    if absent:
        yield Finding("ok", "", root, f"not here: {', '.join(absent)}")
