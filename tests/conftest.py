"""Fixtures of all rooms."""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

# Triton decides when it is first imported whether it interprets, so it is decided here for all tests.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

SetThreads: TypeAlias = Callable[[int], None]

gc.disable()  # while the tests are collected: a fourth of that time would go to collecting garbage


def pytest_collection_finish() -> None:
    """Collect garbage again, but not among modules and tests, which stay."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # nanobind reports objects that are left at the end


@pytest.fixture
def nan_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what torch.empty and its relatives return with NaN, so that memory nobody wrote shows in the result."""

    def filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def wrapper(*args: Any, **options: Any) -> Tensor:
            tensor = make(*args, **options)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return wrapper

    monkeypatch.setattr(torch, "empty", filled(torch.empty))
    monkeypatch.setattr(torch, "empty_like", filled(torch.empty_like))
    monkeypatch.setattr(Tensor, "new_empty", filled(Tensor.new_empty))


@pytest.fixture
def threads() -> Iterator[SetThreads]:
    """Set the number of PyTorch's threads for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
