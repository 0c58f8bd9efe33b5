"""Experiments on labeled pixels: from a folder and a checkpoint to records with the mean IoU."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.segmentation.networks import upernet
from tests.segmentation.trees import make_tree
from trust_tta.bench.config import RunConfig
from trust_tta.bench.data import ExperimentData
from trust_tta.bench.metrics import PixelMeter
from trust_tta.bench.parsing import parse_config
from trust_tta.bench.sweep import sweep
from trust_tta.data.corruptions.apply import corrupt
from trust_tta.data.segmentation import SegmentationDataset
from trust_tta.data.segmentation_metrics import IGNORED
from trust_tta.errors import ConfigError, ShapeError
from trust_tta.models.typed import create_model
from trust_tta.results import Cell, ResultStore
from trust_tta.results.codec import from_json, to_json
from trust_tta.results.record import CellResult

OVERRIDES: dict[str, Any] = {
    "depths": [1, 1], "dims": [8, 16], "channels": 8, "auxiliary_channels": 4, "pools": [1, 2], "patch_size": 2,
    "overlapping_stem": False,
}  # fmt: skip


def config_of(folder: Path, **data: Any) -> RunConfig:
    torch.manual_seed(0)
    model = create_model("upernet_vmamba_nano", num_classes=11, **OVERRIDES)
    model.decode_head.conv_seg.weight.data.mul_(300)
    torch.save(model.state_dict(), folder / "net.pth")
    make_tree("camvid", folder, images=5)
    content = {
        "experiment": "pixels",
        "model": {"name": "upernet_vmamba_nano", "checkpoint": str(folder / "net.pth"), "overrides": OVERRIDES},
        "data": {
            "dataset": "camvid", "root": str(folder), "domains": ["clean", "contrast"],
            "options": {"scale": [16, 12], "protocol": "native"}, **data,
        },
        "stream": {"batch_size": 2},
        "methods": ["source", "tent", {"name": "trust", "k": 2}, "tide"],
        "device": "cpu",
        "store": str(folder / "results.sqlite"),
    }  # fmt: skip
    return parse_config(content, name="pixels", origin="the test")


def cells_of(config: RunConfig) -> dict[tuple[str, str], Cell]:
    with ResultStore(config.store) as store:
        sweep(config, store)
        return {(cell.key.domain, cell.key.method): cell for cell in store.results()}


def test_an_experiment_on_pixels_records_the_mean_iou(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    cells = cells_of(config)
    assert set(cells) == {(d, m) for d in ("clean", "contrast") for m in ("source", "tent", "trust", "tide")}
    model = create_model("upernet_vmamba_nano", num_classes=11, checkpoint=tmp_path / "net.pth", **OVERRIDES)
    for domain in ("clean", "contrast"):
        dataset = ExperimentData(config.data).open(domain, severity=5, seed=0)
        assert isinstance(dataset, SegmentationDataset)
        ious = slow_ious(model, dataset)
        result = cells[domain, "source"].result
        assert result.samples == 5
        right, predicted, labeled = np.array(result.pixels, dtype=float).T
        with np.errstate(invalid="ignore"):
            np.testing.assert_allclose(right / (predicted + labeled - right), ious, atol=1e-9)
        assert result.accuracy == pytest.approx(np.nanmean(ious), abs=1e-9)
        assert result.accuracy_before == pytest.approx(result.accuracy)
        assert math.isfinite(result.nll + result.entropy + result.ece + result.brier)
    assert cells["contrast", "tent"].result.updates == 3
    assert cells["contrast", "source"].result.accuracy != cells["clean", "source"].result.accuracy


@torch.no_grad()
def slow_ious(model: Any, dataset: SegmentationDataset) -> list[float]:
    """One picture after the other, and one class after the other."""
    predictions, labels = [], []
    for i in range(len(dataset)):
        mask = dataset.mask(i)
        pixels = torch.from_numpy(dataset.image(i).copy())[None]
        logits = model(model.preprocessing.normalize(pixels))
        full = torch.nn.functional.interpolate(logits, mask.shape, mode="bilinear", align_corners=False)
        predictions.append(full.argmax(1)[0].numpy()[mask != IGNORED])
        labels.append(mask[mask != IGNORED])
    predicted, labeled = np.concatenate(predictions), np.concatenate(labels)
    ious = []
    for c in range(len(dataset.class_names)):
        union = int(((predicted == c) | (labeled == c)).sum())
        ious.append(int(((predicted == c) & (labeled == c)).sum()) / union if union else math.nan)
    return ious


def test_corruptions_touch_the_picture_alone_at_its_own_size(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    data = ExperimentData(config.data)
    clean, foggy = (data.open(domain, severity=3, seed=7) for domain in ("clean", "fog"))
    assert isinstance(clean, SegmentationDataset)
    assert isinstance(foggy, SegmentationDataset)
    for i in range(2):
        np.testing.assert_array_equal(clean.mask(i), foggy.mask(i))
        expected = corrupt(clean.images.read(i)[None], "fog", 3, 7, first_index=i)[0]
        np.testing.assert_array_equal(foggy.image(i), clean.protocol.resize_image(expected))
    assert clean.fingerprint != foggy.fingerprint
    assert foggy.fingerprint == data.open("fog", severity=3, seed=7).fingerprint
    assert foggy.fingerprint != data.open("fog", severity=3, seed=8).fingerprint


def test_the_corruptions_are_the_domains_unless_some_are_given(tmp_path: Path) -> None:
    assert len(ExperimentData(config_of(tmp_path, domains=None).data).domains()) == 15
    own = make_tree("masks", tmp_path)
    folder = ExperimentData(config_of(tmp_path, dataset="masks", root=str(own), domains=None).data)
    assert folder.domains() == ("all",)
    assert folder.open("all", severity=5, seed=0).domain == "all"


def test_classes_in_another_order_are_matched_by_name(tmp_path: Path) -> None:
    data = ExperimentData(config_of(tmp_path).data)
    dataset = data.open("clean", severity=5, seed=0)
    assert isinstance(dataset, SegmentationDataset)
    outputs = np.arange(11)[::-1].copy()
    turned = dataset.renumber(outputs, dataset.class_names[::-1])
    mask, other = dataset.mask(0), turned.mask(0)
    np.testing.assert_array_equal(other, np.where(mask == IGNORED, IGNORED, 10 - mask))
    np.testing.assert_array_equal(turned.palette[10], dataset.palette[0])


def test_settings_that_need_classes_of_images_are_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with pytest.raises(ConfigError, match="have no classes to be correlated by"):
        parse_config(
            {**config.model_dump(), "stream": {"setting": "correlated"}, "methods": ["source"]},
            name="pixels",
            origin="the test",
        )


def test_the_meter_does_not_depend_on_the_batches() -> None:
    generator = torch.Generator().manual_seed(0)
    outputs, labels = (
        torch.randn(6, 4, 5, 7, generator=generator),
        torch.randint(0, 4, (6, 10, 14), generator=generator),
    )
    labels[:, :2] = IGNORED
    costs = {"forwards": 1, "backwards": 0, "updates": 0, "skipped_updates": 0}
    results: list[CellResult] = []
    for size in (1, 4, 6):
        meter = PixelMeter(classes=4)
        for start in range(0, 6, size):
            meter.update(
                outputs[start : start + size], labels[start : start + size], before=outputs[start : start + size]
            )
        results.append(meter.result(**costs))
    assert {r.pixels for r in results} == {results[0].pixels}
    assert len({(r.accuracy, r.accuracy_before) for r in results}) == 1
    full = torch.nn.functional.interpolate(outputs.double(), (10, 14), mode="bilinear", align_corners=False)
    nll = torch.nn.functional.cross_entropy(full, labels, ignore_index=IGNORED)
    assert results[0].nll == pytest.approx(float(nll), rel=1e-5)
    p = full.softmax(1).movedim(1, -1)[labels != IGNORED]
    brier = (p - torch.nn.functional.one_hot(labels[labels != IGNORED], 4)).square().sum(1).mean()
    assert results[0].brier == pytest.approx(float(brier), rel=1e-5)
    assert from_json(CellResult, to_json(results[0])) == replace(results[0])


def test_outputs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"give \(n, 4, h, w\) for labels \(n, h, w\)"):
        PixelMeter(classes=4).update(torch.zeros(2, 3, 5, 5), torch.zeros(2, 5, 5, dtype=torch.int64))


def test_probabilities_are_taken_as_they_are() -> None:
    logits, labels = torch.randn(2, 3, 4, 4), torch.randint(0, 3, (2, 4, 4))
    costs = {"forwards": 1, "backwards": 0, "updates": 0, "skipped_updates": 0}
    plain, sure = PixelMeter(classes=3), PixelMeter(classes=3, probabilities=True)
    plain.update(logits, labels)
    sure.update(logits.softmax(1), labels)
    assert plain.result(**costs).nll == pytest.approx(sure.result(**costs).nll, rel=1e-5)


def test_a_random_network_is_no_better_than_chance() -> None:
    images, labels = torch.randn(2, 3, 12, 16), torch.randint(0, 5, (2, 12, 16))
    meter = PixelMeter(classes=5)
    with torch.no_grad():
        meter.update(upernet()(images), labels)
    assert meter.accuracy < 0.35
