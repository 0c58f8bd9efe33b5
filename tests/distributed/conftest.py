"""One cluster of this machine for all tests of a process."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from trust_tta.optional import available


@pytest.fixture(scope="session")
def ray() -> Iterator[ModuleType]:
    """Ray with two CPUs, on loopback; it starts in seconds, so it starts once."""
    if not available("ray"):
        pytest.skip("Ray is not installed")
    from trust_tta.distributed.cluster import connected

    with connected(cpus=2) as module:
        yield module
