"""Loops compiled by numba, cached on disk where possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: `numba.njit` with these options, cached; a read-only installation compiles in every process."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            loop: Callable[..., Any] = numba.njit(cache=True, **options)(function)
        except RuntimeError:  # no folder to write to
            loop = numba.njit(**options)(function)
        return loop

    return decorate
