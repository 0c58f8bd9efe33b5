"""From what a client sends to network input, within limits; and back, for thumbnails."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from trust_tta.data.images import is_image, read_image
from trust_tta.errors import DataError, reason_of
from trust_tta.live.inputs import LARGEST, examine, usable
from trust_tta.preprocessing import Preprocessing
from trust_tta.serve.settings import RequestError

FORMATS = ("JPEG", "PNG", "WEBP")
THUMBNAIL = 64  # pixels


def decode(data: bytes, preprocessing: Preprocessing, *, most_pixels: int) -> Tensor:
    """An image file as network input (1, 3, size, size); its header is checked before anything is decoded."""
    if not data:
        raise RequestError(400, "there is no image; send one as the multipart field 'image' or as the body")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            pixels = image.width * image.height
            if pixels > most_pixels:
                raise RequestError(413, f"the image has {pixels} pixels; at most {most_pixels} are accepted")
            return preprocessing([ImageOps.exif_transpose(image)])
    except RequestError:
        raise
    except Image.DecompressionBombError:  # Pillow has a limit of its own
        raise RequestError(413, f"the image has too many pixels; at most {most_pixels} are accepted") from None
    except UnidentifiedImageError:
        raise RequestError(415, "this is not an image that can be read; send JPEG, PNG or WebP") from None
    except Exception as error:  # decoders raise whatever they stumble over
        raise RequestError(400, f"the image cannot be decoded: {reason_of(error)}") from None


def from_pixels(pixels: NDArray[np.uint8], preprocessing: Preprocessing, *, most_pixels: int) -> Tensor:
    """Network input (n, 3, size, size) from raw pixels (n, h, w, 3)."""
    count, height, width, _ = pixels.shape
    if height * width > most_pixels:
        raise RequestError(413, f"an image has {height * width} pixels; at most {most_pixels} are accepted")
    try:
        return preprocessing(pixels)
    except ValueError as error:
        raise RequestError(400, str(error)) from None


def from_floats(values: NDArray[np.float32]) -> Tensor:
    """Network input from floats (n, 3, size, size) that were preprocessed by the client."""
    images = torch.from_numpy(np.array(values, dtype=np.float32))  # a copy: what was received is read-only
    if not usable(examine(images)).all():
        raise RequestError(400, f"the images hold values that are not finite, or beyond {LARGEST:g}")
    return images


def thumbnail(image: Tensor, preprocessing: Preprocessing) -> str:
    """A small picture of network input (3, h, w), as a data URL."""
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (preprocessing.mean, preprocessing.std))
    pixels = ((image * std + mean) * 255).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).numpy()
    picture = Image.fromarray(pixels)
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
