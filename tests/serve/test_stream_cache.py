"""Streams in memory and on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.live.toys import clean, make, states_equal
from trust_tta.errors import StateError
from trust_tta.live.guard import Guard
from trust_tta.serve.stream_cache import StreamCache


def make_cache(folder: Path, *, max_loaded: int) -> StreamCache:
    return StreamCache(
        make("tent", lr=1e-3),
        folder,
        guard=Guard(),
        max_loaded=max_loaded,
        max_streams=100,
        on_event=lambda stream, event: None,
    )


def test_least_recently_used_stream_is_moved_to_disk(tmp_path: Path) -> None:
    streams = make_cache(tmp_path, max_loaded=3)
    (images,) = clean(1)
    first = streams.open("a")
    first(images)
    for name in ("b", "c", "b", "a", "d"):
        streams.open(name)
    assert streams.loaded == ["b", "a", "d"]
    assert streams.names == ["a", "b", "c", "d"]
    assert streams.open("a") is first
    for name in ("e", "f", "g"):
        streams.open(name)
    assert "a" not in streams.loaded
    assert "a" in streams
    with pytest.raises(StateError, match="closed"):
        first(images)
    again = streams.open("a")
    assert again is not first
    assert states_equal(again.method.state_dict(), first.method.state_dict())
    streams.close()
    assert streams.loaded == []


def test_streams_in_a_small_cache_adapt_as_if_alone(tmp_path: Path) -> None:
    streams, names, rounds = make_cache(tmp_path, max_loaded=3), [f"s{i}" for i in range(7)], 3
    (images,) = clean(1, size=4)
    for number in range(len(names) * rounds):
        streams.open(names[number % len(names)])(images)
        assert len(streams.loaded) <= 3
    alone = make("tent", lr=1e-3)
    for _ in range(rounds):
        alone(images)
    for name in names:
        stream = streams.open(name)
        assert (stream.batches, stream.images) == (rounds, 4 * rounds)
        assert states_equal(stream.method.state_dict(), alone.state_dict())
    streams.close()
