"""Stopped, the service answers what it has taken; a port that is taken is one line."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from tests.serve.services import make_network, picture, process
from trust_tta.serve.service import Service
from trust_tta.serve.stream_cache import StreamCache

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs signals")


def test_sigterm_answers_accepted_requests_and_exits_with_0(tmp_path: Path) -> None:
    answers: list[int] = []
    with process(tmp_path) as running, httpx.Client(base_url=running.address, timeout=60) as client:
        client.post("/predict", content=picture())

        def send(seed: int) -> None:
            try:
                with httpx.Client(base_url=running.address, timeout=60) as own:
                    answers.append(own.post("/predict", content=picture(seed=seed)).status_code)
            except (httpx.ConnectError, httpx.ReadError):
                answers.append(0)  # it came after the end, or as the port was closed

        clients = [threading.Thread(target=send, args=(seed,)) for seed in range(16)]
        for thread in clients:
            thread.start()
        while not answers:
            time.sleep(0.005)
        client.get("/live")  # the connection of an open page does not hold the service up
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
    assert isinstance(again.streams, StreamCache)
    assert again.streams.open("default").images >= images
    again.streams.close()
    again.stop()


def test_port_in_use_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from trust_tta.cli.main import main
    from trust_tta.serve.server import bind

    with closing(bind("127.0.0.1", 0)) as listener:
        listener.listen()
        port = listener.getsockname()[1]
        assert main(["serve", "--port", str(port), "--state", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert f"--port {port}" in told


def test_listener_disables_nagle() -> None:
    """asyncio sets TCP_NODELAY on connections of a listener that says it is TCP, and on no others."""
    from trust_tta.serve.server import bind

    with closing(bind("127.0.0.1", 0)) as listener:
        assert listener.proto == socket.IPPROTO_TCP
