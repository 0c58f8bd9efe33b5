from __future__ import annotations

import io
import os
import resource
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests.data.trees import thumbnails
from trust_tta.data.images import MAX_PIXELS, SUFFIXES, check_image, read_image
from trust_tta.errors import DataError
from trust_tta.preprocessing import PRESETS

RAMP = np.linspace(0, 65535, 64 * 64).reshape(64, 64)


def _saved(array: NDArray[Any], kind: str) -> bytes:
    with io.BytesIO() as file:
        Image.fromarray(array).save(file, kind)
        return file.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_gray_of_16_bits_is_scaled_to_8(kind: str) -> None:
    """The same picture with 8 bits is the reference; without scaling nearly all of it is white."""
    read = read_image(_saved(RAMP.astype(np.uint16), kind))
    eight = read_image(_saved((RAMP / 257).round().astype(np.uint8), "PNG"))
    assert np.abs(read.astype(int) - eight).max() <= 1
    assert read.min() == 0
    assert read.max() == 255


def test_big_endian_tiff_of_16_bits() -> None:
    with io.BytesIO() as file:
        Image.frombytes("I;16B", (64, 64), RAMP.astype(">u2").tobytes()).save(file, "TIFF")
        read = read_image(file.getvalue())
    assert np.abs(read[..., 0] - RAMP / 257).max() <= 1


@pytest.mark.parametrize(
    ("array", "kind"), [(RAMP.astype(np.float32), "floating point"), (RAMP.astype(np.int32), "32-bit")]
)
def test_pixels_without_a_known_range_are_refused(array: NDArray[Any], kind: str) -> None:
    for read in (read_image, check_image):
        with pytest.raises(DataError, match=f"its pixels are {kind}.*; save it with 8 or 16 bits"):
            read(_saved(array, "TIFF"))


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n(%stdout) (w) file pop\nshowpage\n%%EOF\n"


def test_an_eps_is_no_image_whatever_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ghostscript would be run: here a file of that name, which leaves a mark."""
    program = tmp_path / "gs"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\necho 10.0\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "a.png").write_bytes(EPS)
    for read in (read_image, check_image):
        with pytest.raises(DataError, match=r"a\.png cannot be read: cannot identify image file"):
            read(tmp_path / "a.png")
    assert not (tmp_path / "ran").exists()


def _png_header(width: int, height: int) -> bytes:
    whole = _saved(np.zeros((1, 1), np.uint8), "PNG")
    chunk = b"IHDR" + width.to_bytes(4, "big") + height.to_bytes(4, "big") + whole[24:29]
    return whole[:8] + (13).to_bytes(4, "big") + chunk + zlib.crc32(chunk).to_bytes(4, "big") + whole[33:]


def test_the_number_of_pixels_is_bounded_before_decoding() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for width, height in ((60_000, 60_000), (9_460, 9_460)):
        with pytest.raises(DataError, match="cannot be read: .*pixels") as caught:
            read_image(_png_header(width, height), name="of the user")
        assert "\n" not in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kilobytes
    assert MAX_PIXELS < 9_460**2


def test_a_strip_does_not_fill_the_memory_when_it_is_resized() -> None:
    strip = read_image(_saved(np.zeros((1, 30_000, 3), np.uint8), "PNG"))
    with pytest.raises(DataError, match="30000"):
        PRESETS["imagenet"](strip)


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp", ".tif", ".gif", ".bmp", ".ppm"])
def test_a_truncated_file_ends_in_one_line(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    Image.fromarray(thumbnails(1, side=64)[0]).save(path)
    whole = path.read_bytes()
    for length in (0, 10, len(whole) // 2):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match="cannot be read") as caught:
            read_image(path)
        assert "\n" not in str(caught.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.png")
    with pytest.raises(DataError, match="it is not a regular file"):
        read_image(tmp_path / "a.png")


def test_orientation_tags_are_not_followed(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    Image.fromarray(thumbnails(1, side=16)[0][:8]).save(tmp_path / "a.png", exif=exif)
    assert read_image(tmp_path / "a.png").shape == (8, 16, 3)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_suffix_has_its_format(tmp_path: Path, suffix: str) -> None:
    picture = thumbnails(1, side=16)[0]
    Image.fromarray(picture if suffix != ".pgm" else picture[..., 0]).save(tmp_path / f"a{suffix}")
    assert read_image(tmp_path / f"a{suffix}").shape == (16, 16, 3)
