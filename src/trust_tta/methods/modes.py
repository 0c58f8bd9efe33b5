"""Named choices and temporary modes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn

from trust_tta.errors import ConfigError

T = TypeVar("T")


def choose(option: str, value: str, choices: Mapping[str, T]) -> T:
    """The meaning of a named choice; a wrong name is refused with the valid ones."""
    if value not in choices:
        raise ConfigError(f"{option}={value!r} is not one of {', '.join(map(repr, choices))}")
    return choices[value]


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
