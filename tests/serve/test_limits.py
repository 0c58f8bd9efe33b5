"""Requests that are too large, too slow, too many or malformed get one line with a 4xx or 503."""

from __future__ import annotations

import io
import json
import random
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from PIL import Image

from tests.serve.services import MODEL, PRIVATE, SIZE, Process, picture, pixels, process, serving
from trust_tta.serve.service import Service

INFER = f"/v2/models/{MODEL}/infer"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, Service]]:
    folder = tmp_path_factory.mktemp("limits")
    with serving(folder, max_bytes=1 << 18, max_pixels=1 << 16, read_seconds=1.0, max_images=8) as served:
        yield served


def connect(client: httpx.Client) -> socket.socket:
    connection = socket.create_connection((client.base_url.host, client.base_url.port or 0), timeout=30)
    connection.settimeout(30)
    return connection


def read_all(connection: socket.socket) -> bytes:
    received = b""
    while True:
        try:
            part = connection.recv(1 << 16)
        except ConnectionResetError:
            return received
        if not part:
            return received
        received += part


def bomb(width: int, height: int) -> bytes:
    """A PNG that claims a size which its few bytes do not show."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(3 * 100), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_decompression_bomb_is_refused(served: tuple[httpx.Client, Service]) -> None:
    for side in (300, 60_000):
        response = served[0].post("/predict", content=bomb(side, side))
        assert response.status_code == 413
        assert "at most 65536" in response.json()["error"]


def test_truncated_image_is_refused(served: tuple[httpx.Client, Service]) -> None:
    for kind in ("PNG", "JPEG", "WEBP"):
        data = picture(kind, size=40)
        assert served[0].post("/predict", content=data[: len(data) // 2]).status_code == 400


def test_other_formats_are_refused(served: tuple[httpx.Client, Service]) -> None:
    buffer = io.BytesIO()
    Image.fromarray(pixels()[0]).save(buffer, "TIFF")
    assert served[0].post("/predict", content=buffer.getvalue()).status_code == 415
    assert served[0].post("/predict", content=b"\x80\x04\x95 a pickle, or what looks like one").status_code == 415


def test_large_body_is_refused(served: tuple[httpx.Client, Service]) -> None:
    client, _ = served
    assert client.post("/predict", content=bytes(1 << 19)).status_code == 413

    def chunks() -> Iterator[bytes]:
        for _ in range(64):
            yield bytes(1 << 14)

    assert client.post("/predict", content=chunks()).status_code == 413  # without a stated length


def test_compressed_body_is_refused(served: tuple[httpx.Client, Service]) -> None:
    headers = {"Content-Encoding": "gzip"}
    assert served[0].post(INFER, content=zlib.compress(bytes(1 << 20)), headers=headers).status_code == 415


def test_slow_body_times_out(served: tuple[httpx.Client, Service]) -> None:
    with closing(connect(served[0])) as connection:
        connection.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nabc")
        assert read_all(connection).startswith(b"HTTP/1.1 408")


def is_closed_on(connection: socket.socket, given: bytes) -> bool:
    """Whether the server ends a connection on which a little comes now and then."""
    connection.settimeout(0.2)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            connection.sendall(given)
            if connection.recv(1) == b"":
                return True
        except TimeoutError:
            pass
        except OSError:
            return True
    return False


def test_unread_body_does_not_keep_the_connection(served: tuple[httpx.Client, Service]) -> None:
    with closing(connect(served[0])) as connection:
        connection.sendall(b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n")
        assert connection.recv(1 << 12).startswith(b"HTTP/1.1 404")
        assert is_closed_on(connection, b"x")


def test_internal_error_is_one_line(served: tuple[httpx.Client, Service], monkeypatch: pytest.MonkeyPatch) -> None:
    client, service = served

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("of our own")

    monkeypatch.setattr(service, "predict", fail)
    monkeypatch.setattr(service, "streams", fail)
    for response in (client.post("/predict", content=picture()), client.get("/streams")):
        assert response.status_code == 500
        assert response.json() == {"error": "an internal error; see the log of the service"}
    for method in ("GET", "PUT", "DELETE"):
        assert client.request(method, "/predict").status_code == 405


def test_feedback_with_an_invalid_id_is_refused(served: tuple[httpx.Client, Service]) -> None:
    for name in (r"\ud800", "é", r"\u0000"):
        response = served[0].post("/feedback", content=f'{{"id": "{name}", "label": 1}}'.encode())
        assert response.status_code in (400, 404)
        assert len(response.text.splitlines()) == 1


def test_slow_headers_are_cut_off(served: tuple[httpx.Client, Service]) -> None:
    client, _ = served
    with closing(connect(client)) as silent, closing(connect(client)) as slow, closing(connect(client)) as second:
        slow.sendall(b"GET /v2 HTTP/1.1\r\nHos")
        second.sendall(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert second.recv(4096).startswith(b"HTTP/1.1 200")
        second.sendall(b"GET /v2 HTTP/1.1\r\nHos")
        for connection in (silent, slow, second):
            assert b"200" not in read_all(connection)
    assert client.get("/v2").status_code == 200


def test_large_header_is_refused(served: tuple[httpx.Client, Service]) -> None:
    client, _ = served
    with closing(connect(client)) as connection:
        connection.sendall(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n")
        with suppress(OSError):  # it is closed while this is sent
            for number in range(1000):
                connection.sendall(f"X-{number}: ".encode() + b"x" * 4000 + b"\r\n")
        assert read_all(connection)[:12] in (b"HTTP/1.1 400", b"")
    longest = client.get("/v2", headers={f"X-{number}": "x" * 4000 for number in range(12)})
    assert longest.status_code == 200


def test_body_in_the_last_header_packet_is_not_counted_as_header(served: tuple[httpx.Client, Service]) -> None:
    body = picture(size=256)
    assert len(body) > 1 << 16
    with closing(connect(served[0])) as connection:
        connection.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nConn")
        time.sleep(0.05)  # so that the first part comes by itself
        connection.sendall(f"ection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        assert read_all(connection).startswith(b"HTTP/1.1 200")


def test_empty_lines_do_not_keep_the_connection(served: tuple[httpx.Client, Service]) -> None:
    """Empty lines may precede a request, but not for ever."""
    client, _ = served
    with closing(connect(client)) as connection:
        connection.sendall(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        assert is_closed_on(connection, b"\r\n")


def test_pipelined_requests_are_answered_in_order(served: tuple[httpx.Client, Service]) -> None:
    with closing(connect(served[0])) as connection:
        paths = (b"/v2", b"/nothing", b"/v2/health/live")
        connection.sendall(b"".join(b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % path for path in paths))
        received = b""
        while received.count(b"HTTP/1.1") < 3 or not received.endswith(b"}"):
            received += connection.recv(1 << 16)
        assert [int(part[:3]) for part in received.split(b"HTTP/1.1 ")[1:]] == [200, 404, 200]


def test_upgrade_offer_is_ignored(served: tuple[httpx.Client, Service]) -> None:
    """Some clients offer HTTP/2 with every request; it is answered with what they have, body and all."""
    client, _ = served
    offer = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABkAAQAoAAAAAIAAAAA"}

    def chunks() -> Iterator[bytes]:
        yield from (body[:100], body[100:])

    for seed in range(3):
        body = picture(seed=seed)
        plain = client.post("/predict?adapt=false", content=body).json()
        for content in (body, chunks()):
            answer = client.post("/predict?adapt=false", content=content, headers=offer)
            assert answer.status_code == 200, answer.text
            assert answer.json() | {"id": ""} == plain | {"id": ""}
    assert client.get("/v2", headers={"Connection": "Upgrade", "Upgrade": "websocket"}).status_code == 200
    with closing(connect(client)) as connection:
        connection.sendall(b"CONNECT elsewhere:80 HTTP/1.1\r\nHost: elsewhere\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 4")


def test_number_of_connections_is_limited(tmp_path: Path) -> None:
    with serving(tmp_path, max_connections=3) as (client, _), ExitStack() as stack:
        assert client.get("/v2").status_code == 200  # stays open
        for _ in range(2):
            connection = stack.enter_context(closing(connect(client)))
            connection.sendall(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        more = stack.enter_context(closing(connect(client)))
        with suppress(OSError):
            more.sendall(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert read_all(more) == b""
        assert client.get("/v2").status_code == 200


def test_full_queues_are_refused_with_retry_after(tmp_path: Path) -> None:
    with serving(tmp_path, max_queued=6, max_queued_total=8, batch_size=4, max_wait=0.01) as (client, service):
        client.post("/predict", content=picture())
        held, let_go = threading.Event(), threading.Event()
        service.engine.submit_task(lambda: held.set() or let_go.wait(30))  # type: ignore[func-returns-value]
        held.wait(30)
        try:
            raw = pixels(4)
            tensor = {"name": "images", "datatype": "UINT8", "shape": list(raw.shape), "data": raw.ravel().tolist()}
            waiting = [
                threading.Thread(target=client.post, args=(INFER,), kwargs={"json": {"inputs": [tensor]}}),
                threading.Thread(
                    target=client.post, args=(f"{INFER}?stream=b",), kwargs={"json": {"inputs": [tensor]}}
                ),
            ]
            waiting[0].start()
            while service.engine.queued < 4:
                time.sleep(0.01)
            full = client.post(INFER, json={"inputs": [tensor]})
            assert (full.status_code, int(full.headers["retry-after"]) >= 1) == (429, True)
            waiting[1].start()
            while service.engine.queued < 8:
                time.sleep(0.01)
            full = client.post("/predict", content=picture(), headers={"X-Stream": "c"})
            assert (full.status_code, int(full.headers["retry-after"]) >= 1) == (503, True)
        finally:
            let_go.set()
        for thread in waiting:
            thread.join(60)
        assert client.post("/predict", content=picture()).status_code == 200


def test_cross_origin_post_is_refused(served: tuple[httpx.Client, Service]) -> None:
    client, _ = served
    foreign = client.post("/predict", content=picture(), headers={"Origin": "http://elsewhere.example"})
    assert foreign.status_code == 403
    own = client.post("/predict", content=picture(), headers={"Origin": str(client.base_url).rstrip("/")})
    assert own.status_code == 200


@pytest.mark.parametrize("name", ["..", "a/b", "a b", "-a", "ä", "x" * 65, ".hidden", "a\x00"])
def test_unsafe_stream_names_are_refused(served: tuple[httpx.Client, Service], name: str) -> None:
    client, service = served
    response = client.post("/predict", content=picture(), params={"stream": name})
    assert response.status_code == 400
    assert "\n" not in response.json()["error"]
    assert name not in service.streams.names


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with process(tmp_path_factory.mktemp("malformed")) as running:
        yield running


def malformed(chance: random.Random) -> tuple[str, str, bytes, dict[str, str]]:
    """A request in which something is wrong: method, path, body, headers."""
    garbage = chance.randbytes(chance.choice([0, 1, 7, 100, 3000]))
    tensor = {"name": "images", "datatype": "FP32", "shape": [1, 3, SIZE, SIZE], "data": [0.5] * (3 * SIZE * SIZE)}
    values = [1, -1, "x", [], [[]], [1e999], True, {"binary_data_size": -1}, ["a"], [2**70], [1, 3, 2**62, 9]]
    broken: dict[str, Any] = {chance.choice(["name", "datatype", "shape", "data", "parameters"]): chance.choice(values)}
    text = json.dumps({"inputs": [{**tensor, **broken}]}).encode()
    form = {"Content-Type": "multipart/form-data; boundary=x"}
    field = b"--x\r\nContent-Disposition: form-data; name=image\r\n\r\n"
    feedback = chance.choice([[], {}, [1], {"id": 3, "label": 1}, {"id": "x"}])
    token = {"Authorization": chance.choice(["", "Bearer", "Basic eDp5", "Bearer x"])}
    options: list[tuple[str, str, bytes, dict[str, str]]] = [
        ("POST", "/predict", garbage, {}),
        ("POST", "/predict", garbage, form),
        ("POST", "/predict", field + garbage + b"\r\n--x--", form),
        ("POST", "/predict", b"--x\r\n\r\n" + garbage, {"Content-Type": "multipart/form-data"}),
        ("POST", "/predict", picture()[: chance.randrange(60)] + garbage[:20], {}),
        ("POST", "/predict?adapt=maybe", picture(), {}),
        ("POST", "/predict?stream=%2e%2e", picture(), {}),
        ("POST", INFER, garbage, {}),
        ("POST", INFER, text, {}),
        ("POST", INFER, text[: chance.randrange(len(text))], {}),
        ("POST", INFER, text, {"Inference-Header-Content-Length": chance.choice(["-1", "x", "99999999", "10", ""])}),
        ("POST", INFER, b"[" * chance.choice([10, 100_000]), {}),
        ("POST", INFER, json.dumps({"inputs": [tensor], "parameters": {"adapt": "no"}}).encode(), {}),
        ("POST", INFER, json.dumps({"inputs": [tensor], "outputs": [{"name": "x"}]}).encode(), {}),
        ("POST", INFER, json.dumps({"inputs": [tensor, tensor]}).encode(), {}),
        ("POST", "/v2/models/other/infer", text, {}),
        ("POST", "/feedback", garbage, {}),
        ("POST", "/feedback", json.dumps(feedback).encode(), {}),
        ("POST", "/feedback", b'{"id": "x", "label": ' + b"9" * 5000 + b"}", {}),
        ("POST", "/streams/default/reset", b"", token),
        ("POST", "/streams/nobody/reset", b"", PRIVATE),
        ("PUT", "/streams/default/state", garbage, PRIVATE),
        ("GET", f"/{chance.choice(['nothing', 'predict', 'v2/models', '%00', 'streams/a/b/c'])}", b"", {}),
        ("GET", "/events?most=" + chance.choice(["0", "x", "9" * 40, "-1"]), b"", {}),
        ("PATCH", "/predict", b"", {}),
    ]  # fmt: skip
    return chance.choice(options)


def test_malformed_requests_get_one_line_and_no_traceback(server: Process) -> None:
    chance = random.Random(0)
    with httpx.Client(base_url=server.address, timeout=60) as client:
        assert client.post("/predict", content=picture()).status_code == 200
        for _ in range(400):
            method, path, body, headers = malformed(chance)
            response = client.request(method, path, content=body, headers=headers)
            assert 400 <= response.status_code < 500, (method, path, body[:200], headers, response.text)
            error = response.json()["error"]
            assert isinstance(error, str)
            assert error
            assert "\n" not in error
        assert client.get("/v2/health/ready").status_code == 200
        assert client.post("/predict", content=picture()).status_code == 200
    with closing(socket.create_connection(("127.0.0.1", urlsplit(server.address).port or 0), timeout=30)) as connection:
        connection.sendall(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 400")
    assert server.child.is_alive()
    assert server.stop() == 0
    for line in server.log:
        assert json.loads(line)["level"] in ("info", "warning"), line
        assert "Traceback" not in line
