"""Checked options and temporary modes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from trust_tta.errors import ConfigError
from trust_tta.methods.checks import statistics_wanted

T = TypeVar("T")


def choose(option: str, value: str, choices: Mapping[str, T]) -> T:
    """The meaning of a named choice; a wrong name is refused with the valid ones."""
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{option}={value!r} is not one of {', '.join(map(repr, choices))}")
    return choices[value]


def check_count(option: str, value: int, *, least: int = 1) -> None:
    """Refuse an option that is not a whole number of at least `least`."""
    if type(value) is not int or value < least:
        raise ConfigError(f"{option} is {value!r}; give a whole number of at least {least}")


def check_number(option: str, value: float, *, least: float = 0, infinite: bool = False) -> None:
    """Refuse an option that is not a number of at least `least`."""
    number = isinstance(value, (int, float)) and not math.isnan(value) and value >= least
    if not number or (math.isinf(value) and not infinite):
        raise ConfigError(f"{option} is {value!r}; give a number of at least {least:g}")


@contextmanager
def stochastic_depth_on(model: nn.Module, enabled: bool, *, seed: int) -> Iterator[None]:
    """Stochastic depth live inside, drawn from `seed` so that the caller's random numbers are left alone."""
    if not enabled:
        yield
        return
    switch = getattr(model, "set_stochastic_depth", None)
    if switch is None:
        raise ConfigError(f"{type(model).__name__} has no stochastic depth; set stochastic_depth=False")
    switch(True)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            yield
    finally:
        switch(False)


@contextmanager
def learning(images: Tensor) -> Iterator[None]:
    """Whatever modes the caller is in: gradients, casts of the weights as they are, PyTorch's refusal in one line."""
    with torch.inference_mode(False), torch.enable_grad(), fresh_casts(images), statistics_wanted(images):
        yield


@contextmanager
def fresh_casts(images: Tensor) -> Iterator[None]:
    """Autocast as it is around us, but without its cache: weights cast before an update must not serve after it."""
    device = images.device.type
    if not torch.is_autocast_enabled(device):
        yield
        return
    try:
        with torch.autocast(device, torch.get_autocast_dtype(device), cache_enabled=False):
            yield
    finally:
        torch.clear_autocast_cache()  # the caller's network has the same weights
