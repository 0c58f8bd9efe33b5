"""Killed at any moment, a stream goes on from its last snapshot, and ends where one that ran through ends."""

from __future__ import annotations

import os
import random
import sys
import time
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from tests.live.toys import clean, states_equal, untrained
from tests.processes import forking_context
from trust_tta.live.guard import Guard
from trust_tta.live.snapshots import Folder
from trust_tta.live.stream import Stream
from trust_tta.methods.registry import create_method

BATCHES = 60
OFTEN = Guard(snapshot_every=64)


def open_stream(folder: str | Path | None) -> Stream:
    return Stream(create_method("shot", untrained(), lr=2e-2), guard=OFTEN, snapshots=folder)


def serve(stream: Stream, said: Connection | None = None) -> Stream:
    """All batches that are left; a word to `said` after each."""
    images = clean(BATCHES, size=32)
    while stream.batches < BATCHES:
        stream(images[stream.batches])
        if said is not None:
            said.send(stream.batches)
    return stream


@cache
def restored_at() -> int:
    """Batches after which the guard first restores the source: steps of this length ruin the untrained network."""
    stream, found = open_stream(None), list[int]()
    restore = stream._session.restore_source

    def recorded() -> str:
        found.append(stream.batches)
        return restore()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream._session, "restore_source", recorded)
        serve(stream)
    assert 3 <= found[0] < BATCHES - 3
    return found[0]


def serve_in_child(folder: Path, said: Connection) -> None:
    torch.set_num_threads(1)
    serve(open_stream(folder), said)


@pytest.mark.skipif(os.name != "posix", reason="needs kill -9")
def test_killed_at_random_moments_it_ends_in_the_same_state(tmp_path: Path) -> None:
    chance = random.Random(0)
    for _ in range(3):
        heard, said = Pipe(duplex=False)
        child = forking_context().Process(target=serve_in_child, args=(tmp_path, said))
        child.start()
        said.close()
        for _ in range(chance.randint(3, 15)):
            heard.recv()
        time.sleep(chance.random() * 0.02)
        child.kill()
        child.join(60)
        heard.close()
        assert child.exitcode == -9

        folder = Folder(tmp_path)
        newest, problems = folder.newest()
        folder.close()
        assert problems == []
        assert newest is not None
        restarted = open_stream(tmp_path)
        assert states_equal(restarted.method.state_dict(), newest.state["method"])
        del restarted

    ended = serve(open_stream(tmp_path))
    torch.manual_seed(1)  # whatever the process drew before
    through = serve(open_stream(None))
    assert states_equal(ended.method.state_dict(), through.method.state_dict())
    assert not list(tmp_path.glob(".*.tmp"))


def test_killed_while_it_restores_the_source_it_does_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_stream(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(first._session, "restore_source", lambda: sys.exit("killed"))
        with pytest.raises(SystemExit):
            serve(first)
    assert first.batches == restored_at()
    first._release()
    again = open_stream(tmp_path)
    assert restored_at() - 2 <= again.batches < restored_at()
    assert states_equal(serve(again).method.state_dict(), serve(open_stream(None)).method.state_dict())


@pytest.mark.parametrize("later", [-1, 0, 1])
def test_restart_around_a_restored_source_ends_in_the_same_state(later: int, tmp_path: Path) -> None:
    images = clean(BATCHES, size=32)
    first = open_stream(tmp_path)
    for batch in images[: restored_at() + later]:
        first(batch)
    first._release()  # as a killed process does: nothing more is written
    ended = serve(open_stream(tmp_path))
    assert states_equal(ended.method.state_dict(), serve(open_stream(None)).method.state_dict())
