"""From what a client sends to pixels as the network wants them, within limits; and back, for thumbnails."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from trust_tta.data.images import is_image, read_image
from trust_tta.errors import DataError, reason_of
from trust_tta.live.inputs import MAX_MAGNITUDE, examine, usable
from trust_tta.preprocessing import Preprocessing
from trust_tta.serve.settings import RequestError

if TYPE_CHECKING:
    from trust_tta.preprocessing import Pictures

FORMATS = ("JPEG", "PNG", "WEBP")
THUMBNAIL = 64  # pixels
QUICK_BYTES, QUICK_SIDE = 1 << 12, 128  # of files and pictures that are decoded sooner than given to another thread


def decode(data: bytes, preprocessing: Preprocessing, *, most_pixels: int) -> Tensor:
    """An image file as pixels (1, size, size, 3); its header is checked before anything is decoded."""
    with _one_line(most_pixels), _open(data, most_pixels=most_pixels) as image:
        return _fitted([ImageOps.exif_transpose(image)], preprocessing)


def decode_if_quick(data: bytes, preprocessing: Preprocessing, *, most_pixels: int) -> Tensor | None:
    """As `decode`, for a small file that need not be resized; None if the work may be more than a thread costs."""
    if len(data) > QUICK_BYTES or preprocessing.size > QUICK_SIDE:
        return None
    with _one_line(most_pixels), _open(data, most_pixels=most_pixels) as image:
        if image.size != (preprocessing.size, preprocessing.size):
            return None
        return _fitted([ImageOps.exif_transpose(image)], preprocessing)


def _open(data: bytes, *, most_pixels: int) -> Image.Image:
    if not data:
        raise RequestError(400, "there is no image; send one as the multipart field 'image' or as the body")
    image = Image.open(io.BytesIO(data), formats=FORMATS)
    if (pixels := image.width * image.height) > most_pixels:
        raise RequestError(413, f"the image has {pixels} pixels; at most {most_pixels} are accepted")
    return image


@contextmanager
def _one_line(most_pixels: int) -> Iterator[None]:
    """Say in one line what a decoder does not take."""
    try:
        yield
    except RequestError:
        raise
    except Image.DecompressionBombError:  # Pillow has a limit of its own
        raise RequestError(413, f"the image has too many pixels; at most {most_pixels} are accepted") from None
    except UnidentifiedImageError:
        raise RequestError(415, "this is not an image that can be read; send JPEG, PNG or WebP") from None
    except Exception as error:  # decoders raise whatever they stumble over
        raise RequestError(400, f"the image cannot be decoded: {reason_of(error)}") from None


def from_pixels(pixels: NDArray[np.uint8], preprocessing: Preprocessing, *, most_pixels: int) -> Tensor:
    """Pixels (n, size, size, 3) from those of a client (n, h, w, 3)."""
    count, height, width, _ = pixels.shape
    if height * width > most_pixels:
        raise RequestError(413, f"an image has {height * width} pixels; at most {most_pixels} are accepted")
    try:
        return _fitted(pixels, preprocessing)
    except ValueError as error:
        raise RequestError(400, str(error)) from None


def _fitted(images: Pictures, preprocessing: Preprocessing) -> Tensor:
    """Pixels (n, size, size, 3): for a whole batch, it takes little longer to normalize them than for one image."""
    return torch.from_numpy(np.require(preprocessing.fit(images), requirements=["C", "W"]))


def from_floats(values: NDArray[np.float32]) -> Tensor:
    """Network input from floats (n, 3, size, size) that were preprocessed by the client."""
    images = torch.from_numpy(np.array(values, dtype=np.float32))  # a copy: what was received is read-only
    if not usable(examine(images)).all():
        raise RequestError(400, f"the images hold values that are not finite, or beyond {MAX_MAGNITUDE:g}")
    return images


def thumbnail(image: Tensor, preprocessing: Preprocessing) -> str:
    """A small picture of pixels (h, w, 3), or of network input (3, h, w), as a data URL."""
    if image.is_floating_point():
        mean, std = (torch.tensor(v).view(3, 1, 1) for v in (preprocessing.mean, preprocessing.std))
        image = ((image * std + mean) * 255).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0)
    picture = Image.fromarray(image.numpy())
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
