"""Where streams are: as few as can be move, one at a time, and never while somebody is being answered."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from trust_tta.distributed.routing import Places, home_of

STREAMS = [f"camera-{i}" for i in range(400)]


@settings(max_examples=20, deadline=None)
@given(st.sets(st.integers(0, 40), min_size=2, max_size=12))
def test_only_the_streams_of_a_lost_replica_move(replicas: set[int]) -> None:
    lost = min(replicas)
    before = {stream: home_of(stream, replicas) for stream in STREAMS}
    after = {stream: home_of(stream, replicas - {lost}) for stream in STREAMS}
    assert all(after[stream] == before[stream] for stream in STREAMS if before[stream] != lost)
    assert lost not in after.values()


def test_streams_are_spread_evenly() -> None:
    counts = [sum(home_of(stream, range(4)) == number for stream in STREAMS) for number in range(4)]
    assert min(counts) > 60


def test_without_replicas_there_is_no_home() -> None:
    assert home_of("a", []) is None


def test_a_stream_moves_home_once_those_before_are_answered() -> None:
    released: list[tuple[int, str]] = []

    async def release(number: int, stream: str) -> None:
        released.append((number, stream))

    async def play() -> list[int | None]:
        places, seen = Places(release), list[int | None]()
        stream = next(s for s in STREAMS if home_of(s, {0, 1}) == 1)
        places.live = {0}
        async with places.visit(stream) as first:
            seen.append(first)
            places.live.add(1)
            waiting = asyncio.ensure_future(_visit(places, stream))
            await asyncio.sleep(0)
            assert not waiting.done()
            assert released == []
        seen.append(await waiting)
        assert released == [(0, stream)]
        places.lose(1)
        seen.append(await _visit(places, stream))
        assert released == [(0, stream)]  # who is lost need not let go
        return seen

    assert asyncio.run(play()) == [0, 1, 0]


def test_what_a_replica_holds_is_known_and_forgotten() -> None:
    async def release(number: int, stream: str) -> None:
        raise AssertionError("there is nothing to release")

    async def play() -> None:
        places = Places(release)
        places.put("a", 3)
        assert places.of("a") == 3
        places.lose(3)
        assert places.of("a") is None
        assert await _visit(places, "a") is None
        places.forget("a")
        assert places.of("a") is None

    asyncio.run(play())


async def _visit(places: Places, stream: str) -> int | None:
    async with places.visit(stream) as number:
        return number
