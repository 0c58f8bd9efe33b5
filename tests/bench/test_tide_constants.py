"""The benchmark of tide's constants (`benchmarks/tide_constants.py`): what it changes, and its page."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks import tide_constants

from tests.methods.networks import batches, convnet, make
from trust_tta.methods.tide import constants
from trust_tta.methods.tide.class_prior import bias_share


def test_a_constant_is_changed_in_all_modules_inside_the_context() -> None:
    scores, spread = torch.ones(1, 2), torch.tensor([[1e6, 1e6]])
    with tide_constants.changed("clean_bias", 2.0):
        assert float(bias_share(scores * 1e6, spread)) == pytest.approx(1 / 1.1)
    assert float(bias_share(scores * 1e6, spread)) == pytest.approx(1 / 1.05)
    with tide_constants.changed("clusters", 0.5):
        assert constants.TIDE.clusters == 4
        make("tide", convnet())(batches(1)[0])
    assert constants.TIDE.clusters == 8


def test_page_has_a_row_for_each_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = [("as it is", "lr", 1.0), ("lr x 2", "lr", 2.0), ("clean_bias x 0.5", "clean_bias", 0.5)]
    monkeypatch.setattr(tide_constants, "changes", lambda: changes)
    store, page = f"--store={tmp_path / 'c.sqlite'}", tmp_path / "page.md"
    assert tide_constants.main(["run", store, "--worlds=shipped_nano", "--images=8", "--device=cpu"]) == 0
    assert tide_constants.main(["page", store, f"--out={page}"]) == 0
    assert "tide" in capsys.readouterr().out
    text = page.read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == ["lr x 2", "clean_bias x 0.5"]
    assert "8 images each" in text


def test_the_best_change_is_chosen_on_the_other_worlds() -> None:
    changes = {"as it is": (0.0, 0.0, 0.0), "lr x 2": (-1.0, 0.4, 0.8), "clean_bias x 2": (0.6, 0.2, -0.8)}
    worlds = ("shipped_nano", "layernorm_nano", "resnet56")
    gains = {(label, world): gain for label, row in changes.items() for world, gain in zip(worlds, row, strict=True)}
    rows = [
        [part.strip(" `") for part in row.split("|")[2:5]]
        for row in tide_constants.left_out(gains, worlds).splitlines()[2:]
    ]
    assert rows == [["lr x 2", "+0.6", "-1.0"], ["as it is", "+0.0", "+0.0"], ["clean_bias x 2", "+0.4", "-0.8"]]


def test_at_most_twenty_constants_are_chosen() -> None:
    assert len({name for _, name, _ in tide_constants.changes()}) <= 20
