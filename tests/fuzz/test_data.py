"""Arrays, archives, batches and images that were damaged or are of an odd kind."""

from __future__ import annotations

import io
import json
import pickle
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from PIL import Image

from tests.fuzz.harness import Drawn, damaged, fuzz, nothing_written, refusal, values
from trust_tta.data.arrays import open_array, open_corrupted, open_images, open_labels, read_batch
from trust_tta.data.images import check_image, read_image
from trust_tta.data.registry import find_spec
from trust_tta.preprocessing import find_preset

IMAGES = np.arange(5 * 4 * 32 * 32 * 3, dtype=np.uint32).astype(np.uint8).reshape(20, 32, 32, 3)
LABELS = np.tile(np.arange(4), 5)
DTYPES = ("u1", "i1", "i2", ">i4", "i8", "u8", "f2", "f4", "f8", "c16", "?", "S3", "U2", "M8[s]", "V4", "O")
SHAPES = ((), (0,), (20,), (4,), (20, 1), (20, 32, 32, 3), (0, 32, 32, 3), (20, 0, 0, 3), (20, 3, 32, 32), (5, 7))
MODES = (
    "1", "L", "P", "LA", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "I;16", "I;16B", "La",
)  # fmt: skip
FORMATS = ("PNG", "JPEG", "WEBP", "TIFF", "GIF", "BMP", "PPM", "EPS", "ICO", "TGA")


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@cache
def npz(compressed: bool) -> bytes:
    file = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(file, images=IMAGES, labels=LABELS)
    return file.getvalue()


def odd_array(dtype: str, shape: tuple[int, ...]) -> bytes:
    return npy(np.zeros(shape, dtype=dtype))


@cache
def picture(mode: str, kind: str, size: tuple[int, int]) -> bytes:
    """An image file of this mode, or of the nearest that the format has."""
    for other in (mode, "RGB"):
        file = io.BytesIO()
        try:
            Image.new("RGB", size, (200, 100, 50)).convert(other).save(file, kind)
            return file.getvalue()
        except (OSError, ValueError, KeyError):
            pass
    return b""


def batch(protocol: int, labels: str) -> bytes:
    content = {b"data": np.zeros((3, 3072), np.uint8), labels.encode(): [0, 1, 2], b"batch_label": b"x"}
    return pickle.dumps(content, protocol=protocol)


arrays = st.sampled_from((npy(IMAGES), npy(LABELS), npz(False), npz(True))) | st.builds(
    odd_array, st.sampled_from(DTYPES), st.sampled_from(SHAPES)
)
pictures = st.builds(
    picture, st.sampled_from(MODES), st.sampled_from(FORMATS), st.sampled_from(((8, 8), (1, 1), (17, 3), (64, 40)))
)


@fuzz(600, content=damaged(arrays))
def test_damaged_arrays(folder: Path, content: bytes) -> None:
    (folder / "a.npy").write_bytes(content)
    for read in (open_array, open_images, open_labels):
        with nothing_written(folder), refusal():
            np.array(read(folder / "a.npy"))


@fuzz(
    300,
    images=st.just(npy(IMAGES)) | arrays,
    labels=st.just(npy(LABELS)) | damaged(arrays),
    record=values,
    severity=st.integers(0, 6),
)
def test_folders_of_arrays(folder: Path, images: bytes, labels: bytes, record: Drawn, severity: int) -> None:
    (folder / "fog.npy").write_bytes(images)
    (folder / "labels.npy").write_bytes(labels)
    try:
        (folder / "corrupt.json").write_text(json.dumps({"severities": record.value}), encoding="utf-8")
    except (TypeError, ValueError, RecursionError):
        (folder / "corrupt.json").unlink(missing_ok=True)
    with nothing_written(folder), refusal():
        data = open_corrupted(find_spec("cifar10-c"), folder, "fog", severity=severity)
        assert data.image(0).shape[2:] == (3,)


@fuzz(400, content=damaged(st.builds(batch, st.integers(0, 5), st.sampled_from(("labels", "fine_labels", "other")))))
def test_damaged_batches(folder: Path, content: bytes) -> None:
    with refusal():
        read_batch(content, name="data_batch_1")


@fuzz(1000, content=damaged(pictures), name=st.sampled_from(("a.png", "a.jpg", "a.tif")), in_memory=st.booleans())
def test_damaged_images(folder: Path, content: bytes, name: str, in_memory: bool) -> None:
    (folder / name).write_bytes(content)
    file = content if in_memory else folder / name
    with nothing_written(folder), refusal():
        check_image(file)
    with nothing_written(folder), refusal():
        image = read_image(file)
        assert image.dtype == np.uint8
        assert image.shape[2:] == (3,)
        find_preset("imagenet")(image)
