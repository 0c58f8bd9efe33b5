"""Requests of the live page: new points, curves, and thumbnails of network input."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.serve.services import PRIVATE, picture, pixels, serving
from trust_tta.preprocessing import Preprocessing
from trust_tta.serve.dashboard import Dashboard, thumbnail
from trust_tta.serve.event_log import Feedback
from trust_tta.serve.network import NetworkInfo

NETWORK = NetworkInfo("tiny", "tide", Preprocessing(size=4, resize=4), ("ant", "bee"), (2,), ())


def test_thumbnail_shows_the_pixels_before_normalization() -> None:
    preprocessing, raw = Preprocessing(size=24, resize=None, crop=False), torch.from_numpy(pixels(1, size=24))
    url = thumbnail(preprocessing.normalize(raw)[0], preprocessing)
    shown = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
    assert np.array_equal(np.asarray(shown), raw[0].numpy())


def test_clock_set_back_does_not_freeze_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    dashboard = Dashboard(NETWORK)
    for now in (5000.0, 5001.0, 1000.0, 1001.0):
        monkeypatch.setattr("time.time", lambda now=now: now)
        dashboard.add_feedback([Feedback("a-0", "default", 1, 1)])
    (stream,) = dashboard.since(0)["streams"]
    assert [point[0] for point in stream["points"]] == [1000.0, 1001.0]


def test_points_hold_the_last_values_of_a_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    dashboard = Dashboard(NETWORK)
    for i, now in enumerate((10.0, 10.2, 10.4, 11.0)):
        monkeypatch.setattr("time.time", lambda now=now: now)
        view = dashboard._view("a")
        view.reading = {"entropy": float(i)}
        view.add_point()
    (stream,) = dashboard.since(0)["streams"]
    assert [point[:2] for point in stream["points"]] == [[10.0, 2.0], [11.0, 3.0]]


def test_page_is_told_what_is_new(tmp_path: Path) -> None:
    with serving(tmp_path) as (client, _):
        assert client.get("/live").json()["streams"] == []
        for stream in ("left", "right"):
            client.post(f"/predict?stream={stream}", content=picture())
        first = client.get("/live").json()
        assert first["names"] == [stream["name"] for stream in first["streams"]] == ["left", "right"]
        assert [len(stream["shown"]) for stream in first["streams"]] == [1, 1]
        client.post("/predict?stream=left", content=picture(seed=1))
        client.post("/streams/left/pause", headers=PRIVATE)
        news = client.get("/live", params={"since": first["now"]}).json()
        shown = [(stream["name"], stream["images"], stream["paused"]) for stream in news["streams"]]
        assert shown == [("left", 2, True)]
        assert [event["action"] for event in news["events"]] == ["pause"]
        client.delete("/streams/left", headers=PRIVATE)
        assert client.get("/live", params={"since": news["now"]}).json()["names"] == ["right"]
        for wrong in ("x", "1 2", ""):
            assert client.get("/live", params={"since": wrong}).status_code == 400
        assert client.get("/live", params={"since": "nan"}).json()["streams"] == []
