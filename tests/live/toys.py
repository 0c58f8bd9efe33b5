"""A small network that has learned something, and the streams that could make it forget."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trust_tta.methods.base import Method
from trust_tta.methods.registry import create_method

CLASSES, SIZE = 6, 12


class Toy(nn.Module):
    """Three convolutions with BatchNorm, and a head."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 12, 24, 24)
        layers: list[nn.Module] = []
        for i, (a, b) in enumerate(zip(widths, widths[1:], strict=False)):
            layers += [nn.Conv2d(a, b, 3, stride=1 + i % 2, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(widths[-1], CLASSES)

    def forward_features(self, images: Tensor) -> Tensor:
        features: Tensor = self.body(images).mean((2, 3))
        return features

    def forward_head(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head(features)
        return logits

    def forward(self, images: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(images))


def draw(count: int, *, seed: int, only: int | None = None, noise: float = 3.0) -> tuple[Tensor, Tensor]:
    """Images (count, 3, 12, 12) of waves whose direction and colour are their class, and labels (count,)."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    if only is not None:
        labels = torch.full((count,), only)
    angle = labels * torch.pi / CLASSES
    phase = torch.rand(count, generator=generator) * 2 * torch.pi
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    position = x[None] * angle.cos()[:, None, None] + y[None] * angle.sin()[:, None, None]
    waves = (1.3 * position + phase[:, None, None]).sin()[:, None]
    colour = 1 + 0.4 * torch.stack([(angle + k).sin() for k in range(3)], 1)[:, :, None, None]
    return waves * colour + noise * torch.randn(count, 3, SIZE, SIZE, generator=generator), labels


@cache
def _trained() -> dict[str, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Toy()
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        for step in range(100):
            images, labels = draw(64, seed=10_000 + step)
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
    return model.state_dict()


def toy() -> Toy:
    """The trained network, a new copy each time."""
    model = Toy()
    model.load_state_dict(_trained())
    return model.eval()


def untrained() -> Toy:
    """The same network with weights that were drawn, for what needs no accuracy."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Toy().eval()


def make(name: str = "tent", **options: object) -> Method:
    return create_method(name, toy(), **options)


def clean(batches: int, *, size: int = 32, seed: int = 0) -> list[Tensor]:
    return [draw(size, seed=1000 * seed + i)[0] for i in range(batches)]


def accuracy(method: Method, *, images: int = 1024) -> float:
    """Of the state as it is, on clean images, in per cent."""
    inputs, labels = draw(images, seed=77)
    predicted = torch.cat([method.evaluate(part).argmax(1) for part in inputs.split(64)])
    return 100 * float((predicted == labels).float().mean())


def states_equal(a: object, b: object) -> bool:
    """Whether two nested states are equal bit for bit."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(states_equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(states_equal, a, b))
    return type(a) is type(b) and (a == b or (a != a and b != b))


def noise_like(seed: int, size: int = 32) -> Tensor:
    return torch.randn(size, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(seed)) * 2


def ruin(kind: str, i: int, *, size: int = 32) -> Tensor:
    """The i-th batch of a stream that ruins methods."""
    images = draw(size, seed=50_000 + i, only=1 if kind == "one class" else None)[0]
    match kind:
        case "noise":
            return noise_like(i, size)
        case "constant":
            return torch.randn(size, 3, 1, 1, generator=torch.Generator().manual_seed(i)).expand_as(images).clone()
        case "flips":
            return images if i // 10 % 2 else 1.5 * images.flip(1) + 2
        case "nan":
            images[i % 2 :: 2] = float("nan")
        case "mixed":
            generator = torch.Generator().manual_seed(i)
            images[: size // 2] = (noise_like(i, size // 2), -images[: size // 2], images[:1])[i % 3]
            images = images[torch.randperm(size, generator=generator)]
        case "huge":
            images[0] *= 3e37
    return images


RUINOUS = ("noise", "constant", "one class", "flips", "nan", "mixed", "huge")
