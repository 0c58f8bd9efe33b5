"""From images to network input: resize and crop on uint8 with Pillow, then scale and normalise as one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from trust_tta.errors import ConfigError, DataError
from trust_tta.preprocessing import CIFAR10_MEAN, CIFAR10_STD, Preprocessing

_FILTERS = MappingProxyType({"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR})

PRESETS = MappingProxyType(
    {
        "imagenet": Preprocessing(),
        "squash224": Preprocessing(resize=None, crop=False),  # as TRUST ran everything but CIFAR
        "imagenet-c": Preprocessing(resize=None),  # its images are 224 pixels already
        "cifar224": Preprocessing(resize=None, crop=False),
        "cifar32": Preprocessing(size=32, resize=None, mean=CIFAR10_MEAN, std=CIFAR10_STD),
        "pacs96": Preprocessing(size=96, resize=None, crop=False),
    }
)


def find_preset(name: str) -> Preprocessing:
    """The named preprocessing."""
    if name not in PRESETS:
        raise ConfigError(f"unknown preprocessing {name!r}; known are {', '.join(PRESETS)}")
    return PRESETS[name]


def fit_image(image: NDArray[np.uint8], preprocessing: Preprocessing) -> NDArray[np.uint8]:
    """Resize and crop one image, uint8 (h, w, 3) to (size, size, 3)."""
    size = preprocessing.size
    if _fits(image.shape[:2], preprocessing):
        return image
    if not preprocessing.crop:
        return _resize(image, size, size, preprocessing)
    if preprocessing.resize is not None:
        height, width = image.shape[:2]
        short = min(height, width)
        wanted = preprocessing.resize
        image = _resize(image, int(wanted * height / short), int(wanted * width / short), preprocessing)
    height, width = image.shape[:2]
    if min(height, width) < size:
        raise DataError(f"an image of {height}x{width} pixels is too small to cut {size}x{size} from; set a resize")
    top, left = round((height - size) / 2), round((width - size) / 2)
    return image[top : top + size, left : left + size]


def normalise(images: torch.Tensor, preprocessing: Preprocessing) -> torch.Tensor:
    """Scale to 0..1, subtract the mean, divide by the deviation: uint8 (n, h, w, 3) to float32 (n, 3, h, w).

    Works where the tensor lives, so that a quarter of the bytes goes to the device.
    """
    planes = images.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
    mean = torch.tensor(preprocessing.mean, device=images.device).view(1, 3, 1, 1)
    std = torch.tensor(preprocessing.std, device=images.device).view(1, 3, 1, 1)
    return planes.sub_(mean * 255).div_(std * 255)


def preprocess(images: NDArray[np.uint8] | Sequence[NDArray[np.uint8]], preprocessing: Preprocessing) -> torch.Tensor:
    """Images uint8, an array (n, h, w, 3) or a list of (h, w, 3), to float32 (n, 3, size, size)."""
    return normalise(
        torch.from_numpy(np.require(fit_images(images, preprocessing), requirements=["C", "W"])), preprocessing
    )


def fit_images(
    images: NDArray[np.uint8] | Sequence[NDArray[np.uint8]], preprocessing: Preprocessing
) -> NDArray[np.uint8]:
    """Resize and crop each image: uint8 (n, size, size, 3); an array that fits already comes back as it is."""
    size = preprocessing.size
    if isinstance(images, np.ndarray) and _fits(images.shape[1:3], preprocessing):
        return images
    fitted = [fit_image(image, preprocessing) for image in images]
    return np.stack(fitted) if fitted else np.empty((0, size, size, 3), dtype=np.uint8)


def _fits(shape: tuple[int, ...], preprocessing: Preprocessing) -> bool:
    """Whether images of this height and width need neither resizing nor cropping."""
    size = preprocessing.size
    return shape == (size, size) and preprocessing.resize in (None, size)


def _resize(image: NDArray[np.uint8], height: int, width: int, preprocessing: Preprocessing) -> NDArray[np.uint8]:
    if image.shape[:2] == (height, width):
        return image
    resized = Image.fromarray(np.ascontiguousarray(image)).resize(
        (width, height), _FILTERS[preprocessing.interpolation]
    )
    return np.asarray(resized)
