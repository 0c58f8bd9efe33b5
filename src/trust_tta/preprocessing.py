"""Image preprocessing: resize, crop and normalize images into network input.

Resizing and cropping happen on uint8 with Pillow; scaling and normalizing on one float32 tensor. PyTorch, NumPy and
Pillow are imported with the first image.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import Field, model_validator

from trust_tta.errors import ConfigError, DataError, ShapeError, TrustWarning, users_level
from trust_tta.schema import Schema, did_you_mean, parse, show

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from PIL import Image
    from torch import nn

    Pixels: TypeAlias = NDArray[np.uint8]
    Picture: TypeAlias = Image.Image | Pixels | torch.Tensor
    Pictures: TypeAlias = Picture | Sequence[Picture]

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
MAX_PIXELS = 1 << 26  # of a resized image, before it is cropped

Side = Annotated[int, Field(ge=1, le=8192)]
Finite = Annotated[float, Field(ge=-1e4, le=1e4, allow_inf_nan=False)]
Deviation = Annotated[float, Field(gt=0, le=1e4, allow_inf_nan=False)]

_EIGHT_BITS = ("RGB", "RGBA", "RGBX", "RGBa", "L", "LA", "La", "P", "PA", "1", "CMYK", "YCbCr", "HSV", "LAB")


class Preprocessing(Schema):
    """Resize, crop and normalize images to (n, 3, size, size).

    With `crop`, the short side is scaled to `resize` (None: not at all) and the center is cut out. Without, the whole
    image is squashed to size x size, or with `keep_ratio` scaled until its short side is `size`.

    >>> import numpy as np
    >>> Preprocessing(size=32, resize=None)(np.zeros((4, 32, 32, 3), np.uint8)).shape
    torch.Size([4, 3, 32, 32])
    """

    size: Side = 224
    resize: Side | None = 256
    crop: bool = True
    mean: tuple[Finite, Finite, Finite] = IMAGENET_MEAN
    std: tuple[Deviation, Deviation, Deviation] = IMAGENET_STD
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    keep_ratio: bool = Field(default=False, repr=False)  # left out of the text that identifies stored results

    @model_validator(mode="after")
    def _sizes_fit_together(self) -> Preprocessing:
        if self.crop and self.resize is not None and self.resize < self.size:
            raise ValueError(f"resize is {self.resize}; it must be at least the size {self.size} that is cropped")
        if self.crop and self.keep_ratio:
            raise ValueError("keep_ratio is true; it must be false where images are cropped")
        if not self.crop and self.resize not in (None, self.size):
            raise ValueError(f"resize is {self.resize}; without a crop it must be the size {self.size}, or None")
        return self

    def __call__(self, images: Pictures) -> torch.Tensor:
        """Network input, float32 (n, 3, size, size).

        `images`: a PIL image, uint8 pixels (h, w, 3) or (n, h, w, 3) as an array or a tensor, or a list of such
        images. A tensor's batch stays on its device.
        """
        import torch

        if isinstance(images, torch.Tensor):
            _check_pixels(images.shape, str(images.dtype).removeprefix("torch."))
            batch = images if images.dim() == 4 else images[None]
            if self.fits(tuple(batch.shape[1:3])):
                return self.normalize(batch)
            return self(batch.cpu().numpy()).to(images.device)
        import numpy as np

        pixels = np.require(self.fit(images), requirements=["C", "W"])
        return self.normalize(torch.from_numpy(pixels))

    def fit(self, images: Pictures | Iterable[Picture]) -> Pixels:
        """Resize and crop: uint8 (n, size, size, 3); an array of this size is returned unchanged."""
        import numpy as np
        from PIL import Image

        if isinstance(images, np.ndarray):
            _check_pixels(images.shape, str(images.dtype))
            images = images if images.ndim == 4 else images[None]
            if self.fits(images.shape[1:3]):
                return images
        elif isinstance(images, Image.Image) or not isinstance(images, Iterable):
            images = [images]
        fitted = [self.fit_image(image) for image in images]
        if len({image.shape for image in fitted}) > 1:
            raise DataError(
                "images of different aspect ratios cannot be stacked; give images of one aspect ratio at a time"
            )
        return np.stack(fitted) if fitted else np.empty((0, self.size, self.size, 3), dtype=np.uint8)

    def fit_image(self, image: Picture) -> Pixels:
        """Resize and crop one image: uint8 (size, size, 3)."""
        pixels = _pixels(image)
        height, width = pixels.shape[:2]
        if self.fits((height, width)):
            return pixels
        if not self.crop:
            ratio = max(height, width) / min(height, width) if self.keep_ratio else 1.0
            long = int(self.size * ratio + 0.5)
            return self._resize(pixels, *((self.size, long) if width > height else (long, self.size)))
        if self.resize is not None:
            short = min(height, width)
            pixels = self._resize(pixels, int(self.resize * height / short), int(self.resize * width / short))
            height, width = pixels.shape[:2]
        if min(height, width) < self.size:
            raise DataError(
                f"an image of {height}x{width} pixels is too small to cut {self.size}x{self.size} from; set a resize"
            )
        top, left = round((height - self.size) / 2), round((width - self.size) / 2)
        return pixels[top : top + self.size, left : left + self.size]

    def normalize(self, pixels: torch.Tensor) -> torch.Tensor:
        """Scale to 0..1, subtract the mean, divide by the deviation: uint8 (n, h, w, 3) to float32 (n, 3, h, w).

        Runs on the tensor's device: uint8 is a quarter of the bytes to transfer.
        """
        import torch

        planes = pixels.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
        mean = torch.tensor(self.mean, device=pixels.device).view(1, 3, 1, 1)
        std = torch.tensor(self.std, device=pixels.device).view(1, 3, 1, 1)
        return planes.sub_(mean * 255).div_(std * 255)

    def for_layout(self, layout: str) -> Preprocessing:
        """Preprocessing for images of a disk layout: some are cropped already, arrays are never cropped."""
        if layout in ("cifar", "array-c"):
            return self.changed(resize=None, crop=False)
        if layout == "folder-c" and self.crop:
            return self.changed(resize=None)
        return self

    def mismatch(self, images: torch.Tensor) -> str:
        """Reason why a float batch (n, 3, h, w) cannot have gone through this preprocessing, or ""."""
        import torch

        height, width = images.shape[-2:]
        if 2 * max(height, width) < self.size or min(height, width) > 2 * self.size:
            return f"images are {height}x{width} pixels, and this network was trained on {self.size}x{self.size}"
        low, high = torch.stack(torch.aminmax(images.detach())).tolist()
        lowest = min(-mean / std for mean, std in zip(self.mean, self.std, strict=True))
        highest = max((1 - mean) / std for mean, std in zip(self.mean, self.std, strict=True))
        limit, largest = max(abs(lowest), abs(highest)), max(abs(low), abs(high))
        unscaled = lowest < -0.5 and low >= 0 and high <= 1 and high - low > 0.5
        if largest > 4 * limit or unscaled or 0 < largest < limit / 50:
            return (
                f"images have values from {low:.3g} to {high:.3g}, and this network was trained on values from "
                f"{lowest:.3g} to {highest:.3g}"
            )
        return ""

    def to_json(self) -> str:
        """The text in the metadata of a weights file."""
        return json.dumps(self.model_dump(mode="json", exclude=None if self.keep_ratio else {"keep_ratio"}))

    @classmethod
    def from_mapping(cls, stated: Mapping[str, Any], *, where: str = "preprocessing") -> Preprocessing:
        """Preprocessing as a file states it; without `crop`, it crops only if it resizes."""
        return parse(cls, {"resize": None, "crop": stated.get("resize") is not None, **stated}, where=where)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether images of this height and width need neither resizing nor cropping."""
        fits = min(shape) == self.size if self.keep_ratio else shape == (self.size, self.size)
        return fits and self.resize in (None, self.size)

    def _resize(self, pixels: Pixels, height: int, width: int) -> Pixels:
        import numpy as np
        from PIL import Image

        if pixels.shape[:2] == (height, width):
            return pixels
        if height * width > MAX_PIXELS:
            raise DataError(
                f"an image of {pixels.shape[0]}x{pixels.shape[1]} pixels would be resized to {height}x{width}, "
                f"more than {MAX_PIXELS} pixels; cut it first, or use a preprocessing without a crop"
            )
        filters = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}
        resized = Image.fromarray(np.ascontiguousarray(pixels)).resize((width, height), filters[self.interpolation])
        return np.asarray(resized)


