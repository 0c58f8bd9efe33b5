"""Checking data sets that are folders of images."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from PIL import Image

from trust_tta.data.download import Progress
from trust_tta.data.findings import Finding, Level
from trust_tta.data.imagenet import rendition_mask
from trust_tta.data.images import is_image, list_images, read_image
from trust_tta.data.locate import class_label, subfolders
from trust_tta.data.specs import DatasetSpec

_THREADS = 4
_CHUNK = 256


def check_domain(
    spec: DatasetSpec,
    folder: Path,
    domain: str,
    images: int,
    *,
    thorough: bool,
    progress: Progress | None,
) -> Iterator[Finding]:
    """The class folders of one domain and every image in them; `images` is the number expected, 0 for any."""
    say = partial(_finding, spec)
    problems = [say(level, path, message) for level, path, message in _structure(spec, folder)]
    files = []
    for class_folder in _class_folders(spec, folder):
        names = list_images(class_folder)
        files += [class_folder / name for name in names]
        if not names:
            problems.append(say("error", class_folder, "this class has no images"))
    if images and len(files) != images:
        problems.append(say("error", folder, f"holds {len(files)} images; the whole domain has {images}"))
    inspect = read_image if thorough else _open_header
    note = f"checking {spec.name}/{domain}"
    problems += [say("error", path, message) for path, message in _broken(files, inspect, note, progress)]
    yield from problems
    if not any(problem.level == "error" for problem in problems):
        yield say("ok", folder, f"{len(files)} images in {len(_class_folders(spec, folder))} classes")


def _finding(spec: DatasetSpec, level: Level, path: Path, message: str) -> Finding:
    return Finding(level, spec.name, path, message)


def _class_folders(spec: DatasetSpec, folder: Path) -> list[Path]:
    """The class folders that the data set knows."""
    generic = spec.class_folders == "sorted"
    return [child for child in subfolders(folder) if generic or class_label(spec, child.name) is not None]


def _structure(spec: DatasetSpec, folder: Path) -> Iterator[tuple[Level, Path, str]]:
    """Unknown and missing classes, images outside of classes, files that are no images."""
    classes = _class_folders(spec, folder)
    for child in subfolders(folder):
        if child not in classes:
            yield "error", child, f"is no class of {spec.name}"
    loose = list_images(folder)
    if loose:
        yield "error", folder, f"{len(loose)} images lie outside of class folders, as {loose[0]}"
    found = {class_label(spec, child.name) for child in classes}
    expected = [] if spec.class_folders == "sorted" else _expected_classes(spec)
    if missing := [label for label in expected if label not in found]:
        names = ", ".join(spec.class_names[label] for label in missing[:5])
        yield "warning", folder, f"{len(missing)} of {len(expected)} classes have no folder, as {names}"
    for child in classes:
        with os.scandir(child) as entries:
            strange = sorted(e.name for e in entries if not is_image(e.name) and not e.name.startswith("."))
        if strange:
            yield "warning", child, f"{len(strange)} files are no images and are skipped, as {strange[0]}"


def _expected_classes(spec: DatasetSpec) -> list[int]:
    return rendition_mask().tolist() if spec.renditions else list(range(spec.classes))


def _broken(
    files: Sequence[Path], inspect: Callable[[Path], object], note: str, progress: Progress | None
) -> Iterator[tuple[Path, str]]:
    """The files that `inspect` refuses, and why."""
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="check") as executor:
        for start in range(0, len(files), _CHUNK):
            chunk = files[start : start + _CHUNK]
            for path, problem in zip(chunk, executor.map(partial(_problem, inspect), chunk), strict=True):
                if problem is not None:
                    yield path, problem
            if progress is not None:
                progress(note, start + len(chunk), len(files))


def _problem(inspect: Callable[[Path], object], path: Path) -> str | None:
    try:
        inspect(path)
    except Exception as error:  # decoders raise whatever they stumble over
        return f"cannot be read: {error.__cause__ or error}"
    return None


def _open_header(path: Path) -> None:
    with Image.open(path):
        pass
