"""The service over a real cluster: streams stay with replicas, outlive them, and are seen as one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import httpx
import pytest

from trust_tta.optional import available

if not all(map(available, ("ray", "fastapi", "starlette", "uvicorn", "prometheus_client"))):
    pytest.skip("Ray Serve is not installed", allow_module_level=True)

from tests.serve.services import PRIVATE, TOKEN, picture, write_checkpoint
from trust_tta.distributed.serving import ReplicaConfig, merge_events, start_serving, stop_serving
from trust_tta.serve.metrics import sum_metrics
from trust_tta.serve.network import NetworkSource
from trust_tta.serve.server import bind

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray Serve's own
IMAGE = {"image": ("a.png", picture(), "image/png")}


@pytest.fixture(scope="module")
def client(ray: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("replicas")
    source = NetworkSource(str(write_checkpoint(folder)))
    config = ReplicaConfig(source, "tide", str(folder / "state"), TOKEN, cpus=0.25)
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    listener.close()
    try:
        start_serving(config, config.open_network(), host="127.0.0.1", port=port, replicas=2)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as made:
            until(lambda: all(r["live"] for r in replicas(made)))
            yield made
    finally:
        stop_serving()


def replicas(client: httpx.Client) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.get("/replicas").json()["replicas"]
    return found


def holder(client: httpx.Client, stream: str) -> dict[str, Any]:
    return next(r for r in replicas(client) if stream in r["streams"])


def images_of(client: httpx.Client, stream: str) -> int:
    entries = client.get("/streams").json()["streams"]
    return next(int(entry["images"]) for entry in entries if entry["name"] == stream)


def predict(client: httpx.Client, stream: str) -> dict[str, Any]:
    answer = client.post("/predict", params={"stream": stream}, files=IMAGE)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def until(true: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_streams_stay_with_their_replica_and_reports_are_merged(client: httpx.Client) -> None:
    names = [f"camera-{i}" for i in range(6)]
    answers = [predict(client, name) for name in names for _ in range(2)]
    listed = replicas(client)
    assert sorted(name for r in listed for name in r["streams"]) == names
    assert all(r["streams"] for r in listed)
    assert {entry["name"]: entry["images"] for entry in client.get("/streams").json()["streams"]} == dict.fromkeys(
        names, 2
    )
    metrics = client.get("/metrics").text
    assert 'trust_tta_images_total{adapted="true"} 12.0' in metrics
    assert 'trust_tta_streams{place="memory"} 6.0' in metrics
    assert 'trust_tta_replicas{state="live"} 2.0' in metrics
    labels = [{"id": answer["id"], "label": answer["class"]} for answer in answers]
    assert client.post("/feedback", json=labels).json() == {"stored": 12, "right": 12, "unknown": []}
    live = client.get("/live").json()
    assert sorted(stream["name"] for stream in live["streams"]) == sorted(live["names"]) == names
    assert client.get("/live", params={"since": live["now"] + 1}).json()["streams"] == []


def test_changes_need_the_token(client: httpx.Client) -> None:
    assert client.post("/streams/camera-0/pause").status_code == 401
    assert client.post("/streams/camera-0/pause", headers=PRIVATE).status_code == 200
    assert client.post("/streams/camera-0/resume", headers=PRIVATE).status_code == 200


def test_stream_of_a_killed_replica_continues_from_its_snapshot_and_returns(client: httpx.Client) -> None:
    for _ in range(4):
        predict(client, "moving")
    for action in ("pause", "resume"):  # each writes a snapshot
        assert client.post(f"/streams/moving/{action}", headers=PRIVATE).status_code == 200
    home = holder(client, "moving")
    os.kill(home["pid"], signal.SIGKILL)
    predict(client, "moving")
    assert images_of(client, "moving") == 5  # four of the snapshot, and this one
    assert holder(client, "moving")["pid"] != home["pid"]  # another replica's, or that of this one started again
    until(lambda: all(r["live"] for r in replicas(client)))
    predict(client, "moving")
    assert images_of(client, "moving") == 6
    back = holder(client, "moving")
    assert back["replica"] == home["replica"]
    assert back["pid"] != home["pid"]


def test_copy_and_removal_are_visible_everywhere(client: httpx.Client) -> None:
    predict(client, "one")
    state = client.get("/streams/one/state", headers=PRIVATE).content
    assert client.put("/streams/two/state", content=state, headers=PRIVATE).json()["batches"] == 1
    predict(client, "two")
    assert images_of(client, "two") == 2
    assert client.delete("/streams/one", headers=PRIVATE).status_code == 200
    assert "one" not in {entry["name"] for entry in client.get("/streams").json()["streams"]}
    assert client.post("/streams/one/pause", headers=PRIVATE).status_code == 404


def test_metrics_are_summed() -> None:
    texts = [
        b'# TYPE a_total counter\na_total{x="1"} 2.0\n',
        b'# TYPE a_total counter\na_total{x="1"} 3.0\na_total{x="2"} 1.0\n',
    ]
    samples = {tuple(s.labels.values()): s.value for s in sum_metrics(texts)["a"].samples}
    assert samples == {("1",): 5.0, ("2",): 1.0}


def test_merged_events_are_in_order_with_unique_ids() -> None:
    told = {0: [{"id": 1, "time": 2.0}, {"id": 2, "time": 4.0}], 1: [{"id": 1, "time": 3.0}]}
    events = merge_events(told)
    assert [event["time"] for event in events] == [2.0, 3.0, 4.0]
    assert len({event["id"] for event in events}) == 3
