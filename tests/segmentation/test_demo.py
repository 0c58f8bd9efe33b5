"""`trust-tta demo --task segmentation`: one line where it is not shipped, a report where it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.segmentation.test_bench import OVERRIDES
from tests.segmentation.trees import make_tree
from trust_tta.bench import config
from trust_tta.cli.main import main
from trust_tta.models.factory import create_model
from trust_tta.models.pretrained import PRETRAINED


def test_what_is_not_shipped_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(config, "PIXEL_DEMO", ("no.safetensors", "no_pictures"))
    assert main(["demo", "--task", "segmentation", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "does not ship no.safetensors and no_pictures; train a network on CamVid" in error
    assert error.count("\n") == 1


def test_with_a_network_and_pictures_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tree("camvid", tmp_path, images=4)
    overrides: dict[str, Any] = OVERRIDES
    model = create_model("upernet_vmamba_nano", num_classes=11, **overrides)
    stated = {"variant": "upernet_vmamba_nano", "overrides": json.dumps(overrides), "num_classes": "11"}
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, tmp_path / "net.safetensors", stated)
    monkeypatch.setattr(config, "PIXEL_DEMO", (str(tmp_path / "net.safetensors"), str(tmp_path)))
    monkeypatch.setattr(config, "DEMO_CORRUPTIONS", ("contrast",))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    flags = ["--task", "segmentation", "--seeds", "1", "--images", "4", "--out", str(tmp_path / "demo")]
    assert main(["demo", *flags]) == 0
    assert "Pictures" in (tmp_path / "demo" / "report.html").read_text()
    assert "a network for CamVid" in capsys.readouterr().out


def test_the_published_segmenters_have_the_classes_of_ade20k() -> None:
    known = PRETRAINED["upernet_vmamba_tiny_s1l8_ade20k"]
    assert (len(known.classes), known.classes[0], known.classes[149]) == (150, "wall", "flag")
    assert known.address is not None
    assert known.address.endswith("%23v2seg/upernet_vssm_4xb4-160k_ade20k-512x512_tiny_s_iter_160000.pth")
