"""From images to network input, as functions; `trust_tta.preprocessing` does the work."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from trust_tta.preprocessing import PRESETS, Preprocessing, find_preset

__all__ = ["PRESETS", "find_preset", "fit_image", "fit_images", "normalise", "preprocess"]


def fit_image(image: NDArray[np.uint8], preprocessing: Preprocessing) -> NDArray[np.uint8]:
    """Resize and crop one image, uint8 (h, w, 3) to (size, size, 3)."""
    return preprocessing.fit_image(image)


def fit_images(
    images: NDArray[np.uint8] | Sequence[NDArray[np.uint8]], preprocessing: Preprocessing
) -> NDArray[np.uint8]:
    """Resize and crop each image: uint8 (n, size, size, 3)."""
    return preprocessing.fit(images)


def normalise(images: torch.Tensor, preprocessing: Preprocessing) -> torch.Tensor:
    """uint8 (n, h, w, 3) to normalized float32 (n, 3, h, w)."""
    return preprocessing.normalize(images)


def preprocess(images: NDArray[np.uint8] | Sequence[NDArray[np.uint8]], preprocessing: Preprocessing) -> torch.Tensor:
    """Images uint8, an array (n, h, w, 3) or a list of (h, w, 3), to float32 (n, 3, size, size)."""
    return preprocessing(images)
