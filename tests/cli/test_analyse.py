"""`trust-tta analyse` on a tiny network."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from tests.cli.test_bench import config as config  # a fixture
from tests.data.trees import thumbnails
from trust_tta.cli.main import main
from trust_tta.results.order_records import EntropyByOrder, LossSurface, WeightNorms, read_records


def test_a_surface(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["analyse", "surface", str(config), "--points", "2", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert [path.name for path in out.iterdir()] == ["surface-fog.json"]
    (record,) = read_records([out])
    assert isinstance(record, LossSurface)
    assert (len(record.x), len(record.y), len(record.adapted)) == (2, 2, 3)
    for point in (*record.adapted, record.mean):
        assert f"{point.name:<8} {point.x:8.4f} {point.y:8.4f} {point.loss:8.4f}" in printed


def test_networks_that_start_side_by_side_lie_around_their_mean(config: Path, tmp_path: Path) -> None:
    """In the parallel mode every order starts where the others do; one after the other they move along a path."""
    text = config.read_text(encoding="utf-8").replace('"tent"]', '{ name = "trust", k = 3, lr = 0.01 }]')
    config.write_text(text, encoding="utf-8")
    apart = []
    for mode in ("sequential", "replicate"):
        out = tmp_path / mode
        flags = ["--points", "2", "--option", f"trust.mode={mode}", "--out", str(out)]
        assert main(["analyse", "surface", str(config), *flags]) == 0
        (record,) = read_records([out])
        assert isinstance(record, LossSurface)
        first, second, third = ((point.x, point.y) for point in record.adapted)
        apart.append(math.dist(first, third) / max(math.dist(first, second), math.dist(second, third)))
    assert apart[0] > 1.5 > 1.2 > apart[1]


def test_norms_of_named_domains(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["analyse", "norms", str(config), "--domains", "contrast,snow", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    names = [f"norms-{kind}-{domain}.json" for kind in ("biases", "weights") for domain in ("contrast", "snow")]
    assert sorted(path.name for path in out.iterdir()) == names
    for record in read_records([out]):
        assert isinstance(record, WeightNorms)
        for name, mean, deviation in zip(record.names, record.mean, record.deviation, strict=True):
            assert f"  {name:<44} {mean:9.4f}  {deviation:9.2e}" in printed


def test_orders_by_domain(config: Path, tmp_path: Path) -> None:
    assert main(["analyse", "orders", str(config), "--limit", "16", "--out", str(tmp_path / "out")]) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["orders-contrast.json", "orders-fog.json"]
    assert [record.title for record in read_records([tmp_path / "out"])] == ["contrast", "fog"]


def test_orders_of_several_data_sets_are_a_record_each(config: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", thumbnails(12))
    np.save(tmp_path / "labels.npy", np.arange(12) % 10)
    files = f'images = "{tmp_path}/images.npy", labels = "{tmp_path}/labels.npy"'
    parts = (
        f'dataset = "array", domains = ["fog"], {files}',
        'dataset = "sample", domains = ["fog", "snow"], limit = 8',
    )
    lines = [line for line in config.read_text(encoding="utf-8").splitlines() if not line.startswith("data.")]
    config.write_text("\n".join([*lines, *(f"[[parts]]\ndata = {{ {part} }}" for part in parts)]), encoding="utf-8")
    assert main(["analyse", "orders", str(config), "--out", str(tmp_path / "out")]) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["orders-array.json", "orders-sample.json"]
    records = read_records([tmp_path / "out"])
    assert [(type(record), record.title) for record in records] == [
        (EntropyByOrder, "array"),
        (EntropyByOrder, "sample"),
    ]
    assert main(["analyse", "norms", str(config), "--out", str(tmp_path / "norms")]) == 0
    assert sorted(path.name for path in (tmp_path / "norms").iterdir())[0] == "norms-array-biases-fog.json"


def test_what_cannot_be_made_is_one_line(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    assert main(["analyse", "memory", str(config), "--device", "cpu", "--out", out]) == 1
    assert "needs a CUDA device" in capsys.readouterr().err
    assert main(["analyse", "surface", str(config), "--points", "1", "--out", out]) == 2
    assert "give 2 or more" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_report_draws_what_was_made(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["bench", str(config), "--methods", "source"]) == 0
    assert main(["analyse", "surface", str(config), "--points", "3", "--out", str(out)]) == 0
    assert main(["analyse", "norms", str(config), "--out", str(out)]) == 0
    store, page = str(tmp_path / "results.sqlite"), tmp_path / "page.html"
    assert main(["report", store, "--analyses", str(out), "--out", str(page), "--quiet"]) == 0
    text = page.read_text(encoding="utf-8")
    assert "sample, fog: loss on the plane" in text
    assert "sample, fog, SS2D weights: L2 norm of each adapted tensor" in text
