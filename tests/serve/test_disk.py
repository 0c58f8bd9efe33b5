"""A full, read-only or changed disk: adapted weights stay in memory, and nothing unwritten is acknowledged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.live.toys import states_equal
from tests.serve.services import PRIVATE, picture, serving
from trust_tta.live.guard import Event
from trust_tta.serve.event_log import EventLog


@contextmanager
def full_disk() -> Iterator[None]:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.replace", full)
        yield


def test_unwritable_stream_stays_in_memory(tmp_path: Path) -> None:
    with serving(tmp_path, max_loaded=2) as (client, service):
        for name in ("a", "b"):
            client.post("/predict", content=picture(), params={"stream": name})
        learned = service.streams._loaded["a"].method.state_dict()
        with full_disk():
            refused = client.post("/predict", content=picture(), params={"stream": "c"})
            assert refused.status_code == 503
            assert "'a' cannot be written" in refused.json()["error"]
            assert int(refused.headers["retry-after"]) > 0
            assert client.post("/predict", content=picture(), params={"stream": "b"}).status_code == 200
        assert states_equal(learned, service.streams._loaded["a"].method.state_dict())
        assert client.post("/predict", content=picture(), params={"stream": "c"}).status_code == 200
        assert client.get("/streams/a/state", headers=PRIVATE).status_code == 200


def test_full_disk_refuses_states(tmp_path: Path) -> None:
    with serving(tmp_path) as (client, service):
        client.post("/predict", content=picture())
        state = client.get("/streams/default/state", headers=PRIVATE).content
        client.post("/predict", content=picture())
        with full_disk():
            copy = client.put("/streams/new/state", content=state, headers=PRIVATE)
            assert copy.status_code == 503
            assert client.get("/streams/default/state", headers=PRIVATE).status_code == 503
            assert client.put("/streams/default/state", content=state, headers=PRIVATE).status_code == 503
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("shutil.rmtree", lambda *_, **__: None)
            assert client.delete("/streams/default", headers=PRIVATE).status_code == 503
        copy = client.put("/streams/new/state", content=state, headers=PRIVATE)
        assert copy.json()["batches"] == 1
        assert client.delete("/streams/default", headers=PRIVATE).status_code == 200


def test_uncreatable_folder_is_one_line(tmp_path: Path) -> None:
    with serving(tmp_path) as (client, service):

        def read_only(*_: object, **__: object) -> None:
            raise OSError(30, "Read-only file system")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(service.streams.folder), "mkdir", read_only)
            refused = client.post("/predict", content=picture(), params={"stream": "a"})
        assert refused.status_code == 503
        assert "cannot be kept on disk (Read-only file system)" in refused.json()["error"]
        assert client.post("/predict", content=picture(), params={"stream": "a"}).status_code == 200


def test_oldest_events_are_pruned(tmp_path: Path) -> None:
    event_log = EventLog(tmp_path / "journal.sqlite", max_predictions=10, max_events=30)
    for i in range(200):
        assert event_log.add_event("a", Event(i, i, 0.0, "start", "none", "went on", {})) == i + 1
    kept = [event["batch"] for event in event_log.events(limit=1000)]
    assert kept[-30:] == list(range(170, 200))
    assert len(kept) <= 34
    event_log.close()
