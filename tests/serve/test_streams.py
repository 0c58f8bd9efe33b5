"""Streams by name: own weights, eviction to disk, shared batches, and routes that need the token."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.live.toys import states_equal
from tests.serve.services import MODEL, PRIVATE, make_network, picture, pixels, running, serving
from trust_tta.errors import ConfigError, StateError
from trust_tta.live.snapshots import Folder
from trust_tta.live.stream import Stream
from trust_tta.serve.event_log import EventLog, Feedback, StoredPrediction
from trust_tta.serve.service import Service
from trust_tta.serve.settings import Settings

INFER = f"/v2/models/{MODEL}/infer"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, Service]]:
    with serving(tmp_path_factory.mktemp("streams"), max_loaded=2, max_streams=12) as served:
        yield served


def infer(client: httpx.Client, stream: str, *, count: int = 4, seed: int = 0, adapt: bool = True) -> torch.Tensor:
    raw = pixels(count, seed=seed)
    tensor = {"name": "images", "datatype": "UINT8", "shape": list(raw.shape), "data": raw.ravel().tolist()}
    parameters = {"stream": stream, "adapt": adapt}
    response = client.post(INFER, json={"inputs": [tensor], "parameters": parameters})
    assert response.status_code == 200, response.text
    return torch.tensor(response.json()["outputs"][0]["data"]).view(count, -1)


def summary(client: httpx.Client, name: str) -> dict[str, Any]:
    streams: list[dict[str, Any]] = client.get("/streams").json()["streams"]
    return next(stream for stream in streams if stream["name"] == name)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_image_file_is_predicted(served: tuple[httpx.Client, Service], kind: str) -> None:
    client, service = served
    data = picture(kind, size=40)
    by_form = client.post("/predict", files={"image": ("photo", data)}, params={"adapt": "false"}).json()
    by_body = client.post("/predict", content=data, headers={"X-Stream": "default"}, params={"adapt": "false"}).json()
    assert by_form | {"id": ""} == by_body | {"id": ""}
    assert set(by_form) == {"class", "label", "confidence", "stream", "adapted", "id"}
    assert service.network.classes is not None
    assert by_form["label"] == service.network.classes[by_form["class"]]
    assert 0.25 <= by_form["confidence"] <= 1
    assert (by_form["stream"], by_form["adapted"]) == ("default", False)


def test_each_stream_adapts_its_own_weights(served: tuple[httpx.Client, Service], tmp_path: Path) -> None:
    """Interleaved, two streams give what two streams of their own give."""
    client, _ = served
    alone = {name: Stream(make_network(tmp_path).method) for name in ("left", "right")}
    preprocess = make_network(tmp_path).preprocessing
    for step in range(3):
        for i, (name, stream) in enumerate(alone.items()):
            seed = 10 * step + i
            expected = stream(preprocess(pixels(4, seed=seed))).logits
            torch.testing.assert_close(infer(client, name, seed=seed), expected, rtol=1e-4, atol=1e-5)
    assert not states_equal(alone["left"].method.state_dict(), alone["right"].method.state_dict())


def test_stream_continues_from_a_downloaded_state(served: tuple[httpx.Client, Service]) -> None:
    client, _ = served
    infer(client, "origin", seed=1)
    state = client.get("/streams/origin/state", headers=PRIVATE).content
    expected = infer(client, "origin", seed=2)
    infer(client, "origin", seed=3)
    for name in ("origin", "twin"):
        assert client.put(f"/streams/{name}/state", content=state).status_code == 401
        answer = client.put(f"/streams/{name}/state", content=state, headers=PRIVATE)
        assert (answer.status_code, answer.json()["action"], answer.json()["batches"]) == (200, "load", 1)
        assert torch.equal(infer(client, name, seed=2), expected)
    for damaged in (b"", state[:-3], b"x" * 100):
        answer = client.put("/streams/damaged/state", content=damaged, headers=PRIVATE)
        assert answer.status_code == 400
        assert "that was sent cannot be read" in answer.json()["error"]
    assert "damaged" not in [stream["name"] for stream in client.get("/streams").json()["streams"]]
    for name in ("origin", "twin"):
        client.delete(f"/streams/{name}", headers=PRIVATE)


def test_evicted_stream_is_restored_exactly(served: tuple[httpx.Client, Service], tmp_path: Path) -> None:
    client, service = served
    alone = Stream(make_network(tmp_path).method)
    preprocess = make_network(tmp_path).preprocessing
    for step in range(4):
        expected = alone(preprocess(pixels(4, seed=100 + step))).logits
        torch.testing.assert_close(infer(client, "guest", seed=100 + step), expected, rtol=1e-4, atol=1e-5)
        for other in ("x", "y"):
            infer(client, other)
        assert "guest" not in service.streams.loaded
        assert len(service.streams.loaded) == 2
    assert summary(client, "guest")["batches"] == 4
    assert not summary(client, "guest")["loaded"]


def test_predict_only_leaves_the_state_unchanged(served: tuple[httpx.Client, Service]) -> None:
    client, _ = served
    infer(client, "still")
    first = infer(client, "still", seed=5, adapt=False)
    assert torch.equal(first, infer(client, "still", seed=5, adapt=False))
    assert summary(client, "still")["batches"] == 1


def test_changing_a_stream_needs_the_token(served: tuple[httpx.Client, Service]) -> None:
    client, _ = served
    infer(client, "kept")
    for method, path in (
        ("POST", "pause"), ("POST", "resume"), ("POST", "reset"), ("POST", "rollback"),
        ("GET", "state"), ("GET", "checkpoint"),
    ):  # fmt: skip
        assert client.request(method, f"/streams/kept/{path}").status_code == 401
        wrong = client.request(method, f"/streams/kept/{path}", headers={"Authorization": "Bearer other"})
        assert wrong.status_code == 403
    assert client.delete("/streams/kept").status_code == 401
    assert client.post("/streams/unheard/pause", headers=PRIVATE).status_code == 404
    assert client.post("/streams/kept/explode", headers=PRIVATE).status_code == 404


def test_pause_resume_and_reset(served: tuple[httpx.Client, Service]) -> None:
    client, _ = served
    source = infer(client, "reset", seed=1, adapt=False)
    infer(client, "reset", seed=2)
    assert client.post("/streams/reset/pause", headers=PRIVATE).json() == {"stream": "reset", "action": "pause"}
    paused = infer(client, "reset", seed=1)
    assert torch.equal(paused, infer(client, "reset", seed=1))
    assert client.post("/streams/reset/resume", headers=PRIVATE).status_code == 200
    assert client.post("/streams/reset/reset", headers=PRIVATE).json()["action"] == "source"
    assert torch.equal(infer(client, "reset", seed=1, adapt=False), source)
    kinds = [(e["kind"], e["action"]) for e in client.get("/events", params={"stream": "reset"}).json()["events"]]
    assert [k for k in kinds if k[0] == "request"] == [
        ("request", "pause"), ("request", "resume"), ("request", "source"),
    ]  # fmt: skip


def test_copied_stream_is_independent_and_removable(served: tuple[httpx.Client, Service]) -> None:
    client, service = served
    infer(client, "parent", seed=3)
    state = client.get("/streams/parent/state", headers=PRIVATE).content
    assert client.put("/streams/child/state", content=state, headers=PRIVATE).json()["batches"] == 1
    assert torch.equal(infer(client, "parent", seed=4, adapt=False), infer(client, "child", seed=4, adapt=False))
    infer(client, "child", seed=6)
    assert not torch.equal(infer(client, "parent", seed=4, adapt=False), infer(client, "child", seed=4, adapt=False))
    assert client.delete("/streams/child", headers=PRIVATE).status_code == 200
    assert "child" not in service.streams.names
    assert not (service.streams.folder / "child").exists()


def test_state_of_a_stream_is_its_snapshot(served: tuple[httpx.Client, Service], tmp_path: Path) -> None:
    client, service = served
    infer(client, "state", seed=3)
    folder = Folder(tmp_path / "copy")
    folder.file(1).write_bytes(client.get("/streams/state/state", headers=PRIVATE).content)
    folder.close()
    stored = Folder(service.streams.folder / "state")
    number = stored.numbers()[-1]
    assert folder.file(1).read_bytes() == stored.file(number).read_bytes()
    stored.close()


def test_feedback_enters_the_test_of_its_stream(served: tuple[httpx.Client, Service]) -> None:
    """A label for which only the source was right is evidence of harm; a corrected label is not counted again."""
    client, service = served
    answers = [client.post("/predict?stream=told", content=picture(seed=seed)).json() for seed in range(4)]
    stream = service.streams.open("told")
    test = stream._session.monitor.comparison.test  # type: ignore[union-attr]
    before = test.steps, test.e_value
    stored = EventLog(service.event_log.path)
    stored._durable.execute("UPDATE predictions SET adapted = 0, source = 1, batch = 1 WHERE stream = 'told'")
    stored._durable.execute("UPDATE predictions SET source = NULL WHERE id = ?", (answers[3]["id"],))
    stored._durable.commit()
    stored.close()
    for _ in range(2):
        client.post("/feedback", json=[{"id": answer["id"], "label": 1} for answer in answers])
    service.engine.submit_task(lambda: None).result(10)
    assert test.steps == before[0] + 3
    assert test.e_value > before[1]
    client.delete("/streams/told", headers=PRIVATE)


def test_event_log_of_an_earlier_version_is_extended(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with sqlite3.connect(path) as old:
        old.execute(
            "CREATE TABLE predictions (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, "
            "stream TEXT NOT NULL, time REAL NOT NULL, class INTEGER NOT NULL)"
        )
        old.execute("INSERT INTO predictions (id, stream, time, class) VALUES ('a-0', 's', 0, 2)")
    log = EventLog(path)
    log.add_predictions("s", [StoredPrediction("b-0", 1, (7, 1, 2))])
    assert log.add_feedback([("a-0", 2), ("b-0", 2)]) == [
        Feedback("a-0", "s", 2, 2),
        Feedback("b-0", "s", 1, 2, compared=(7, 1, 2)),
    ]
    log.close()


def test_feedback_is_counted_and_survives_a_restart(tmp_path: Path) -> None:
    with serving(tmp_path) as (client, service):
        answers = [client.post("/predict", content=picture(seed=seed)).json() for seed in range(3)]
        one = client.post("/feedback", json={"id": answers[0]["id"], "label": answers[0]["label"]})
        assert one.json() == {"stored": 1, "right": 1, "unknown": []}
        wrong = (answers[1]["class"] + 1) % 4
        many = [{"id": answers[1]["id"], "label": wrong}, {"id": "unheard-0", "label": 0}]
        assert client.post("/feedback", json=many).json() == {"stored": 1, "right": 0, "unknown": ["unheard-0"]}
        assert client.post("/feedback", json={"id": "unheard-0", "label": 0}).status_code == 404
        assert client.post("/feedback", json={"id": answers[2]["id"], "label": "mouse"}).status_code == 400
        assert client.post("/feedback", json={"id": answers[2]["id"], "label": 4}).status_code == 400
        assert summary(client, "default")["labels"] == 2
        assert summary(client, "default")["accuracy"] == 0.5
        assert 'trust_tta_feedback_total{right="true"} 1.0' in client.get("/metrics").text
        assert (
            client.post("/feedback", json={"id": answers[0]["id"], "label": answers[0]["label"]}).json()["stored"] == 1
        )
        twice = [{"id": answers[1]["id"], "label": wrong}, {"id": answers[1]["id"], "label": answers[1]["class"]}]
        client.post("/feedback", json=[*twice, twice[0]])
        assert (summary(client, "default")["labels"], summary(client, "default")["right"]) == (2, 1)  # as before
        assert 'trust_tta_feedback_total{right="true"} 1.0' in client.get("/metrics").text
        network, folder = service.network, service.folder
    again = Service(network, folder)
    assert again.event_log.label_counts("default")[:2] == (2, 1)
    assert again.streams.names == ["default"]
    with running(again) as address, httpx.Client(base_url=address, timeout=60) as client:
        late = client.post("/feedback", json={"id": answers[2]["id"], "label": answers[2]["class"]})
        assert late.json()["stored"] == 1
        assert client.get("/events").json()["events"] == []
        client.post("/predict", content=picture())
        assert summary(client, "default")["batches"] == 4


def test_requests_of_a_stream_share_batches(tmp_path: Path) -> None:
    count = 12
    with serving(tmp_path, max_wait=0.5, batch_size=count) as (client, _):
        client.post("/predict", content=picture())  # the stream is made
        start = threading.Barrier(count)

        def send(seed: int) -> str:
            with httpx.Client(base_url=client.base_url, timeout=60) as own:
                start.wait()
                return str(own.post("/predict", content=picture(seed=seed)).json()["id"])

        with ThreadPoolExecutor(count) as pool:
            ids = list(pool.map(send, range(count)))
        assert len(set(ids)) == count
        assert summary(client, "default")["images"] == 1 + count
        assert summary(client, "default")["batches"] <= 1 + count // 2


def test_too_many_streams_are_refused(tmp_path: Path) -> None:
    with serving(tmp_path, max_streams=2) as (client, _):
        for name in ("a", "b", "a"):
            infer(client, name)
        refused = client.post("/predict", content=picture(), headers={"X-Stream": "c"})
        assert refused.status_code == 429
        assert "2 streams" in refused.json()["error"]


def test_state_folder_belongs_to_one_service_and_method(tmp_path: Path) -> None:
    network = make_network(tmp_path)
    service = Service(network, tmp_path / "state")
    with pytest.raises(StateError, match="belongs to a stream or a service that is running"):
        Service(network, tmp_path / "state")
    service.stop()
    with pytest.raises(ConfigError, match="streams of another method"):
        Service(make_network(tmp_path, "source"), tmp_path / "state", settings=Settings())


def test_metrics_follow_prometheus_conventions(served: tuple[httpx.Client, Service]) -> None:
    client, _ = served
    infer(client, "measured")
    text = client.get("/metrics").text
    names = {line.split()[2]: line.split()[3] for line in text.splitlines() if line.startswith("# TYPE")}
    assert names["trust_tta_images_total"] == "counter"
    assert names["trust_tta_request_duration_seconds"] == "histogram"
    assert names["trust_tta_build_info"] == "gauge"
    assert all(name.startswith("trust_tta_") for name in names)
    assert all(name.endswith("_total") == (kind == "counter") for name, kind in names.items())
    assert 'trust_tta_stream_entropy_nats{stream="measured"}' in text
