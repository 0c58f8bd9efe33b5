"""Thumbnails for the live page, and folders of reference images."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from trust_tta.data.images import is_image, read_image
from trust_tta.errors import DataError
from trust_tta.preprocessing import Preprocessing

THUMBNAIL = 64  # pixels


def thumbnail(image: Tensor, preprocessing: Preprocessing) -> str:
    """A small PNG of network input (3, h, w), as a data URL."""
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (preprocessing.mean, preprocessing.std))
    pixels = ((image * std + mean) * 255).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0)
    picture = Image.fromarray(pixels.numpy())
    picture.thumbnail((THUMBNAIL, THUMBNAIL))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def read_folder(folder: Path, preprocessing: Preprocessing, *, batch: int) -> Iterator[Tensor]:
    """Batches (n, 3, size, size) of all images below a folder, in an order that mixes its subfolders."""
    if not folder.is_dir():
        raise DataError(f"'{folder}' is not a folder; give one with clean images")
    files = sorted(file for file in folder.rglob("*") if file.is_file() and is_image(file.name))
    if not files:
        raise DataError(f"'{folder}' holds no images; give a folder with clean ones")
    order = np.random.default_rng(0).permutation(len(files)).tolist()
    for start in range(0, len(files), batch):
        yield preprocessing([read_image(files[i]) for i in order[start : start + batch]])
