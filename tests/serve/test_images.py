"""What clients send, as pixels that the network takes; and as thumbnails."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image

from tests.serve.services import picture, pixels
from trust_tta.preprocessing import Preprocessing
from trust_tta.serve.images import QUICK_BYTES, QUICK_SIDE, decode, decode_if_quick, from_pixels, thumbnail
from trust_tta.serve.settings import RequestError

MOST = 1 << 16
SMALL = Preprocessing(size=24, resize=None, crop=False)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_small_picture_is_decoded_at_once_and_alike(kind: str) -> None:
    data = picture(kind, size=24)
    assert len(data) <= QUICK_BYTES
    quick = decode_if_quick(data, SMALL, most_pixels=MOST)
    assert quick is not None
    assert (quick.shape, quick.dtype) == ((1, 24, 24, 3), torch.uint8)
    assert torch.equal(quick, decode(data, SMALL, most_pixels=MOST))
    assert np.array_equal(quick[0].numpy(), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


def test_what_may_take_long_is_left_to_another_thread() -> None:
    strip = io.BytesIO()
    Image.fromarray(pixels(size=24)[0][:1]).save(strip, "PNG")  # one row, to be resized to thousands
    assert decode_if_quick(strip.getvalue(), SMALL, most_pixels=MOST) is None
    assert decode_if_quick(picture(size=23), SMALL, most_pixels=MOST) is None
    assert decode_if_quick(picture(size=60), Preprocessing(size=60, resize=None), most_pixels=MOST) is None  # bytes
    plain = io.BytesIO()
    Image.new("RGB", (QUICK_SIDE + 1,) * 2).save(plain, "PNG")
    assert len(plain.getvalue()) < QUICK_BYTES
    large = Preprocessing(size=QUICK_SIDE + 1, resize=None)
    assert decode_if_quick(plain.getvalue(), large, most_pixels=MOST) is None


def test_both_ways_refuse_alike() -> None:
    for data in (b"", b"no picture", picture("PNG", size=24)[:200], picture("JPEG", size=24)[:-200]):
        said = []
        for way in (decode, decode_if_quick):
            with pytest.raises(RequestError) as refused:
                way(data, SMALL, most_pixels=MOST)
            said.append((refused.value.status, str(refused.value)))
        assert said[0] == said[1]
    with pytest.raises(RequestError, match="576 pixels") as refused:
        decode_if_quick(picture(size=24), SMALL, most_pixels=575)
    assert refused.value.status == 413


def test_a_turned_picture_is_turned_back() -> None:
    exif, raw, buffer = Image.Exif(), pixels(size=24)[0], io.BytesIO()
    exif[0x0112] = 6  # a quarter turn
    Image.fromarray(raw).save(buffer, "PNG", exif=exif)
    quick = decode_if_quick(buffer.getvalue(), SMALL, most_pixels=MOST)
    assert quick is not None
    assert np.array_equal(quick[0].numpy(), np.rot90(raw, -1))


def test_raw_pixels_that_cannot_be_written_to_are_taken() -> None:
    raw = np.frombuffer(pixels(2, size=24).tobytes(), dtype=np.uint8).reshape(2, 24, 24, 3)
    taken = from_pixels(raw, SMALL, most_pixels=MOST)
    assert np.array_equal(taken.numpy(), raw)
    taken.zero_()
    assert raw.any()


def test_pixels_and_network_input_have_the_same_thumbnail() -> None:
    raw = torch.from_numpy(pixels(1, size=24))
    urls = {thumbnail(raw[0], SMALL), thumbnail(SMALL.normalize(raw)[0], SMALL)}
    assert len(urls) == 1
    shown = Image.open(io.BytesIO(base64.b64decode(urls.pop().partition(",")[2])))
    assert np.array_equal(np.asarray(shown), raw[0].numpy())
