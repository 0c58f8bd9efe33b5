"""`trust-tta rank` on a tiny network."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.bench.tiny import tiny_config
from tests.cli.test_bench import config as config  # a fixture
from tests.data.trees import thumbnails
from trust_tta.bench.data import ExperimentData
from trust_tta.cli.main import main
from trust_tta.cli.rank import heat_map
from trust_tta.models.typed import create_model
from trust_tta.orders import ScanOrder
from trust_tta.preprocessing import find_preset
from trust_tta.results.order_records import EntropyByOrder, read_records


def test_orders_by_entropy(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "ranking.json"
    assert main(["rank", str(config), "--k", "3", "--json", str(out), "--limit", "20"]) == 0
    printed = capsys.readouterr().out.splitlines()
    (ranking,) = read_records([out])
    assert isinstance(ranking, EntropyByOrder)
    assert sorted(ranking.orders) == [str(order) for order in ScanOrder.all()]
    assert all(one <= other for one, other in pairwise(ranking.entropy))
    assert ranking.k == 3
    assert [line[2:6] for line in printed[2:26]] == list(ranking.orders)
    assert [line[0] for line in printed[2:26]] == ["*"] * 3 + [" "] * 21
    assert printed[26] == f"the 3 orders of lowest entropy: {', '.join(ranking.orders[:3])}"
    expected = (_entropy(tmp_path, "fog") + _entropy(tmp_path, "contrast")) / 2
    assert dict(zip(ranking.orders, ranking.entropy, strict=True))["abcd"] == pytest.approx(expected, rel=1e-5)


def _entropy(folder: Path, domain: str) -> float:
    """Of the default order, computed by hand."""
    experiment = tiny_config(folder, data={"domains": [domain], "limit": 20})
    (stream,) = ExperimentData(experiment.data).stream(experiment.stream, batch_size=16, seed=0, workers=0)
    model = create_model("vmamba_nano", checkpoint=experiment.model.checkpoint, **experiment.model.overrides)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.track_running_stats, module.running_mean, module.running_var = False, None, None
    total = 0.0
    with torch.no_grad():
        for batch in replace(stream.batches, preprocessing=find_preset("cifar32")):
            total += float(torch.distributions.Categorical(logits=model(batch.images)).entropy().sum())
    return total / 20


def test_the_heat_map_shows_low_and_high() -> None:
    def record(title: str, *entropy: float) -> EntropyByOrder:
        return EntropyByOrder(title=title, orders=("abcd", "badc"), entropy=entropy, k=1)

    domains = [record("fog", 0.0, 1.0), record("snow", 0.4, 0.6)]
    assert heat_map(record("x", 0.2, 0.8), domains, shades=".:+#").splitlines()[2:] == [
        f"* abcd  0.200  {'#' * 8:<30}  .:",
        f"  badc  0.800  {'#' * 30}  #+",
    ]


def test_an_impossible_k_is_refused(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rank", str(config), "--k", "25"]) == 2
    assert "there are 24 orders" in capsys.readouterr().err


def test_no_domain_is_one_line(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rank", str(config), "--domains", ","]) == 2
    error = capsys.readouterr().err
    assert "--domains: the list is empty; give at least one" in error
    assert error.count("\n") == 1


def test_a_folder_gets_a_record_for_each_domain(config: Path, tmp_path: Path) -> None:
    assert main(["rank", str(config), "--k", "2", "--json", str(tmp_path / "mean.json"), "--limit", "20"]) == 0
    assert main(["rank", str(config), "--k", "2", "--json", str(tmp_path / "each"), "--limit", "20"]) == 0
    (mean,), each = read_records([tmp_path / "mean.json"]), read_records([tmp_path / "each"])
    assert sorted(path.name for path in (tmp_path / "each").iterdir()) == ["orders-contrast.json", "orders-fog.json"]
    by_order = [dict(zip(r.orders, r.entropy, strict=True)) for r in (mean, *each) if isinstance(r, EntropyByOrder)]
    assert [record.title for record in each] == ["contrast", "fog"]
    for order, value in by_order[0].items():
        assert value == pytest.approx((by_order[1][order] + by_order[2][order]) / 2)
    assert by_order[1]["abcd"] == pytest.approx(_entropy(tmp_path, "contrast"), rel=1e-5)


def test_several_data_sets_are_a_record_each(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "images.npy", thumbnails(12))
    np.save(tmp_path / "labels.npy", np.arange(12) % 10)
    files = f'images = "{tmp_path}/images.npy", labels = "{tmp_path}/labels.npy"'
    parts = (
        f'dataset = "array", domains = ["fog"], {files}',
        'dataset = "sample", domains = ["fog", "snow"], limit = 8',
    )
    lines = [line for line in config.read_text(encoding="utf-8").splitlines() if not line.startswith("data.")]
    config.write_text("\n".join([*lines, *(f"[[parts]]\ndata = {{ {part} }}" for part in parts)]), encoding="utf-8")
    assert main(["rank", str(config), "--json", str(tmp_path / "out")]) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["orders-array.json", "orders-sample.json"]
    assert [record.title for record in read_records([tmp_path / "out"])] == ["array", "sample"]
    assert main(["rank", str(config), "--json", str(tmp_path / "mean.json")]) == 2
    assert "has 2 parts (array, sample); choose one with --dataset" in capsys.readouterr().err
