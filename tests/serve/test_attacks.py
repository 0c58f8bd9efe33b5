"""Hostile clients and a changed disk: bounded work and memory, one line each, and other routes stay responsive."""

from __future__ import annotations

import asyncio
import io
import json
import resource
import shutil
import socket
import sqlite3
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.serve.services import MODEL, PRIVATE, SIZE, make_network, picture, process, serving
from tests.serve.test_disk import full_disk
from tests.serve.test_limits import connect, read_all
from trust_tta.cli.main import main
from trust_tta.errors import StateError
from trust_tta.preprocessing import Preprocessing
from trust_tta.serve.decoding import MAX_SCANS, MAX_SIDE, Decoder, _is_quick, decode_image
from trust_tta.serve.network import open_network
from trust_tta.serve.protocol import read_request
from trust_tta.serve.service import EVENT_LOG_FILE, Service
from trust_tta.serve.settings import RequestError, Settings

INFER = f"/v2/models/{MODEL}/infer"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, Service]]:
    with serving(tmp_path_factory.mktemp("attacks"), decode_seconds=1.0) as served:
        yield served


def progressive(size: int, scans: int) -> bytes:
    """A progressive JPEG whose second scan is repeated."""
    buffer = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 255, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(noise).resize((size, size)).save(buffer, "JPEG", progressive=True, quality=20)
    data = buffer.getvalue()
    starts = [i for i in range(len(data) - 1) if data[i : i + 2] == b"\xff\xda"]
    return data[: starts[2]] + data[starts[1] : starts[2]] * scans + data[starts[2] :]


