"""The demonstration: images of the shipped sample, replayed to the service with their labels.

Two streams see the same images: one, named as its method, adapts; `source` is paused. Clean images come first, then
fog, then noise from a broken camera, then fog again and clear weather, over and over.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from trust_tta.data.corruptions.apply import corrupt
from trust_tta.data.sample import load_sample
from trust_tta.errors import TrustError
from trust_tta.live.guard import Guard
from trust_tta.serve.service import Service

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


def start_replay(service: Service) -> None:
    """Replay images in a thread until the service stops."""
    threading.Thread(target=_replay, args=(service,), name="demo", daemon=True).start()


def _replay(service: Service) -> None:
    method, paused = service.network.method_name, False
    for images, labels in batches():
        due = time.monotonic() + PACE
        try:
            _send(service, method if method != FIXED else "adapting", images, labels)
            _send(service, FIXED, images, labels, adapt=paused)
            if not paused:
                service.act(FIXED, "pause").result()
                paused = True
        except TrustError as error:  # the service is busy, or stops
            log.info("a batch of the demonstration was refused", extra={"reason": str(error)})
            if not service.ready:
                return
        time.sleep(max(0.0, due - time.monotonic()))


def _send(
    service: Service, stream: str, images: NDArray[np.uint8], labels: NDArray[np.int64] | None, *, adapt: bool = True
) -> None:
    """Send a batch (n, h, w, 3) to a stream, and its labels where there are any."""
    pixels = torch.from_numpy(service.network.preprocessing.fit(images))
    prediction = service.predict(pixels, stream=stream, adapt=adapt).result()
    if labels is not None:
        service.give_feedback([(f"{prediction.id}-{row}", label) for row, label in enumerate(labels.tolist())])


def batches() -> Iterator[tuple[NDArray[np.uint8], NDArray[np.int64] | None]]:
    """Images (16, 32, 32, 3) and labels (16,), None for noise, in the order of the weather, over and over."""
    pictures, labels = load_sample()
    order, chance = np.random.default_rng(0).permutation(len(pictures))[:POOL], np.random.default_rng(1)
    pictures, labels, at = pictures[order], labels[order], 0
    while True:
        for severity, count in WEATHER:
            for _ in range(count):
                chosen = np.arange(at, at + BATCH) % POOL
                at = (at + BATCH) % POOL
                images = pictures[chosen]
                if severity is None:
                    yield chance.integers(0, 256, images.shape, dtype=np.uint8), None
                elif severity == 0:
                    yield images, labels[chosen]
                else:
                    yield corrupt(images, "fog", severity=severity, seed=int(chance.integers(1 << 30))), labels[chosen]
