"""How a network is trained, as one frozen record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from trust_tta.errors import ConfigError
from trust_tta.preprocessing import CIFAR10_MEAN, CIFAR10_STD

PRECISIONS = ("float32", "bf16")


@dataclass(frozen=True)
class TrainRecipe:
    """Everything but the data and the network that decides a training run; the defaults fit CIFAR at 32 pixels."""

    epochs: int = 100
    batch_size: int = 512
    lr: float = 3e-3
    weight_decay: float = 0.05  # on weights only, never on norms, biases and the scan's A, D and step biases
    warmup_epochs: float = 5.0
    grad_clip: float = 1.0  # largest norm of all gradients together; 0: none
    label_smoothing: float = 0.1
    drop_path: float = 0.1  # at the last block, rising linearly from 0 at the first
    crop_padding: int = 4  # pixels reflected at each border before a random crop of the old size
    flip: bool = True
    cutout: int = 8  # side of the square that is set to the mean; 0: none
    mixup: float = 0.0  # share of the images that are blended with another
    cutmix: float = 0.5  # share of the images that get a rectangle of another
    plain_share: float = 0.1  # the last epochs go without cutout, mixup and cutmix
    ema_decay: float = 0.999  # of the averaged weights; 0: the average is the last step
    precision: Literal["float32", "bf16"] = "float32"
    compile: bool = False
    seed: int = 0
    mean: tuple[float, float, float] = CIFAR10_MEAN
    std: tuple[float, float, float] = CIFAR10_STD

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        problems = _type_problems(self) or _value_problems(self)
        if problems:
            raise ConfigError("TrainRecipe: " + "; ".join(problems))

    def override(self, changes: Mapping[str, Any]) -> TrainRecipe:
        """A copy with some fields changed; an unknown field is refused with the valid ones."""
        known = [f.name for f in fields(self)]
        unknown = sorted(set(changes) - set(known))
        if unknown:
            raise ConfigError(f"TrainRecipe has no field {', '.join(unknown)}; its fields are {', '.join(known)}")
        return replace(self, **changes)

    @property
    def plain_from(self) -> int:
        """The first epoch without cutout, mixup and cutmix."""
        return self.epochs - round(self.plain_share * self.epochs)


_WANTED = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", tuple: "three numbers"}


def _type_problems(recipe: TrainRecipe) -> list[str]:
    """What is not of the type of its default; the value checks compare numbers and would stumble over it."""
    problems = []
    for field in fields(recipe):
        value, kind = getattr(recipe, field.name), type(field.default)
        fits = _is_number(value) if kind is float else type(value) is kind
        if kind is tuple and fits:
            fits = len(value) == 3 and all(map(_is_number, value))
        if not fits:
            problems.append(f"{field.name} is {value!r} but must be {_WANTED[kind]}")
    return problems


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _value_problems(r: TrainRecipe) -> list[str]:
    checks = {
        "epochs": (r.epochs >= 1, "at least 1"),
        "batch_size": (r.batch_size >= 2, "at least 2, or batch statistics mean nothing"),
        "lr": (0 < r.lr < float("inf"), "positive"),
        "weight_decay": (r.weight_decay >= 0, "0 or more"),
        "warmup_epochs": (0 <= r.warmup_epochs <= r.epochs, f"between 0 and the {r.epochs} epochs"),
        "grad_clip": (r.grad_clip >= 0, "0 (none) or more"),
        "label_smoothing": (0 <= r.label_smoothing < 1, "in [0, 1)"),
        "drop_path": (0 <= r.drop_path < 1, "in [0, 1)"),
        "crop_padding": (r.crop_padding >= 0, "0 or more"),
        "cutout": (r.cutout >= 0, "0 (none) or more"),
        "mixup": (0 <= r.mixup <= 1, "in [0, 1]"),
        "cutmix": (0 <= r.cutmix <= 1 - max(r.mixup, 0), "in [0, 1 - mixup]"),
        "plain_share": (0 <= r.plain_share <= 1, "in [0, 1]"),
        "ema_decay": (0 <= r.ema_decay < 1, "in [0, 1)"),
        "precision": (r.precision in PRECISIONS, f"one of {', '.join(PRECISIONS)}"),
        "seed": (0 <= r.seed < 2**63, "in [0, 2**63)"),
        "std": (min(r.std) > 0, "positive"),
    }
    return [
        f"{name} is {getattr(r, name)!r} but must be {wanted}" for name, (fits, wanted) in checks.items() if not fits
    ]
