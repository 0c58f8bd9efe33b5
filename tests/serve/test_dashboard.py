"""Thumbnails of network input."""

from __future__ import annotations

import base64
import io

import numpy as np
import torch
from PIL import Image

from tests.serve.services import pixels
from trust_tta.preprocessing import Preprocessing
from trust_tta.serve.dashboard import thumbnail


def test_thumbnail_shows_the_pixels_before_normalization() -> None:
    preprocessing, raw = Preprocessing(size=24, resize=None, crop=False), torch.from_numpy(pixels(1, size=24))
    url = thumbnail(preprocessing.normalize(raw)[0], preprocessing)
    shown = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
    assert np.array_equal(np.asarray(shown), raw[0].numpy())
