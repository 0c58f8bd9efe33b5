"""Where streams are: as few as can be move, one at a time, and never while somebody is being answered."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from trust_tta.distributed.routing import StreamRouter, home_of

STREAMS = [f"camera-{i}" for i in range(400)]


@settings(max_examples=20, deadline=None)
@given(st.sets(st.integers(0, 40), min_size=2, max_size=12))
def test_only_streams_of_a_lost_replica_move(replicas: set[int]) -> None:
    lost = min(replicas)
    before = {stream: home_of(stream, replicas) for stream in STREAMS}
    after = {stream: home_of(stream, replicas - {lost}) for stream in STREAMS}
    assert all(after[stream] == before[stream] for stream in STREAMS if before[stream] != lost)
    assert lost not in after.values()


def test_streams_are_spread_evenly() -> None:
    counts = [sum(home_of(stream, range(4)) == number for stream in STREAMS) for number in range(4)]
    assert min(counts) > 60


def test_no_replica_without_replicas() -> None:
    assert home_of("a", []) is None


def test_stream_moves_after_pending_requests_are_answered() -> None:
    released: list[tuple[int, str]] = []

    async def release(number: int, stream: str) -> None:
        released.append((number, stream))

    async def play() -> list[int | None]:
        router, seen = StreamRouter(release), list[int | None]()
        stream = next(s for s in STREAMS if home_of(s, {0, 1}) == 1)
        router.live = {0}
        async with router.visit(stream) as first:
            seen.append(first)
            router.live.add(1)
            waiting = asyncio.ensure_future(_visit(router, stream))
            await asyncio.sleep(0)
            assert not waiting.done()
            assert released == []
        seen.append(await waiting)
        assert released == [(0, stream)]
        router.lose(1)
        seen.append(await _visit(router, stream))
        assert released == [(0, stream)]  # who is lost need not let go
        return seen

    assert asyncio.run(play()) == [0, 1, 0]


def test_assignments_are_recorded_and_dropped() -> None:
    async def release(number: int, stream: str) -> None:
        raise AssertionError("there is nothing to release")

    async def play() -> None:
        router = StreamRouter(release)
        router.assign("a", 3)
        assert router.replica_of("a") == 3
        router.lose(3)
        assert router.replica_of("a") is None
        assert await _visit(router, "a") is None
        router.forget("a")
        assert router.replica_of("a") is None

    asyncio.run(play())


async def _visit(router: StreamRouter, stream: str) -> int | None:
    async with router.visit(stream) as number:
        return number
