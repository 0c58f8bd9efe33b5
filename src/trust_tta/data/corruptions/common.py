"""Shared by the corruptions: conversion between bytes and floats in 0..1, and random numbers for each image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Pixels: TypeAlias = NDArray[np.uint8]  # (n, h, w, 3)
Floats: TypeAlias = NDArray[np.float64]
Generators: TypeAlias = Sequence[np.random.Generator]


def to_unit(images: Pixels) -> Floats:
    """Bytes to floats in 0..1."""
    return images / 255.0


def to_bytes(values: Floats) -> Pixels:
    """Floats clipped to 0..1, then cut off (not rounded) to bytes, as the released sets were."""
    scaled = np.clip(values, 0, 1)
    scaled *= 255
    return scaled.astype(np.uint8)


def draw_normal(generators: Generators, shape: tuple[int, ...]) -> Floats:
    """Standard normal numbers, (n, *shape)."""
    values = np.empty((len(generators), *shape))
    for generator, row in zip(generators, values, strict=True):
        generator.standard_normal(out=row)
    return values


def draw_uniform(generators: Generators, shape: tuple[int, ...], low: float = 0.0, high: float = 1.0) -> Floats:
    """Uniform numbers in low..high, (n, *shape)."""
    values = np.empty((len(generators), *shape))
    for generator, row in zip(generators, values, strict=True):
        generator.random(out=row)
    values *= high - low
    values += low
    return values
