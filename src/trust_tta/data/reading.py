"""Opening a data set by name."""

from __future__ import annotations

from pathlib import Path

from trust_tta.data.arrays import open_cifar, open_corrupted
from trust_tta.data.corruptions.table import SEVERITIES
from trust_tta.data.dataset import Dataset
from trust_tta.data.folders import open_folder
from trust_tta.data.locate import domain_folder, generic_domains, locate
from trust_tta.data.specs import DatasetSpec, find_domain, find_spec
from trust_tta.errors import ConfigError, DataError


def open_dataset(
    name: str, root: Path | str, *, domain: str | None = None, severity: int = 5, limit: int | None = None
) -> Dataset:
    """One domain of the data set `name`, found under `root` or in `root` itself.

    `domain` may be left out where there is only one; `severity` counts for corrupted sets only; `limit` takes the
    first images of an array, and images at even distances from folders.
    """
    spec = find_spec(name)
    if limit is not None and limit < 1:
        raise ConfigError(f"limit is {limit}; it must be a positive number of images, or None for all")
    if spec.has_severities and severity not in SEVERITIES:
        raise ConfigError(f"severity is {severity}; it must be one of {', '.join(map(str, SEVERITIES))}")
    if not spec.parts:
        return _open_generic(spec, Path(root), domain, limit=limit)
    part = find_domain(spec, domain)
    folder = locate(spec, Path(root))
    if spec.layout == "cifar":
        return open_cifar(spec, folder, part.name, limit=limit)
    if spec.layout == "array-c":
        return open_corrupted(spec, folder, part.name, severity=severity, limit=limit)
    place = domain_folder(spec, folder, part)
    if place is None:
        raise DataError(f"{folder} has no domain {part.name}; it has {_list(available_domains(name, root))}")
    if spec.layout == "domains":
        return open_folder(spec, place, part.name, limit=limit)
    if not (place / str(severity)).is_dir():
        raise DataError(f"{place} has no severity {severity}; it must hold a folder named {severity}")
    return open_folder(spec, place / str(severity), part.name, severity=severity, limit=limit)


def available_domains(name: str, root: Path | str) -> tuple[str, ...]:
    """The target domains of the data set that are on disk, in the field's order."""
    spec = find_spec(name)
    folder = locate(spec, Path(root))
    if not spec.parts:
        return tuple(generic_domains(folder))
    targets = [part for part in spec.parts if part.target]
    if spec.layout == "array-c":
        return tuple(part.name for part in targets if (folder / f"{part.name}.npy").is_file())
    if spec.layout == "cifar":
        return tuple(part.name for part in targets)
    return tuple(part.name for part in targets if domain_folder(spec, folder, part) is not None)


def _open_generic(spec: DatasetSpec, root: Path, domain: str | None, *, limit: int | None) -> Dataset:
    domains = generic_domains(locate(spec, root))
    if domain is None and len(domains) == 1:
        domain = next(iter(domains))
    if domain is None or domain not in domains:
        raise ConfigError(f"{root} has no domain {domain!r}; choose one of {_list(tuple(domains))}")
    return open_folder(spec, domains[domain], domain, limit=limit)


def _list(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "none"
