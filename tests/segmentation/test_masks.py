"""Label files, sizes and pixels as MMSegmentation and MLMP make them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.golden import load_golden, load_golden_json
from trust_tta.data.masks import (
    ResizeProtocol,
    lookup_table,
    read_mask,
    rescale_size,
    resize_image,
    resize_mask,
)
from trust_tta.errors import DataError
from trust_tta.models.upernet import slide, windows
from trust_tta.preprocessing import Preprocessing

CLIP = Preprocessing(mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711))
MLMP = ("wide_square", "wide", "tall", "equal")


def png(array: np.ndarray[Any, Any]) -> bytes:
    with io.BytesIO() as file:
        Image.fromarray(array).save(file, "PNG")
        return file.getvalue()


@pytest.mark.parametrize("name", ["voc_palette", "p2bit"])
def test_palette_files_give_their_indices(name: str) -> None:
    golden = load_golden("segmentation/data_rules.npz")
    read = read_mask(golden[f"label/{name}_png_bytes"].tobytes())
    assert read.dtype == np.uint8
    np.testing.assert_array_equal(read, golden[f"label/{name}_read"])


def test_label_rules_are_the_original_ones() -> None:
    golden = load_golden("segmentation/data_rules.npz")
    stored = read_mask(golden["label/lut_png_bytes"].tobytes())
    for reduce, key in ((False, "label/lut_reduce_false"), (True, "label/lut_reduce_true")):
        table = lookup_table(reduce_zero=reduce)
        np.testing.assert_array_equal(table, golden[key])
        np.testing.assert_array_equal(table[stored].ravel(), golden[key])
    voc = golden["label/voc_palette_read"]
    np.testing.assert_array_equal(lookup_table(reduce_zero=True)[voc], golden["label/voc_palette_read_reduced"])
    swapped = lookup_table({0: 1, 1: 0, 2: 255}, reduce_zero=True)
    np.testing.assert_array_equal(swapped[voc], golden["label/voc_reduced_labelmap_0to1_1to0_2to255"])


def test_sixteen_bits_are_read_up_to_255_and_refused_above() -> None:
    """The original lets larger values wrap around, which turns them into other classes."""
    read = load_golden_json("segmentation/data_rules.json")["uint16_png_values_0_1_255_256_257_300_511_read_as"]
    np.testing.assert_array_equal(read_mask(png(np.array([[0, 1, 255]], dtype=np.uint16)))[0], read[:3])
    with pytest.raises(DataError, match=r"its labels run from 0 to 300; they must lie in 0\.\.255"):
        read_mask(png(np.array([[0, 300]], dtype=np.uint16)))


def test_colors_are_no_labels(tmp_path: Path) -> None:
    (tmp_path / "mask.png").write_bytes(png(np.zeros((4, 4, 3), dtype=np.uint8)))
    with pytest.raises(DataError, match=r"mask\.png cannot be read: it has the mode RGB; labels are gray values"):
        read_mask(tmp_path / "mask.png")


def test_sizes_that_keep_the_ratio_are_the_original_ones() -> None:
    rows = load_golden_json("segmentation/data_rules.json")["resize_sizes"]
    assert len(rows) == 12
    for row in rows:
        height, width = row["input_hw"]
        for scale in ((2048, 512), (520, 520), (512, 2048)):
            size = rescale_size(height, width, scale)
            assert list(size) == row[f"keep_ratio_{scale[0]}x{scale[1]}_hw"]


@pytest.mark.parametrize(("name", "scale"), [("up64x24", (64, 24)), ("down12x9", (12, 9)), ("exact14", None)])
def test_resized_pixels_and_labels_are_the_original_ones(name: str, scale: tuple[int, int] | None) -> None:
    golden = load_golden("segmentation/data_rules.npz")
    image, label = golden["resize/img_in"], golden["resize/label_in"]
    size = (14, 14) if scale is None else rescale_size(image.shape[0], image.shape[1], scale)
    np.testing.assert_array_equal(resize_mask(label, *size), golden[f"resize/{name}_label"])
    np.testing.assert_array_equal(resize_image(image, *size), golden[f"resize/{name}_img"])


def test_normalizing_and_padding_are_the_original_ones() -> None:
    golden = load_golden("segmentation/data_rules.npz")
    pixels = torch.from_numpy(np.ascontiguousarray(golden["normalize/img_bgr"][..., ::-1]))
    normal = Preprocessing().normalize(pixels[None])
    np.testing.assert_allclose(normal[0].permute(1, 2, 0), golden["normalize/mmcv_to_rgb"], atol=1e-5)
    np.testing.assert_allclose(normal, golden["normalize/preprocessor_test_no_pad"], atol=1e-5)
    padded = torch.nn.functional.pad(normal, (0, 5, 0, 3))
    np.testing.assert_allclose(padded, golden["normalize/preprocessor_test_divisor8"], atol=1e-5)


@pytest.mark.parametrize("case", MLMP)
def test_squashing_follows_mlmp(case: str) -> None:
    golden, settings = load_golden("segmentation/mlmp.npz"), load_golden_json("segmentation/mlmp.json")[case]
    protocol = ResizeProtocol("squash", tuple(settings["resize"]))
    image, label = golden[f"{case}/img_in"], golden[f"{case}/label_in"]
    assert list(protocol.size_of(*image.shape[:2])) == settings["resized_hw"]
    np.testing.assert_array_equal(protocol.resize_mask(label), golden[f"{case}/label_resized"])
    np.testing.assert_array_equal(protocol.resize_image(image), golden[f"{case}/img_resized"])


@pytest.mark.parametrize("case", MLMP)
def test_windows_of_mlmp_are_those_of_the_sliding_inference(case: str) -> None:
    golden, settings = load_golden("segmentation/mlmp.npz"), load_golden_json("segmentation/mlmp.json")[case]
    crop, stride = settings["patch"][0], settings["stride"]
    resized = np.ascontiguousarray(golden[f"{case}/img_resized"][..., ::-1])
    normal = CLIP.normalize(torch.from_numpy(resized)[None])
    height, width = normal.shape[2:]
    grid = [len(list(windows(side, crop, stride))) for side in (height, width)]
    assert grid == settings["grid"]
    seen: list[torch.Tensor] = []

    def recorded(window: torch.Tensor) -> torch.Tensor:
        seen.append(window)
        return torch.from_numpy(golden[f"{case}/scores"][len(seen) - 1])[None]

    logits = slide(recorded, normal, crop=crop, stride=stride)[0]
    np.testing.assert_allclose(torch.cat(seen), golden[f"{case}/patches_normalized"], atol=1e-5)
    np.testing.assert_allclose(logits, golden[f"{case}/aggregated"], atol=1e-6)
    np.testing.assert_array_equal(logits.argmax(0), golden[f"{case}/argmax_4"])


def test_protocols_by_name() -> None:
    image, mask = np.zeros((30, 40, 3), dtype=np.uint8), np.zeros((30, 40), dtype=np.uint8)
    squash = ResizeProtocol("squash", (224, 224))
    assert squash.resize_image(image).shape == (224, 224, 3)
    assert squash.resize_mask(mask).shape == (224, 224)
    native = ResizeProtocol("native", (80, 60))
    assert native.resize_image(image).shape == (60, 80, 3)
    assert native.resize_mask(mask).shape == (30, 40)
