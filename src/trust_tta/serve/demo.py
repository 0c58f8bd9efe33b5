"""The demonstration: images of the shipped sample, sent to the service as any client would, with their labels.

Two streams see the same images: one, named as its method, adapts; `source` is paused. Clean images come first, then
fog, then noise from a broken camera, then fog again and clear weather, over and over.
"""

from __future__ import annotations

import http.client
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from trust_tta.data.corruptions.apply import corrupt
from trust_tta.data.sample import load_sample
from trust_tta.live.guard import Guard

# A minute should show what otherwise takes an hour: every batch is compared, and the learning rate is ten times higher.
GUARD = Guard(snapshot_every=192, budget=1.0)
OPTIONS = {"tide": {"lr": 4e-3}}
BATCH = 16
PACE = 0.5  # seconds between two batches, at least
POOL = 480  # images, sent over and over
FIXED = "source"
NOTE = (
    "A demonstration. Both streams get the same images: clean ones, then fog rolls in, then a broken camera sends "
    "noise, then fog again and clear weather. One adapts, under guard; the other is paused: it is the source network."
)
# Severity of the fog (0: none, None: noise instead) and how many batches it lasts.
WEATHER = ((0, 8), (2, 3), (3, 3), (4, 4), (5, 20), (None, 10), (5, 12), (0, 16))

log = logging.getLogger("trust_tta.serve")


class Replay:
    """Sends batches as long as the service answers."""

    def __init__(self, address: str, *, model: str, method: str, token: str) -> None:
        self._host, self._model, self._token = urlsplit(address).netloc, model, token
        self._stream = method if method != FIXED else "adapting"
        self._thread = threading.Thread(target=self._run, name="demo", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            connection = http.client.HTTPConnection(self._host, timeout=120)
            source_made = False
            for images, labels in batches():
                due = time.monotonic() + PACE
                self._send(connection, self._stream, images, labels)
                self._send(connection, FIXED, images, labels, adapt=source_made)
                if not source_made:
                    self._post(connection, f"/streams/{FIXED}/pause", b"", {"Authorization": f"Bearer {self._token}"})
                    source_made = True
                time.sleep(max(0.0, due - time.monotonic()))
        except (OSError, http.client.HTTPException) as error:
            log.info("the demonstration ends", extra={"reason": str(error)})

    def _send(
        self,
        connection: http.client.HTTPConnection,
        stream: str,
        images: NDArray[np.uint8],
        labels: NDArray[np.int64] | None,
        *,
        adapt: bool = True,
    ) -> None:
        """Send a batch (n, h, w, 3) to a stream, and its labels where there are any."""
        size = {"binary_data_size": images.nbytes}
        tensor = {"name": "images", "datatype": "UINT8", "shape": list(images.shape), "parameters": size}
        asked = {"inputs": [tensor], "outputs": [{"name": "logits"}], "parameters": {"stream": stream, "adapt": adapt}}
        header = json.dumps(asked).encode()
        body, length = header + images.tobytes(), {"Inference-Header-Content-Length": str(len(header))}
        answer = self._post(connection, f"/v2/models/{self._model}/infer", body, length)
        if answer is not None and labels is not None:
            name = answer["parameters"]["prediction"]
            told = [{"id": f"{name}-{i}", "label": int(label)} for i, label in enumerate(labels)]
            self._post(connection, "/feedback", json.dumps(told).encode(), {})

    @staticmethod
    def _post(
        connection: http.client.HTTPConnection, path: str, body: bytes, headers: dict[str, str]
    ) -> dict[str, dict[str, str]] | None:
        """The answer; None where the service is busy."""
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        content = response.read()
        answer: dict[str, dict[str, str]] | None = json.loads(content) if response.status == 200 else None
        return answer


def batches() -> Iterator[tuple[NDArray[np.uint8], NDArray[np.int64] | None]]:
    """Images (16, 32, 32, 3) and labels (16,), None for noise, in the order of the weather, over and over."""
    pictures, labels = load_sample()
    order, chance = np.random.default_rng(0).permutation(len(pictures))[:POOL], np.random.default_rng(1)
    pictures, labels, at = pictures[order], labels[order], 0
    while True:
        for severity, count in WEATHER:
            change = _change(severity, chance)
            for _ in range(count):
                chosen = np.arange(at, at + BATCH) % POOL
                at = (at + BATCH) % POOL
                yield change(pictures[chosen]), None if severity is None else labels[chosen]


def _change(severity: int | None, chance: np.random.Generator) -> Callable[[NDArray[np.uint8]], NDArray[np.uint8]]:
    if severity is None:
        return lambda pictures: chance.integers(0, 256, pictures.shape, dtype=np.uint8)
    if severity == 0:
        return lambda pictures: pictures
    return lambda pictures: corrupt(pictures, "fog", severity=severity, seed=int(chance.integers(1 << 30)))
