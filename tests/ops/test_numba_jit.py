"""Loops that numba compiles, where it may write and where it may not."""

from __future__ import annotations

import pytest
from numba.core import caching

from trust_tta.ops.numba_jit import compiled


def twice(x: int) -> int:
    return 2 * x


@pytest.mark.parametrize("writable", [True, False])
def test_a_loop_runs_also_where_nothing_can_be_kept(writable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not writable:
        monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    assert compiled(nogil=True)(twice)(21) == 42
