"""Corrupt a stack of images: choose the figures, seed every image by itself, work in small batches."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trust_tta.data.corruptions.blur import defocus_blur, gaussian_blur, glass_blur, motion_blur, zoom_blur
from trust_tta.data.corruptions.digital import brightness, contrast, jpeg_compression, pixelate, saturate
from trust_tta.data.corruptions.elastic import elastic_transform
from trust_tta.data.corruptions.noise import gaussian_noise, impulse_noise, shot_noise, speckle_noise
from trust_tta.data.corruptions.parallel import map_in_order, worker_pool
from trust_tta.data.corruptions.pixels import Generators, Images, image_generator
from trust_tta.data.corruptions.spatter import spatter
from trust_tta.data.corruptions.table import (
    ALL_CORRUPTIONS,
    Level,
    check_corruption,
    check_severity,
    choose_table,
    level_of,
)
from trust_tta.data.corruptions.weather import fog, frost, snow
from trust_tta.errors import ConfigError, DataError

Corruption: TypeAlias = Callable[[Images, Generators, Level], Images]

_FUNCTIONS: Mapping[str, Corruption] = MappingProxyType(
    {
        "gaussian_noise": gaussian_noise,
        "shot_noise": shot_noise,
        "impulse_noise": impulse_noise,
        "defocus_blur": defocus_blur,
        "glass_blur": glass_blur,
        "motion_blur": motion_blur,
        "zoom_blur": zoom_blur,
        "snow": snow,
        "frost": frost,
        "fog": fog,
        "brightness": brightness,
        "contrast": contrast,
        "elastic_transform": elastic_transform,
        "pixelate": pixelate,
        "jpeg_compression": jpeg_compression,
        "speckle_noise": speckle_noise,
        "gaussian_blur": gaussian_blur,
        "spatter": spatter,
        "saturate": saturate,
    }
)
_BATCH_VALUES = 400_000  # values in one batch: its float copies stay in the processor's cache


@dataclass(frozen=True)
class Batch:
    """A few images and what is to be done to them: the unit of work that travels to a worker process."""

    images: Images
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
    check_images(images)
    check_request(corruption, severity, seed)
    if first_index < 0:
        raise ConfigError(f"first_index {first_index} is negative; give the index of the first image, from 0 on")
    table = choose_table(table, height=images.shape[1], width=images.shape[2])
    out = np.empty_like(images, order="C")
    batches = cut_batches(images, corruption, severity, seed=seed, table=table, first_index=first_index)
    done = 0
    with worker_pool(workers) as pool:
        for result in map_in_order(pool, corrupt_batch, batches):
            out[done : done + len(result)] = result
            done += len(result)
    return out


def check_images(images: Any) -> None:
    """Refuse what is not a uint8 array of shape (n, h, w, 3)."""
    if not isinstance(images, np.ndarray):
        raise DataError(f"images are a {type(images).__name__}; give a uint8 numpy array of shape (n, h, w, 3)")
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3 or 0 in images.shape[1:3]:
        raise DataError(
            f"images have dtype {images.dtype} and shape {images.shape}; "
            "give uint8 of shape (n, h, w, 3), values 0 to 255, channels last"
        )


def check_request(corruption: str, severity: int, seed: int) -> None:
    """Refuse an unknown corruption or severity, or a seed that is not a whole number from 0 on."""
    check_corruption(corruption)
    check_severity(severity)
    try:
        negative = operator.index(seed) < 0
    except TypeError:
        negative = True
    if negative:
        raise ConfigError(f"seed {seed!r} is not possible; give a whole number from 0 on")


def cut_batches(
    images: Images, corruption: str, severity: int, *, seed: int, table: str, first_index: int = 0
) -> Iterator[Batch]:
    """The images in pieces that are small enough to be quick, each with its whole order."""
    size = max(1, _BATCH_VALUES // int(np.prod(images.shape[1:])))
    for start in range(0, len(images), size):
        piece = np.ascontiguousarray(images[start : start + size])
        yield Batch(piece, corruption, severity, seed, table, first_index + start)


def corrupt_batch(batch: Batch) -> Images:
    """The corrupted images of one batch."""
    number = ALL_CORRUPTIONS.index(batch.corruption)
    generators = [
        image_generator(seed=batch.seed, number=number, severity=batch.severity, index=batch.first_index + i)
        for i in range(len(batch.images))
    ]
    level = level_of(batch.corruption, batch.severity, batch.table)
    return _FUNCTIONS[batch.corruption](batch.images, generators, level)
