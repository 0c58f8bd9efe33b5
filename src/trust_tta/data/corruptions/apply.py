"""Corrupt a stack of images in batches and processes, each image with a random generator of its own."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from trust_tta.data.corruptions.common import Generators, Pixels
from trust_tta.data.corruptions.table import ALL_CORRUPTIONS, SEVERITIES, Level, choose_table, level_of
from trust_tta.data.images import check_pixels
from trust_tta.data.parallel import map_in_order, worker_pool
from trust_tta.errors import ConfigError
from trust_tta.schema import did_you_mean

Corruption: TypeAlias = Callable[[Pixels, Generators, Level], Pixels]

_MODULES = ("noise", "blur", "weather", "digital")
_BATCH_VALUES = 400_000  # values in one batch: its float copies stay in the processor's cache


@dataclass(frozen=True)
class CorruptionTask:
    """A few images with their corruption: the unit of work of a process."""

    images: Pixels
    corruption: str
    severity: int
    seed: int
    table: str
    first_index: int


def corrupt(
    images: NDArray[np.uint8],
    corruption: str,
    severity: int = 5,
    seed: int = 0,
    *,
    table: str | None = None,
    workers: int = 1,
    first_index: int = 0,
) -> NDArray[np.uint8]:
    """Corrupted copies of uint8 images, (n, h, w, 3) in and out.

    table: "cifar" or "imagenet", by default the former up to 32 pixels and the latter above. Image i depends on
    (seed, corruption, severity, first_index + i) alone, so neither batches nor workers change a pixel.
    """
    check_pixels(images, "images are")
    check_request(corruption, severity, seed)
    if first_index < 0:
        raise ConfigError(f"first_index {first_index} is negative; give the index of the first image, an integer >= 0")
    table = choose_table(table, height=images.shape[1], width=images.shape[2])
    out = np.empty_like(images, order="C")
    tasks = make_tasks(images, corruption, severity, seed=seed, table=table, first_index=first_index)
    done = 0
    with worker_pool(workers) as pool:
        for result in map_in_order(pool, run_task, tasks):
            out[done : done + len(result)] = result
            done += len(result)
    return out


def check_request(corruption: str, severity: int, seed: int) -> None:
    """Refuse an unknown corruption or severity, or a seed that is not an integer >= 0."""
    if corruption not in ALL_CORRUPTIONS:
        raise ConfigError(f"unknown corruption {corruption!r}; {did_you_mean(corruption, ALL_CORRUPTIONS)}")
    if isinstance(severity, bool) or severity not in SEVERITIES:
        raise ConfigError(f"severity {severity!r} does not exist; give an integer from 1 to 5")
    if not isinstance(seed, int | np.integer) or seed < 0:
        raise ConfigError(f"seed {seed!r} is not possible; give an integer >= 0")


def make_tasks(
    images: Pixels, corruption: str, severity: int, *, seed: int, table: str, first_index: int = 0
) -> Iterator[CorruptionTask]:
    """The images in small pieces, each with the arguments of its task."""
    size = max(1, _BATCH_VALUES // int(np.prod(images.shape[1:])))
    for start in range(0, len(images), size):
        piece = np.ascontiguousarray(images[start : start + size])
        yield CorruptionTask(piece, corruption, severity, seed, table, first_index + start)


def run_task(task: CorruptionTask) -> Pixels:
    """The corrupted images of one task."""
    number = ALL_CORRUPTIONS.index(task.corruption)
    generators = [
        np.random.default_rng((task.seed, number, task.severity, task.first_index + i)) for i in range(len(task.images))
    ]
    level = level_of(task.corruption, task.severity, task.table)
    return _function_of(task.corruption)(task.images, generators, level)


@functools.cache
def _function_of(corruption: str) -> Corruption:
    """The function of a corruption, imported on first use: scipy and numba take half a second."""
    modules = (importlib.import_module(f"trust_tta.data.corruptions.{name}") for name in _MODULES)
    function: Corruption = next(getattr(module, corruption) for module in modules if hasattr(module, corruption))
    return function