def png(width: int, height: int) -> bytes:
    """A black PNG, which compresses a thousandfold."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(height * (3 * width + 1)), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


# Nothing is acknowledged that is not on disk


@pytest.mark.parametrize("action", ["pause", "resume", "rollback", "reset"])
def test_change_on_a_full_disk_is_not_acknowledged(served: tuple[httpx.Client, Service], action: str) -> None:
    client, _ = served
    client.post("/predict", content=picture())
    with full_disk():
        refused = client.post(f"/streams/default/{action}", headers=PRIVATE)
    assert refused.status_code == 503
    assert "cannot be written" in refused.json()["error"]
    assert int(refused.headers["retry-after"]) > 0
    assert client.post(f"/streams/default/{action}", headers=PRIVATE).status_code == 200


def test_change_whose_event_cannot_be_logged_is_not_acknowledged(served: tuple[httpx.Client, Service]) -> None:
    client, service = served
    client.post("/predict", content=picture())

    def full(*_: object) -> int:
        raise sqlite3.OperationalError("database or disk is full")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service.event_log, "add_event", full)
        assert client.post("/streams/default/pause", headers=PRIVATE).status_code == 503
    assert client.post("/streams/default/resume", headers=PRIVATE).status_code == 200


def test_moved_event_log_is_noticed(tmp_path: Path) -> None:
    with serving(tmp_path) as (client, service):
        name = client.post("/predict", content=picture()).json()["id"]
        log = service.folder / EVENT_LOG_FILE
        log.rename(log.with_name("moved.sqlite"))
        assert client.post("/feedback", json={"id": name, "label": 1}).status_code == 503
        assert client.post("/streams/default/pause", headers=PRIVATE).status_code == 503
        assert client.get("/v2/health/ready").status_code == 503
        log.with_name("moved.sqlite").rename(log)
        assert client.post("/feedback", json={"id": name, "label": 1}).json()["stored"] == 1
        assert client.get("/v2/health/ready").status_code == 200


def test_damaged_event_log_is_one_line_at_start(tmp_path: Path) -> None:
    with serving(tmp_path) as (client, service):
        for seed in range(30):
            client.post("/predict", content=picture(seed=seed))
            client.post("/streams/default/pause", headers=PRIVATE)
        log = service.folder / EVENT_LOG_FILE
    content = bytearray(log.read_bytes())
    for page in range(1, len(content) // 4096):
        content[page * 4096 : page * 4096 + 64] = b"\xff" * 64
    log.write_bytes(content)
    with pytest.raises(StateError, match="the event log .* cannot be used") as refused:
        Service(make_network(tmp_path), tmp_path / "state")
    assert "\n" not in str(refused.value)


def test_removed_streams_folder_leaves_routes_working(tmp_path: Path) -> None:
    with serving(tmp_path, max_loaded=2) as (client, service):
        client.post("/predict", content=picture())
        shutil.rmtree(service.streams.folder)
        for path in ("/metrics", "/streams", "/events", "/v2/health/ready"):
            assert client.get(path).status_code == 200, path
        for name in ("default", "other", "third"):  # the third evicts the first
            assert client.post("/predict", content=picture(), params={"stream": name}).status_code == 200
        assert len(client.get("/streams").json()["streams"]) == 3


# Counts


def test_label_counts_follow_corrections_removals_and_restarts(tmp_path: Path) -> None:
    def counts(client: httpx.Client, name: str) -> tuple[int, int, float | None]:
        found = next(s for s in client.get("/streams").json()["streams"] if s["name"] == name)
        return found["labels"], found["right"], found["accuracy"]

    with serving(tmp_path) as (client, service):
        answer = client.post("/predict", content=picture()).json()
        for label in ((answer["class"] + 1) % 4, answer["class"]):  # corrected later
            client.post("/feedback", json={"id": answer["id"], "label": label})
        assert counts(client, "default") == (1, 1, 1.0)
        for i in range(70):  # more streams than the page shows: the view of the first is dropped
            service.dashboard._view(f"s{i}")
        client.post("/feedback", json={"id": answer["id"], "label": (answer["class"] + 1) % 4})
        client.post("/feedback", json={"id": answer["id"], "label": answer["class"]})
        assert counts(client, "default") == (1, 1, 1.0)
        other = client.post("/predict?stream=other", content=picture()).json()
        client.post("/feedback", json={"id": other["id"], "label": other["class"]})
        client.delete("/streams/other", headers=PRIVATE)
        wrong = {"id": other["id"], "label": (other["class"] + 1) % 4}
        assert client.post("/feedback", json=wrong).status_code == 404
        assert [s["name"] for s in client.get("/streams").json()["streams"]] == ["default"]
        client.post("/predict?stream=other", content=picture())
        assert counts(client, "other") == (0, 0, None)
    with serving(tmp_path) as (client, _):
        assert counts(client, "default") == (1, 1, 1.0)


# Bounded work


def test_json_data_must_be_numbers_before_numpy_sees_them() -> None:
    count, shape = 3 * SIZE * SIZE, [1, SIZE, SIZE, 3]
    wrong: tuple[list[Any], ...] = (["x" * 10_000] * count, [[1]] * count, [True] * count, [[[[1] * 3]]], [{}] * count)
    for data in wrong:
        tensor = {"name": "images", "datatype": "UINT8", "shape": shape, "data": data}
        with pytest.raises(RequestError, match=f"must be {count} numbers"):
            read_request(json.dumps({"inputs": [tensor]}).encode(), None, size=SIZE, settings=Settings())


def test_large_json_is_parsed_outside_the_service(served: tuple[httpx.Client, Service]) -> None:
    """Its memory is that of a worker, and health checks are answered meanwhile."""
    client, _ = served
    tensor = '{"inputs": [{"name": "images", "datatype": "UINT8", "shape": [1, 16, 16, 3], "data": [DATA]}]}'
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    statuses = list[int]()

    def send() -> None:
        with httpx.Client(base_url=client.base_url, timeout=60) as own:
            body = tensor.replace("DATA", "[1]," * 1_500_000 + "[1]").encode()
            statuses.append(own.post(INFER, content=body).status_code)

    sender = threading.Thread(target=send)
    sender.start()
    while sender.is_alive():
        assert client.get("/v2/health/live").status_code == 200
        assert client.get("/streams").status_code == 200
    assert statuses in ([400], [413])
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    assert grown < 80, f"{grown} MiB"  # the client's and the server's copies of 6 MB, not a million lists


def test_progressive_jpeg_with_many_scans_is_refused() -> None:
    preprocessing = Preprocessing(size=SIZE, resize=SIZE)
    assert decode_image(progressive(64, 1), preprocessing, max_pixels=1 << 20).shape == (1, SIZE, SIZE, 3)
    with pytest.raises(RequestError, match=f"at most {MAX_SCANS}") as refused:
        decode_image(progressive(64, MAX_SCANS), preprocessing, max_pixels=1 << 20)
    assert refused.value.status == 413


def test_slow_decoding_is_killed_while_other_routes_answer(tmp_path: Path) -> None:
    """One that takes far longer than its tenth of a second, as many pixels in as many scans as are accepted."""
    slow, statuses = progressive(5700, MAX_SCANS - 12), list[int]()
    with serving(tmp_path, decode_seconds=0.1) as (client, _):

        def send() -> None:
            with httpx.Client(base_url=client.base_url, timeout=60) as own:
                statuses.append(own.post("/predict", content=slow).status_code)

        senders = [threading.Thread(target=send) for _ in range(3)]
        for sender in senders:
            sender.start()
        while any(sender.is_alive() for sender in senders):
            for path in ("/v2/health/live", "/streams", "/metrics"):
                assert client.get(path).status_code == 200
        assert statuses == [413] * 3
        assert client.post("/predict", content=picture()).status_code == 200  # by new workers


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_only_small_images_of_the_right_size_are_decoded_in_the_service(kind: str) -> None:
    preprocessing = Preprocessing(size=24, resize=None, crop=False)
    small = picture(kind, size=24)
    assert _is_quick(small, preprocessing)
    found = asyncio.run(Decoder(preprocessing, Settings()).decode_image(small))  # no worker was started
    assert np.array_equal(found[0], np.asarray(Image.open(io.BytesIO(small)).convert("RGB")))
    assert not _is_quick(picture(kind, size=23), preprocessing)
    assert not _is_quick(png(1, 24), preprocessing)
    assert not _is_quick(small + bytes(1 << 12), preprocessing)
    assert not _is_quick(small[:10], preprocessing)
    assert not _is_quick(png(200, 200), Preprocessing(size=200, resize=None))


def test_sides_of_images_are_limited() -> None:
    preprocessing = Preprocessing(size=SIZE, resize=SIZE)
    for width, height in ((1, MAX_SIDE + 1), (MAX_SIDE + 1, 1)):
        with pytest.raises(RequestError, match=f"at most {MAX_SIDE} per side") as refused:
            decode_image(png(width, height), preprocessing, max_pixels=1 << 25)
        assert refused.value.status == 413


def test_chunked_trailers_are_limited(served: tuple[httpx.Client, Service]) -> None:
    with closing(connect(served[0])) as connection:
        head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"
        connection.sendall(head)
        sent = 0
        with suppress(OSError):
            while sent < 32 << 20:
                connection.sendall(b"A: b\r\n" * 10_000)
                sent += 60_000
        assert sent < 32 << 20, "all of it was read"
        assert read_all(connection)[:12] in (b"HTTP/1.1 400", b"")
    assert served[0].get("/v2/health/live").status_code == 200


def test_sigterm_ends_slow_decoding(tmp_path: Path) -> None:
    with process(tmp_path) as running:
        where = running.address.removeprefix("http://").split(":")
        slow = progressive(5700, MAX_SCANS - 12)
        connections = [socket.create_connection((where[0], int(where[1]))) for _ in range(4)]
        httpx.get(f"{running.address}/v2/health/live")
        for connection in connections:
            head = f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(slow)}\r\n\r\n"
            connection.sendall(head.encode() + slow)
        httpx.get(f"{running.address}/v2/health/live")
        running.child.terminate()
        running.child.join(30)
        assert running.child.exitcode == 0
        for connection in connections:
            connection.close()


# Names and tokens


def test_foreign_host_is_refused_and_never_repeated(tmp_path: Path) -> None:
    """A page that rebinds its own name to this address must not read predictions."""
    with serving(tmp_path) as (client, _):
        port = client.base_url.port
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "localhost.evil.example", "x"):
            for path in ("/streams", "/", "/live", "/metrics", "/streams/", "/nothing"):
                answer = client.get(path, headers={"Host": host})
                assert answer.status_code in (403, 404), (host, path)
                assert "location" not in answer.headers
        for host in ("localhost", f"LOCALHOST:{port}", f"127.0.0.1:{port}", f"[::1]:{port}", "10.1.2.3"):
            assert client.get("/streams", headers={"Host": host}).status_code == 200, host


def test_allowed_host_is_accepted(tmp_path: Path) -> None:
    with process(tmp_path, "--allowed-host", "tta.example", "--allowed-host", "b.example") as running:
        for host, status in (("tta.example", 200), ("B.example:80", 200), ("c.example", 403)):
            assert httpx.get(f"{running.address}/streams", headers={"Host": host}).status_code == status


@pytest.mark.parametrize("most", ["0" * 5000 + "1", "1" + "0" * 20, "000000100" + "0" * 20, "10001", "1_0", "٣"])
def test_limit_of_events_is_checked(served: tuple[httpx.Client, Service], most: str) -> None:
    answer = served[0].get("/events", params={"most": most})
    assert answer.status_code == 400
    assert "from 1 to 10000" in answer.json()["error"]


@pytest.mark.parametrize("token", ["a\nb", "a b", "schlüssel", "a\x00"])
def test_token_that_no_header_can_carry_is_refused(token: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--token", token]) == 2
    assert "--token holds a space, a line break or a character beyond ASCII" in capsys.readouterr().err


# Single images


OTHERS = ("bn", "trust", "shot", "sar", "roid")


@pytest.mark.parametrize("method", ["tent", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_methods_with_batch_statistics_serve_single_images(method: str) -> None:
    """With statistics of a batch of one, every image would be predicted as the same class."""
    from trust_tta.data.sample import load_sample

    network = open_network("vmamba_nano_cifar10", method)
    assert not network.method.statistics.uses_batch
    assert any("statistics of the stream" in note for note in network.notes)
    images, labels = load_sample()
    batches = network.preprocessing(images[:24])
    right = sum(int(network.method(batches[i : i + 1]).argmax()) == labels[i] for i in range(24))
    assert right >= 18


def test_confidence_of_roid_is_said_not_to_be_a_probability(tmp_path: Path) -> None:
    assert any("not a probability" in note for note in make_network(tmp_path, "roid").notes)
    assert make_network(tmp_path, "tide").notes == ()
