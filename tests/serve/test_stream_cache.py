"""Streams in memory and on disk, asked for by several threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

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


def test_least_recently_used_stream_is_evicted_unless_in_use(tmp_path: Path) -> None:
    streams = make_cache(tmp_path, max_loaded=3)
    (images,) = clean(1)
    with streams.using("a") as first:
        for name in ("b", "c", "b", "d", "e"):
            with streams.using(name):
                pass
        assert streams.loaded == ["a", "d", "e"]  # c went before b, and a, which is older than both, stayed
        first(images)
        with streams.using("a") as again:
            assert again is first
    with streams.using("f"):
        assert streams.loaded == ["e", "a", "f"]
    with streams.using("g"), streams.using("h"):
        pass
    assert "a" not in streams.loaded
    with pytest.raises(StateError, match="closed"):
        first(images)
    with streams.using("a") as back:
        assert states_equal(back.method.state_dict(), first.method.state_dict())
    streams.close()
    assert streams.loaded == []


def test_stream_being_written_is_reopened_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks for it meanwhile gets it back from disk, not the one that is being closed."""
    streams, leaving, let_go = make_cache(tmp_path, max_loaded=1), threading.Event(), threading.Event()
    with streams.using("a") as first:
        first(clean(1)[0])

    def slowly(*, even_unsaved: bool) -> bool:
        leaving.set()
        assert let_go.wait(30)
        return type(first).close(first, even_unsaved=even_unsaved)

    monkeypatch.setattr(first, "close", slowly)

    def learned(name: str) -> tuple[bool, int]:
        with streams.using(name) as stream:
            return stream is first, stream.images

    with ThreadPoolExecutor(2) as threads:
        other = threads.submit(learned, "b")
        assert leaving.wait(30)
        again = threads.submit(learned, "a")
        assert "a" in streams  # it has a folder, if no place in memory
        let_go.set()
        assert other.result(30) == (False, 0)
        assert again.result(30) == (False, 32)
    streams.close()


def test_many_threads_share_a_small_cache(tmp_path: Path) -> None:
    """Whatever comes and goes, each stream has seen all its images, and none is in memory twice."""
    streams, names, rounds = make_cache(tmp_path, max_loaded=3), [f"s{i}" for i in range(7)], 6
    (images,), turns = clean(1, size=4), [threading.Lock() for _ in names]

    def visit(number: int) -> None:
        with turns[number % len(names)], streams.using(names[number % len(names)]) as stream:
            stream(images)
            assert len(streams.loaded) <= 3

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(visit, range(len(names) * rounds)))
    alone = make("tent", lr=1e-3)
    for _ in range(rounds):
        expected = alone(images)
    for name in names:
        with streams.using(name) as stream:
            assert (stream.batches, stream.images) == (rounds, 4 * rounds)
            assert states_equal(stream.method.state_dict(), alone.state_dict())
    assert torch.isfinite(expected).all()
    streams.close()


def test_all_cached_streams_may_be_in_use(tmp_path: Path) -> None:
    streams = make_cache(tmp_path, max_loaded=3)
    with ExitStack() as stack:
        used = [stack.enter_context(streams.using(name)) for name in ("a", "b", "c")]
        assert len({id(stream) for stream in used}) == 3
    with streams.using("d"):
        assert streams.loaded == ["b", "c", "d"]
    streams.close()