PRESETS: Mapping[str, Preprocessing] = MappingProxyType(
    {
        "imagenet": Preprocessing(),
        "squash224": Preprocessing(resize=None, crop=False),  # the whole image, as TRUST ran everything but CIFAR
        "imagenet-c": Preprocessing(resize=None),  # its images are 224 pixels already
        "cifar32": Preprocessing(size=32, resize=None, mean=CIFAR10_MEAN, std=CIFAR10_STD),
        "pixels512": Preprocessing(size=512, resize=None, crop=False, interpolation="bilinear"),  # of segmentation
        "pixels224": Preprocessing(resize=None, crop=False, interpolation="bilinear"),
        "pacs96": Preprocessing(size=96, resize=None, crop=False),
    }
)


def find_preset(name: str) -> Preprocessing:
    """The named preprocessing."""
    if name not in PRESETS:
        raise ConfigError(f"unknown preprocessing {show(name)}; {did_you_mean(name, PRESETS)}")
    return PRESETS[name]


def network_input(network: nn.Module, images: Any) -> torch.Tensor:
    """Float images for `network`: pixels go through its preprocessing, floats are returned unchanged.

    The first float batches of a trained network are checked, and a mismatch is reported once.
    """
    import torch

    if isinstance(images, torch.Tensor) and images.is_floating_point():
        if not torch.compiler.is_compiling() and getattr(network, "unchecked_batches", False):
            _check_batch(network, images)
        return images
    preprocessing = getattr(network, "preprocessing", None)
    if preprocessing is None:
        given = f"{images.dtype} {tuple(images.shape)}" if hasattr(images, "shape") else type(images).__name__
        raise ShapeError(
            f"images are {given}, and this network has no preprocessing; give floats (n, channels, h, w), "
            "or set model.preprocessing"
        )
    batch: torch.Tensor = preprocessing(images)
    first = next(network.parameters(), batch)
    return batch.to(first.device, first.dtype)


