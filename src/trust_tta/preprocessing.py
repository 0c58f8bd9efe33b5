"""How an image becomes the input of a network: what a checkpoint states, and what its data are given."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from trust_tta.errors import ConfigError

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
INTERPOLATIONS = ("bicubic", "bilinear")


@dataclass(frozen=True)
class Preprocessing:
    """How an image becomes (3, size, size).

    With `crop`: the short side is scaled to `resize` (None: not at all) and the middle is cut out.
    Without: the whole image is squashed to size x size, whatever its shape.
    """

    size: int = 224
    resize: int | None = 256
    crop: bool = True
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    interpolation: str = "bicubic"

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"size is {self.size}; it must be a positive number of pixels")
        if self.crop and self.resize is not None and self.resize < self.size:
            raise ConfigError(f"resize is {self.resize}; it must be at least the size {self.size} that is cropped")
        if not self.crop and self.resize not in (None, self.size):
            raise ConfigError(f"resize is {self.resize}; without a crop it must be the size {self.size}, or None")
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise ConfigError(f"mean {self.mean} and std {self.std} must be three numbers each, std above zero")
        if self.interpolation not in INTERPOLATIONS:
            raise ConfigError(f"interpolation is {self.interpolation!r}; choose one of {', '.join(INTERPOLATIONS)}")

    def to_json(self) -> str:
        """The text that stands in a file of weights."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Preprocessing:
        """Read what `to_json` wrote; a file that says nothing of a crop cuts only what it scales beforehand."""
        stated = json.loads(text)
        (r, g, b), (x, y, z) = (map(float, stated[name]) for name in ("mean", "std"))
        resize = stated.get("resize")
        return cls(
            size=int(stated["size"]),
            resize=resize,
            crop=stated.get("crop", resize is not None),
            mean=(r, g, b),
            std=(x, y, z),
            interpolation=stated.get("interpolation", "bicubic"),
        )
