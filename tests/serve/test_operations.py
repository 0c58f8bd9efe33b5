"""Killed or stopped, the service loses nothing that it acknowledged, and goes on from a snapshot."""

from __future__ import annotations

import json
import os
import random
import socket
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.live.toys import states_equal
from tests.serve.services import MODEL, PRIVATE, make_network, picture, pixels, process
from trust_tta.live.snapshots import Folder
from trust_tta.serve.pool import Pool
from trust_tta.serve.service import Service

INFER = f"/v2/models/{MODEL}/infer"

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs signals")


def load(address: str, acknowledged: dict[str, int], stop: threading.Event) -> None:
    """Predictions, feedback and requests to a stream, until the service is gone; what it acknowledged is noted."""
    raw = pixels(8)
    tensor = {"name": "images", "datatype": "UINT8", "shape": list(raw.shape), "data": raw.ravel().tolist()}
    with httpx.Client(base_url=address, timeout=60) as client:
        try:
            while not stop.is_set():
                answer = client.post(INFER, json={"inputs": [tensor]}).json()
                name = f"{answer['parameters']['prediction']}-3"
                if client.post("/feedback", json={"id": name, "label": 2}).status_code == 200:
                    acknowledged[name] = 2
                if client.post("/streams/default/rollback", headers=PRIVATE).status_code == 200:
                    acknowledged["events"] = acknowledged.get("events", 0) + 1
        except (httpx.HTTPError, KeyError):
            return


def stored(folder: Path) -> tuple[dict[str, int], int]:
    with closing(sqlite3.connect(folder / "state" / "journal.sqlite")) as journal:
        labels = dict(journal.execute("SELECT prediction, label FROM feedback").fetchall())
        (events,) = journal.execute("SELECT count(*) FROM events WHERE kind = 'request'").fetchone()
    return labels, events


def newest(folder: Path) -> Any:
    snapshots = Folder(folder / "state" / "streams" / "default")
    found, problems = snapshots.newest()
    snapshots.close()
    assert problems == []
    assert found is not None
    return found.state["method"]


def test_killed_under_load_it_keeps_what_it_acknowledged(tmp_path: Path) -> None:
    chance, acknowledged = random.Random(0), dict[str, int]()
    for _ in range(3):
        before = len(acknowledged)
        with process(tmp_path) as running:
            stop = threading.Event()
            client = threading.Thread(target=load, args=(running.address, acknowledged, stop))
            client.start()
            deadline = time.monotonic() + 60
            while len(acknowledged) < before + 3 and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.2 * chance.random())
            running.kill()
            client.join(60)
        labels, events = stored(tmp_path)
        wanted = {name: label for name, label in acknowledged.items() if name != "events"}
        assert len(wanted) >= 2
        assert wanted.items() <= labels.items()
        assert events >= acknowledged["events"]

        state = newest(tmp_path)
        network = make_network(tmp_path)
        service = Service(network, tmp_path / "state")
        assert states_equal(service.pool.get("default").method.state_dict(), state)
        service.pool.close()
        service.start()
        service.stop()


def test_stopped_it_answers_what_was_taken_and_ends_well(tmp_path: Path) -> None:
    answers: list[int] = []
    with process(tmp_path) as running, httpx.Client(base_url=running.address, timeout=60) as client:
        client.post("/predict", content=picture())

        def send(seed: int) -> None:
            try:
                with httpx.Client(base_url=running.address, timeout=60) as own:
                    answers.append(own.post("/predict", content=picture(seed=seed)).status_code)
            except httpx.ConnectError:
                answers.append(0)  # it came after the end

        clients = [threading.Thread(target=send, args=(seed,)) for seed in range(16)]
        for thread in clients:
            thread.start()
        while not answers:
            time.sleep(0.005)
        with client.stream("GET", "/live") as page:  # an open page does not hold the service up
            lines = page.iter_lines()
            next(lines)
            assert running.stop() == 0
            for thread in clients:
                thread.join(60)
        assert set(answers) <= {200, 503, 0}
        assert 200 in answers
    for line in running.log:
        assert "Traceback" not in line
        json.loads(line)
    images = answers.count(200) + 1
    again = Service(make_network(tmp_path), tmp_path / "state")
    assert isinstance(again.pool, Pool)
    assert again.pool.get("default").images >= images
    again.pool.close()
    again.start()
    again.stop()


def test_a_taken_port_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from trust_tta.cli.main import main
    from trust_tta.serve.server import bind

    with closing(bind("127.0.0.1", 0)) as listener:
        listener.listen()
        port = listener.getsockname()[1]
        assert main(["serve", "--port", str(port), "--state", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert f"--port {port}" in told


def test_answers_are_not_held_back() -> None:
    """asyncio sets TCP_NODELAY on connections of a listener that says it is TCP, and on no others."""
    from trust_tta.serve.server import bind

    with closing(bind("127.0.0.1", 0)) as listener:
        assert listener.proto == socket.IPPROTO_TCP
