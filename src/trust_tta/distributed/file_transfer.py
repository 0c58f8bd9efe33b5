"""Send small files to workers of a cluster that lack them, once, through its object store."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from trust_tta.atomic import write_whole
from trust_tta.bench.config import RunConfig
from trust_tta.bench.experiment import ExperimentPlan

MAX_BYTES = 64 << 20  # bytes of an experiment's files that are sent; larger data must be on every node


@dataclass(frozen=True, eq=False)
class FileBundle:
    """Files by their absolute path on the machine that sends them."""

    files: Mapping[str, bytes] = field(default_factory=dict)

    def resolve(self, path: Path, folder: Path) -> Path:
        """The path if it exists or is not in the bundle, else the bundle's copy, unpacked in `folder`."""
        if path.exists():
            return path
        inside = {name: content for name, content in self.files.items() if path in (Path(name), *Path(name).parents)}
        for name, content in inside.items():
            target = _below(folder, Path(name))
            if not target.exists():
                write_whole(target, content)
        return _below(folder, path) if inside else path

    def unpack(self, config: RunConfig, plan: ExperimentPlan) -> tuple[RunConfig, ExperimentPlan]:
        """The experiment with this machine's paths."""
        names = hashlib.sha256("\n".join(sorted(self.files)).encode()).hexdigest()[:16]
        folder = Path(tempfile.gettempdir()) / f"trust-tta-{os.getuid() if hasattr(os, 'getuid') else 0}-{names}"
        return _with_paths(config, plan, lambda path: self.resolve(path, folder))


def with_absolute_paths(config: RunConfig, plan: ExperimentPlan) -> tuple[RunConfig, ExperimentPlan]:
    """The experiment with paths that hold in a process that runs in another folder."""
    return _with_paths(config, plan, lambda path: Path(os.path.abspath(path)))


def _with_paths(
    config: RunConfig, plan: ExperimentPlan, change: Callable[[Path], Path]
) -> tuple[RunConfig, ExperimentPlan]:
    data = config.data
    given = {name: getattr(data, name) for name in ("root", "images", "labels")}
    changed = data.changed(**{name: path and str(change(Path(path))) for name, path in given.items()})
    checkpoints = {d: replace(c, file=c.file and change(c.file)) for d, c in plan.checkpoints.items()}
    return config.changed(data=changed), replace(plan, checkpoints=checkpoints)


def pack(config: RunConfig, plan: ExperimentPlan) -> FileBundle:
    """The files of an experiment with absolute paths: each source as a whole, up to MAX_BYTES."""
    data, files, room = config.data, dict[str, bytes](), MAX_BYTES
    given = (Path(path) for path in (data.images, data.labels) if path)
    checkpoints = (checkpoint.file for checkpoint in plan.checkpoints.values() if checkpoint.file)
    for source in dict.fromkeys([*checkpoints, *given, Path(data.root)]):
        found = _files_of(source, room)
        if found is not None:
            files |= {str(path): path.read_bytes() for path in found}
            room -= sum(len(files[str(path)]) for path in found)
    return FileBundle(files)


def _files_of(source: Path, room: int) -> list[Path] | None:
    """A file, or all files of a folder; None if they are missing or need more than `room` bytes."""
    found: list[Path] = []
    for path in _walk(source):
        room -= path.stat().st_size
        if room < 0:
            return None
        found.append(path)
    return found or None


def _walk(source: Path) -> Iterator[Path]:
    if source.is_file():
        yield source
    for folder, _, names in os.walk(source):  # nothing, where it is no folder
        yield from (path for path in (Path(folder) / name for name in sorted(names)) if path.is_file())


def _below(folder: Path, path: Path) -> Path:
    return folder.joinpath(*path.parts[1:])
