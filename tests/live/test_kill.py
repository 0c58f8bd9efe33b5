"""Killed at any moment, a stream goes on from its last snapshot, and ends where one that ran through ends."""

from __future__ import annotations

import os
import random
import sys
import time
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
RESTORED_AT = 6  # batches: the untrained network predicts few classes, and the guard restores the source
OFTEN = Guard(snapshot_every=32)


def open_stream(folder: str | Path | None) -> Stream:
    return Stream(create_method("shot", untrained(), lr=1e-2), guard=OFTEN, snapshots=folder)


def serve(stream: Stream, said: Connection | None = None) -> Stream:
    """All batches that are left; a word to `said` after each."""
    images = clean(BATCHES, size=16)
    while stream.batches < BATCHES:
        stream(images[stream.batches])
        if said is not None:
            said.send(stream.batches)
    return stream


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
    assert first.batches == RESTORED_AT
    first._let_go()
    again = open_stream(tmp_path)
    assert RESTORED_AT - 2 <= again.batches < RESTORED_AT
    assert states_equal(serve(again).method.state_dict(), serve(open_stream(None)).method.state_dict())


@pytest.mark.parametrize("stop", [RESTORED_AT - 1, RESTORED_AT, RESTORED_AT + 1])
def test_restart_around_a_restored_source_ends_in_the_same_state(stop: int, tmp_path: Path) -> None:
    images = clean(BATCHES, size=16)
    first = open_stream(tmp_path)
    for batch in images[:stop]:
        first(batch)
    first._let_go()  # as a killed process does: nothing more is written
    ended = serve(open_stream(tmp_path))
    assert states_equal(ended.method.state_dict(), serve(open_stream(None)).method.state_dict())