def _check_batch(network: Any, images: torch.Tensor) -> None:
    """Warn if a batch cannot have gone through the network's preprocessing; synchronizes with the device."""
    import torch

    if type(images) is not torch.Tensor or images.numel() == 0 or images.dim() != 4 or torch.jit._trace.is_tracing():
        return
    if images.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    network.unchecked_batches -= 1
    try:
        problem = network.preprocessing.mismatch(images) if network.preprocessing else ""
    except RuntimeError:  # under vmap and the like there are no values to check
        return
    if problem:
        network.unchecked_batches = 0
        warnings.warn(
            f"{problem}; give pixels, or use model.preprocessing(pixels): predictions will be poor, and adaptation may "
            "hide it",
            TrustWarning,
            stacklevel=users_level(),
        )


def _pixels(image: Any) -> Pixels:
    """One image as uint8 (h, w, 3)."""
    import numpy as np
    from PIL import Image

    if isinstance(image, Image.Image):
        if image.mode not in _EIGHT_BITS:
            raise DataError(
                f"an image of mode {image.mode} has more than 8 bits per channel, and its range is not known; "
                "scale it to 0..255 and convert it to RGB"
            )
        return np.asarray(image.convert("RGB"))
    if hasattr(image, "detach"):
        image = image.detach().cpu().numpy()
    if not isinstance(image, np.ndarray):
        raise ShapeError(f"an image is a {type(image).__name__}; give PIL images or uint8 pixels (h, w, 3)")
    _check_pixels(image.shape, str(image.dtype), dimensions=(3,))
    return image


def _check_pixels(shape: Sequence[int], dtype: str, *, dimensions: tuple[int, ...] = (3, 4)) -> None:
    if dtype == "uint8" and len(shape) in dimensions and shape[-1] == 3 and 0 not in shape[-3:]:
        return
    hint = "give uint8 pixels (h, w, 3) or (n, h, w, 3)"
    if dtype == "uint8" and len(shape) in (3, 4) and shape[-3] == 3:
        hint += "; channels come last: use .permute(0, 2, 3, 1) on (n, 3, h, w)"
    elif dtype.startswith("float"):
        hint += "; floats are taken to be preprocessed already"
    raise ShapeError(f"images have shape {tuple(shape)} and dtype {dtype}; {hint}")
