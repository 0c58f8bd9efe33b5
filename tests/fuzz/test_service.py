"""Requests to a running service: JSON, images, chunked bodies with trailers, and snapshots.

Each is answered with 200, or refused with a 4xx or 503 and one line; the service stays ready, within bounds.
"""

from __future__ import annotations

import io
import json
import socket
import unicodedata
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
from hypothesis import strategies as st
from PIL import Image

from tests.fuzz.harness import Drawn, damaged, edited, edits, fuzz, values
from tests.fuzz.tensors import odd_tensors
from tests.serve.services import MODEL, PRIVATE, SIZE, picture, pixels, serving
from trust_tta.errors import LONGEST_MESSAGE, StateError
from trust_tta.live.snapshots import read_state, write_state

INFER = f"/v2/models/{MODEL}/infer"
_running = ExitStack()


@cache
def client() -> httpx.Client:
    """The client of a service that runs until the last test of this file."""
    folder = Path(_running.enter_context(TemporaryDirectory()))
    return _running.enter_context(serving(folder, max_bytes=1 << 20, max_streams=4))[0]


@pytest.fixture(scope="module", autouse=True)
def stopping() -> Iterator[None]:
    yield
    _running.close()


def check(response: httpx.Response) -> None:
    """Answered, or refused in one printable line."""
    assert response.status_code == 200 or 400 <= response.status_code < 500 or response.status_code == 503, (
        response.status_code,
        response.text[:300],
    )
    if response.status_code != 200:
        error = response.json()["error"]
        assert error.strip()
        assert len(error) <= LONGEST_MESSAGE
        assert not {c for c in error if unicodedata.category(c) in ("Cc", "Zl", "Zp")}
    assert client().get("/v2/health/ready").status_code == 200


def as_json(tree: Any) -> bytes:
    """JSON text, also of values that JSON has not: NaN, surrogates, and whatever else as its type."""
    try:
        return json.dumps(tree, default=lambda value: type(value).__name__).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError, TypeError):  # circular, too deep, a key that is no string
        return b"[" * 100_000


@cache
def infer_request() -> dict[str, Any]:
    raw = pixels(2)
    tensor = {"name": "images", "datatype": "UINT8", "shape": list(raw.shape), "data": raw.ravel().tolist()}
    outputs = [{"name": "logits", "parameters": {"binary_data": False}}]
    return {"id": "1", "inputs": [tensor], "outputs": outputs, "parameters": {"stream": "a", "adapt": True}}


MORE = ("id", "parameters", "binary_data_size", "binary_data", "binary_data_output", "stream", "adapt", "data")
lengths = st.none() | st.sampled_from(["0", "1", "10", "99999", "100000", "-1", "x", "٣", "1" * 30])


@fuzz(3000, changes=edits(), length=lengths)
def test_odd_json_tensors(folder: Path, changes: Any, length: str | None) -> None:
    headers = {} if length is None else {b"Inference-Header-Content-Length": length.encode()}
    body = as_json(edited(infer_request(), changes, more=MORE))[: 1 << 21]
    check(client().post(INFER, content=body, headers=headers))


@fuzz(1000, changes=edits(), path=st.sampled_from(["/feedback", "/streams/a/fork"]))
def test_odd_json_bodies(folder: Path, changes: Any, path: str) -> None:
    body = as_json(edited([{"id": "0123-0", "label": 1, "to": "b"}], changes, more=("id", "label", "to")))
    check(client().post(path, content=body, headers=PRIVATE))


@cache
def image_files() -> tuple[bytes, ...]:
    progressive = io.BytesIO()
    Image.fromarray(pixels(size=40)[0]).save(progressive, "JPEG", progressive=True)
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = io.BytesIO()
    Image.fromarray(pixels(size=SIZE)[0]).save(turned, "PNG", exif=exif)
    return picture(), picture("JPEG", size=40), picture("WEBP", size=40), progressive.getvalue(), turned.getvalue()


forms = st.sampled_from(
    ["", "multipart/form-data; boundary=x", "multipart/form-data", "image/png", "MULTIPART/x; boundary="]
)


@fuzz(3000, data=damaged(st.deferred(lambda: st.sampled_from(image_files()))), kind=forms)
def test_damaged_images(folder: Path, data: bytes, kind: str) -> None:
    if kind.startswith("multipart"):
        data = b'--x\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n' + data + b"\r\n--x--\r\n"
    check(client().post("/predict", content=data, headers={"Content-Type": kind} if kind else {}))


PIECES = (
    b"0\r\n\r\n", b"0\r\n", b"1\r\nx\r\n", b"A: b\r\n", b"A: b\r\n" * 20_000, b"\r\n", b"ffffffffffffffff\r\n",
    b"-1\r\n", b"5;x=y\r\nabcde\r\n", b"Content-Length: 5\r\n", b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    bytes(1000),
)  # fmt: skip
pieces = st.sampled_from(PIECES)


@fuzz(1500, parts=st.lists(pieces | st.binary(max_size=20), max_size=8), both=st.booleans())
def test_odd_chunks_and_trailers(folder: Path, parts: list[bytes], both: bool) -> None:
    url = client().base_url
    head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
    head += b"Content-Length: 3\r\n\r\n" if both else b"\r\n"
    with closing(socket.create_connection((url.host, url.port or 0), timeout=30)) as connection:
        try:
            connection.sendall(head + b"".join(parts))
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(1 << 16)
        except OSError:  # it was closed while this was sent
            answer = b""
    assert answer[:12] in (b"", b"HTTP/1.1 200") or answer.startswith(b"HTTP/1.1 4"), answer[:200]
    assert client().get("/v2/health/ready").status_code == 200


@cache
def good_snapshot() -> bytes:
    client().post("/predict?stream=s", content=picture())
    content: bytes = client().get("/streams/s/state", headers=PRIVATE).content
    return content


@cache
def good_state(folder: Path) -> dict[str, Any]:
    (folder / "good.safetensors").write_bytes(good_snapshot())
    return read_state(folder / "good.safetensors")[0]


def put(content: bytes) -> None:
    """Sent to a stream that exists and to a new one; taken or refused, the streams go on predicting."""
    for name in ("s", "new"):
        response = client().put(f"/streams/{name}/state", content=content, headers=PRIVATE)
        check(response)
        if response.status_code != 200 and name == "new":
            assert "new" not in [s["name"] for s in client().get("/streams").json()["streams"]]
        if response.status_code == 200 or name == "s":
            predicted = client().post(f"/predict?stream={name}", content=picture())
            assert predicted.status_code == 200, predicted.text
    client().delete("/streams/new", headers=PRIVATE)
    assert client().put("/streams/s/state", content=good_snapshot(), headers=PRIVATE).status_code == 200


@fuzz(1000, changes=edits(values | odd_tensors.map(Drawn)))
def test_odd_values_in_snapshots(folder: Path, changes: Any) -> None:
    state = edited(good_state(folder), changes)
    try:
        write_state(folder / "odd.safetensors", state, about={"number": 1})
    except (StateError, ValueError, TypeError, AttributeError, KeyError, RuntimeError, RecursionError):
        return  # no snapshot can hold this
    content = (folder / "odd.safetensors").read_bytes()
    if len(content) <= 1 << 20:
        put(content)


@fuzz(500, change=damaged(st.just(b"")), places=st.lists(st.integers(0, 1 << 16), min_size=1, max_size=3))
def test_damaged_snapshots(folder: Path, change: bytes, places: list[int]) -> None:
    content = good_snapshot()
    for place in places:
        at = place % (len(content) + 1)
        content = content[:at] + change + content[at + max(len(change), 1) :]
    put(content)
