"""A disk that is full or read-only: nothing that was learned is given up for it, and every answer is true."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.live.toys import states_equal
from tests.serve.services import PRIVATE, picture, serving
from trust_tta.live.guard import Event
from trust_tta.serve.event_log import Journal


@contextmanager
def full_disk() -> Iterator[None]:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.replace", full)
        yield


def test_a_stream_that_cannot_be_written_stays_in_memory(tmp_path: Path) -> None:
    with serving(tmp_path, most_loaded=2) as (client, service):
        for name in ("a", "b"):
            client.post("/predict", content=picture(), params={"stream": name})
        learned = service.pool._loaded["a"].method.state_dict()
        with full_disk():
            refused = client.post("/predict", content=picture(), params={"stream": "c"})
            assert refused.status_code == 503
            assert "'a' cannot be written" in refused.json()["error"]
            assert int(refused.headers["retry-after"]) > 0
            assert client.post("/predict", content=picture(), params={"stream": "b"}).status_code == 200
        assert states_equal(learned, service.pool._loaded["a"].method.state_dict())
        assert client.post("/predict", content=picture(), params={"stream": "c"}).status_code == 200
        assert client.get("/streams/a/state", headers=PRIVATE).status_code == 200


def test_what_is_asked_of_a_full_disk_is_not_said_to_be_done(tmp_path: Path) -> None:
    with serving(tmp_path) as (client, service):
        client.post("/predict", content=picture())
        state = client.get("/streams/default/state", headers=PRIVATE).content
        client.post("/predict", content=picture())
        with full_disk():
            fork = client.post("/streams/default/fork", json={"to": "new"}, headers=PRIVATE)
            assert (fork.status_code, "new" in service.pool) == (503, False)
            assert client.get("/streams/default/state", headers=PRIVATE).status_code == 503
            assert client.put("/streams/default/state", content=state, headers=PRIVATE).status_code == 200  # in memory
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("shutil.rmtree", lambda *_, **__: None)
            assert client.delete("/streams/default", headers=PRIVATE).status_code == 503
        fork = client.post("/streams/default/fork", json={"to": "new"}, headers=PRIVATE)
        assert fork.json()["batches"] == 1
        assert client.delete("/streams/default", headers=PRIVATE).status_code == 200


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    with serving(tmp_path) as (client, service):

        def read_only(*_: object, **__: object) -> None:
            raise OSError(30, "Read-only file system")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(service.pool.folder), "mkdir", read_only)
            refused = client.post("/predict", content=picture(), params={"stream": "a"})
        assert refused.status_code == 503
        assert "cannot be kept on disk (Read-only file system)" in refused.json()["error"]
        assert client.post("/predict", content=picture(), params={"stream": "a"}).status_code == 200


def test_old_events_make_room_for_new_ones(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite", predictions_kept=10, events_kept=30)
    for i in range(200):
        assert journal.add_event("a", Event(i, i, 0.0, "start", "none", "went on", {})) == i + 1
    kept = [event["batch"] for event in journal.events(most=1000)]
    assert kept[-30:] == list(range(170, 200))
    assert len(kept) <= 34
    journal.close()
