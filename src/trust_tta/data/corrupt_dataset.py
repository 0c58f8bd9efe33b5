"""Write corrupted copies of data sets: arrays in the layout of CIFAR-10-C, image folders in that of ImageNet-C."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from trust_tta.config_io import read_json
from trust_tta.data.arrays import LABELS, RECORD_NAME, open_array
from trust_tta.data.corruptions.apply import check_request, make_tasks, run_task
from trust_tta.data.corruptions.table import CORRUPTIONS, choose_table
from trust_tta.data.dataset import FileImages
from trust_tta.data.file_io import hash_array, write_npy, writing
from trust_tta.data.images import check_labels, check_pixels, check_size, find_images, read_image
from trust_tta.data.parallel import check_workers, map_in_order, worker_pool
from trust_tta.errors import ConfigError, DataError
from trust_tta.progress import SILENT, Progress
from trust_tta.schema import Schema, parse

PathLike: TypeAlias = str | os.PathLike[str]

_JPEG_QUALITY = 85  # as ImageNet-C was saved
_SHORT_SIDE = 256 / 224  # as ImageNet-C was cut: 224 pixels out of a short side of 256


def corrupt_array(
    source: PathLike | NDArray[np.uint8],
    out_dir: PathLike,
    *,
    labels: PathLike | NDArray[Any] | None = None,
    corruptions: Sequence[str] = CORRUPTIONS,
    severities: Sequence[int] = (5,),
    seed: int = 0,
    table: str | None = None,
    workers: int = 1,
    progress: Progress = SILENT,
) -> list[Path]:
    """Write `<corruption>.npy` for uint8 images (n, h, w, 3): one block of n for each severity, ascending.

    With labels (n,), `labels.npy` repeats them for each severity. Finished files of an earlier run with the same
    input and options are kept; any number of workers gives the same bytes. Returns the files.
    """
    images = source if isinstance(source, np.ndarray) else open_array(Path(source))
    check_pixels(images, "images are")
    if len(images) == 0:
        raise DataError("the array holds no images; give at least one, shape (n, h, w, 3)")
    severities = _check_options(corruptions, severities, seed, workers)
    table = choose_table(table, height=images.shape[1], width=images.shape[2])
    paths = {corruption: Path(out_dir) / f"{corruption}.npy" for corruption in corruptions}
    record = CorruptionRecord(
        source=hash_array(images), images=len(images), seed=int(seed), table=table, size=None, severities=severities
    )
    claim_folder(Path(out_dir), record, list(paths.values()))
    if labels is not None:
        values, path = labels if isinstance(labels, np.ndarray) else open_array(Path(labels)), Path(out_dir) / LABELS
        repeated = np.tile(check_labels(values, "labels are", count=len(images)), len(severities))
        if not path.exists():
            write_npy(path, repeated)
        elif not np.array_equal(open_array(path), repeated):
            raise DataError(f"{path} holds other labels than those given; give another output folder or the same ones")
    block = len(images) * len(severities)
    progress.start(block * len(paths), "corrupting images")
    with worker_pool(workers) as pool:
        for corruption, path in paths.items():
            try:
                found = open_array(path)
                complete = found.shape == (block, *images.shape[1:]) and found.dtype == np.uint8
            except DataError:  # missing or damaged
                complete = False
            if complete:
                progress.advance(block)
            else:
                _write_blocks(path, images, corruption, record, pool=pool, progress=progress)
    progress.finish()
    return list(paths.values())


def corrupt_folder(
    source: PathLike,
    out_dir: PathLike,
    *,
    corruptions: Sequence[str] = CORRUPTIONS,
    severities: Sequence[int] = (5,),
    seed: int = 0,
    table: str | None = None,
    size: int | None = 224,
    workers: int = 1,
    progress: Progress = SILENT,
) -> list[Path]:
    """Write `<corruption>/<severity>/<class>/<name>` for every image below `source`; `x.gif` becomes `x.gif.png`.

    size: scale the short side to size * 256 / 224 and cut the middle, as ImageNet-C was made; None keeps images
    whole. JPEGs are saved at quality 85, as ImageNet-C was; other formats without loss. Finished images of an earlier
    run with the same input and options are kept. Returns the folders `<corruption>/<severity>`.
    """
    root, out = Path(source), Path(out_dir)
    severities = _check_options(corruptions, severities, seed, workers)
    if size is not None and size < 1:
        raise ConfigError(f"size {size} is not possible; give a side in pixels >= 1, or None to keep images whole")
    if table is not None:
        choose_table(table, height=1, width=1)
    names = [file.relative_to(root).as_posix() for file in find_images(root)]
    taken = set(names)
    if twice := next((name for name in names if output_name(name) != name and output_name(name) in taken), None):
        raise DataError(f"{root} holds {twice}, to be written as {output_name(twice)}, which is there too; rename one")
    if out.resolve().is_relative_to(root.resolve()):
        raise ConfigError(f"the output {out} lies inside the input {root}; give a folder outside it")
    folders = [out / corruption / str(severity) for corruption in corruptions for severity in severities]
    listing = FileImages(root, tuple(names)).digest()
    record = CorruptionRecord(source=listing, images=len(names), seed=int(seed), table=table, size=size, severities=())
    claim_folder(out, record, folders)
    progress.start(len(names) * len(folders), "corrupting images")
    tasks = ((corruption, index, name) for corruption in corruptions for index, name in enumerate(names))
    with worker_pool(workers) as pool:
        for done in map_in_order(pool, partial(_corrupt_file, root, out, record, severities), tasks):
            progress.advance(done)
    progress.finish()
    return folders


class CorruptionRecord(Schema):
    """Everything that determines the bytes of the files next to it."""

    source: str  # sha256 of the pixels, or of the names and sizes of the images
    images: int
    seed: int
    table: str | None
    size: int | None  # side that folders of images are cropped to
    severities: tuple[int, ...]  # blocks of each array; empty for folders, which hold each severity by itself
    generator: int = 1  # goes up when the same request gives other pixels


def claim_folder(folder: Path, record: CorruptionRecord, outputs: Sequence[Path]) -> None:
    """Write `record` to `folder`; refuse a folder that was made with other options."""
    path = folder / RECORD_NAME
    if path.exists():
        try:
            found = parse(CorruptionRecord, read_json(path), where=f"'{path}'")
        except ConfigError as error:
            raise DataError(f"{error}; delete {path.name} with the files beside it") from error
        for name, value in record:
            if getattr(found, name) != value:
                raise DataError(
                    f"{path.parent} was made with {name} {getattr(found, name)!r}, not {value!r}; "
                    "give another output folder or the same input and options"
                )
        return
    foreign = next((output for output in outputs if output.exists()), None)
    if foreign is not None:
        raise DataError(f"{foreign} is there without a {RECORD_NAME} that says how it was made; give another output")
    with writing(path) as file:
        file.write((json.dumps(record.model_dump(), indent=1) + "\n").encode())


def output_name(name: str) -> str:
    """The name of a corrupted image: unchanged, except that a GIF, which has only 256 colors, becomes a PNG."""
    return f"{name}.png" if name.lower().endswith(".gif") else name


def _check_options(corruptions: Sequence[str], severities: Sequence[int], seed: int, workers: int) -> tuple[int, ...]:
    """The severities in ascending order, each once, when every option is possible."""
    if isinstance(corruptions, str) or not corruptions or not severities:
        raise ConfigError(
            f"corruptions {corruptions!r}, severities {severities!r}: give a list of at least one of each"
        )
    check_workers(workers)
    for corruption in corruptions:
        for severity in severities:
            check_request(corruption, severity, seed)
    return tuple(sorted({int(severity) for severity in severities}))


def _write_blocks(
    path: Path,
    images: NDArray[np.uint8],
    corruption: str,
    record: CorruptionRecord,
    *,
    pool: Executor | None,
    progress: Progress,
) -> None:
    """Corrupt at every severity and write the blocks one after the other under a temporary name."""
    shape = (len(images) * len(record.severities), *images.shape[1:])
    with writing(path) as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
        for severity in record.severities:
            tasks = make_tasks(images, corruption, severity, seed=record.seed, table=str(record.table))
            for result in map_in_order(pool, run_task, tasks):
                file.write(result.data)
                progress.advance(len(result))


def _corrupt_file(
    root: Path, out: Path, record: CorruptionRecord, severities: tuple[int, ...], task: tuple[str, int, str]
) -> int:
    """Write the missing severities of one image (corruption, index, name); returns the number of severities."""
    corruption, index, name = task
    targets = {severity: out / corruption / str(severity) / output_name(name) for severity in severities}
    missing = {severity: path for severity, path in targets.items() if not path.exists()}
    if missing:
        image = cut_image(read_image(root / name), record.size)[None]
        table = choose_table(record.table, height=image.shape[1], width=image.shape[2])
    for severity, path in missing.items():
        (piece,) = make_tasks(image, corruption, severity, seed=record.seed, table=table, first_index=index)
        kind = Image.registered_extensions()[path.suffix.lower()]
        quality: dict[str, Any] = {"JPEG": {"quality": _JPEG_QUALITY, "optimize": True}, "WEBP": {"lossless": True}}
        corrupted = Image.fromarray(run_task(piece)[0])
        with writing(path) as file:
            corrupted.save(file, kind, **quality.get(kind, {}))
    return len(targets)


def cut_image(image: NDArray[np.uint8], size: int | None) -> NDArray[np.uint8]:
    """The middle of an image (h, w, 3), scaled as ImageNet-C was and cut to size x size; without a size, all of it."""
    if size is None:
        return image
    height, width = image.shape[:2]
    short = round(size * _SHORT_SIDE)
    wanted = (short, short * height // width) if width <= height else (short * width // height, short)
    check_size(wanted[1], wanted[0])
    scaled = Image.fromarray(image).resize(wanted, Image.Resampling.BILINEAR)
    left, top = round((scaled.width - size) / 2), round((scaled.height - size) / 2)
    return np.asarray(scaled.crop((left, top, left + size, top + size)))
