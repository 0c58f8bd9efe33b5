"""Small pictures of the images whose predictions are kept, for the report."""

from __future__ import annotations

import io
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from trust_tta.data.dataset import Dataset
from trust_tta.results.record import SamplePrediction

LONGER_SIDE = 64


def small_picture(image: NDArray[np.uint8]) -> bytes:
    """An image uint8 (h, w, 3) as lossless WebP, scaled down until its longer side has at most 64 pixels."""
    picture = Image.fromarray(image)
    picture.thumbnail((LONGER_SIDE, LONGER_SIDE), Image.Resampling.LANCZOS)
    with io.BytesIO() as file:
        picture.save(file, "WEBP", lossless=True, quality=100)
        return file.getvalue()


def kept_pictures(dataset: Dataset, predictions: Iterable[SamplePrediction]) -> dict[int, bytes]:
    """The images of the predictions, as the data set has them before preprocessing, by index."""
    return {kept.index: small_picture(dataset.image(kept.index)) for kept in predictions}


def spoken_names(dataset: Dataset) -> tuple[str, ...]:
    """The names of the classes, or none where they are mere numbers."""
    return () if all(name.isdigit() for name in dataset.class_names) else dataset.class_names
