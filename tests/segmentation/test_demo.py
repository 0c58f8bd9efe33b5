"""`trust-tta demo --task segmentation`, with the network and the pictures that ship."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trust_tta as tt
from trust_tta.bench.config import RunConfig
from trust_tta.bench.parsing import read_parts
from trust_tta.cli import demo
from trust_tta.cli.main import main
from trust_tta.data.class_names import segmentation_classes
from trust_tta.models.checkpoint import Checkpoint
from trust_tta.models.pretrained import PRETRAINED
from trust_tta.preprocessing import Preprocessing
from trust_tta.results import ResultStore


def test_it_runs_on_what_ships(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The statistics of the batch alone double the mean IoU under noise."""

    def read_less(path: Path, changes: dict[str, Any]) -> list[RunConfig]:
        parts = [
            part.changed(data=part.data.changed(domains=("gaussian_noise",))) for part in read_parts(path, changes)
        ]
        return [parts[0].changed(methods=parts[0].methods[:2]), parts[1]]

    monkeypatch.setattr(demo, "read_parts", read_less)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert main(["demo", "--task", "segmentation", "--images", "4", "--out", str(tmp_path / "demo")]) == 0
    assert "Pictures" in (tmp_path / "demo" / "report.html").read_text()
    assert "CamVid's test pictures: 1 corruption, 4 images each" in capsys.readouterr().out
    with ResultStore(tmp_path / "demo" / "results.sqlite") as store:
        found = {cell.key.method: cell.result.accuracy for cell in store.results()}
    assert set(found) == {"source", "bn", "trust"}
    assert found["bn"] > 2 * found["source"]


def test_the_shipped_segmenter_knows_its_classes() -> None:
    model = tt.create_model("upernet_vmamba_nano", checkpoint="upernet_vmamba_nano_camvid")
    assert model.classes == tuple(segmentation_classes("camvid"))
    stated = json.loads(Checkpoint.open("upernet_vmamba_nano_camvid").metadata["preprocessing"])
    assert model.preprocessing == Preprocessing.from_mapping(stated)
    assert model.preprocessing(np.zeros((1, 180, 240, 3), np.uint8)).shape == (1, 3, 180, 240)
    assert Checkpoint.open("upernet_vmamba_nano_camvid").sha256 == PRETRAINED["upernet_vmamba_nano_camvid"].sha256


def test_the_published_segmenters_have_the_classes_of_ade20k() -> None:
    known = PRETRAINED["upernet_vmamba_tiny_s1l8_ade20k"]
    assert (len(known.classes), known.classes[0], known.classes[149]) == (150, "wall", "flag")
    assert known.address is not None
    assert known.address.endswith("%23v2seg/upernet_vssm_4xb4-160k_ade20k-512x512_tiny_s_iter_160000.pth")
