"""The commands on a small network of each family: bench, rank, speed, export and serve take its file alone."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trust_tta as tt
from tests.models.networks import BACKBONES
from tests.models.test_backbones import ORDERED
from trust_tta.cli.main import main
from trust_tta.data.class_names import CIFAR10_CLASSES
from trust_tta.models.checkpoint import Checkpoint, describe
from trust_tta.models.weights import encode_weights
from trust_tta.preprocessing import Preprocessing
from trust_tta.serve.network import open_network

pytestmark = pytest.mark.slow
NONCOMMERCIAL = "CC-BY-NC-SA-4.0"
FEW = ("--dataset", "sample", "--domains", "fog", "--limit", "16", "--batch-size", "8", "--device", "cpu")


@pytest.fixture(scope="module", params=BACKBONES)
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The name of a variant, and a file of a small one for 32 pixels."""
    torch.manual_seed(0)
    model: Any = tt.create_model(request.param, num_classes=10, **BACKBONES[request.param])
    model.preprocessing, model.classes = Preprocessing(size=32, resize=None, crop=False), CIFAR10_CLASSES
    model.license = NONCOMMERCIAL
    path = tmp_path_factory.mktemp("network") / f"{request.param}.safetensors"
    path.write_bytes(encode_weights(model.state_dict(), describe(model).to_metadata()))
    return request.param, path


def scan_orders(path: Path) -> tuple[str, ...]:
    model: Any = tt.load(path)
    orders: tuple[str, ...] = model.scan_orders
    return orders


def test_bench(network: tuple[str, Path], tmp_path: Path) -> None:
    name, path = network
    methods = ["source", "tent", "tide", *(["trust"] if name in ORDERED else [])]
    out = tmp_path / "rows.csv"
    flags = ["--checkpoint", str(path), "--store", str(tmp_path / "a.sqlite"), "--export", str(out)]
    assert main(["bench", *flags, "--methods", ",".join(methods), *FEW]) == 0
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert sorted(row["method"] for row in rows) == sorted(methods)


def test_rank(network: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, path = network
    out = tmp_path / "ranking.json"
    assert main(["rank", "--checkpoint", str(path), "--json", str(out), *FEW]) == (0 if name in ORDERED else 2)
    if name in ORDERED:
        ranked = out.read_text()
        assert all(f'"{order}"' in ranked for order in scan_orders(path))
    else:
        assert "every order gives the same logits; use another method" in capsys.readouterr().err


def test_speed(network: tuple[str, Path], tmp_path: Path) -> None:
    name, path = network
    out, count = tmp_path / "speed.json", min(6, len(scan_orders(path)))
    flags = ["--checkpoint", str(path), "--size", "32", "--device", "cpu", "--out", str(out)]
    assert main(["speed", "--quick", *flags]) == 0
    record = json.loads(out.read_text())
    timed = {row["work"] for row in record["rows"] if row["part"] == "network" and not row["failed"]}
    assert not [row["failed"] for row in record["rows"] if row["failed"]]
    assert timed >= {"forward", "forward and backward", "Tent", "tide"}
    assert (f"TRUST K={count} sequential" in timed) == (name in ORDERED)
    assert any(place.startswith("network: forward") for place in record["over_reference"])


@pytest.mark.parametrize("to", ["onnx", "pt2", "safetensors"])
def test_export_agrees_and_states_the_license(network: tuple[str, Path], to: str, tmp_path: Path) -> None:
    _, path = network
    out = tmp_path / f"network.{to}"
    assert main(["export", str(path), "--to", to, "--out", str(out)]) == 0  # compares the file with the network
    assert stated_license(out) == NONCOMMERCIAL


def stated_license(path: Path) -> str | None:
    if path.suffix == ".safetensors":
        return Checkpoint.open(path).license
    if path.suffix == ".onnx":
        onnx = pytest.importorskip("onnx")
        return {entry.key: entry.value for entry in onnx.load(path).metadata_props}.get("license")
    extra = {"metadata.json": ""}
    torch.export.load(path, extra_files=extra)
    stated: str | None = json.loads(extra["metadata.json"]).get("license")
    return stated


def test_serve(network: tuple[str, Path]) -> None:
    _, path = network
    served = open_network(str(path), "tide")
    assert (served.outputs, served.classes) == ((10,), CIFAR10_CLASSES)
    pixels = np.random.default_rng(0).integers(0, 256, (40, 48, 3), dtype=np.uint8)
    assert served.method(served.preprocessing(pixels)).shape == (1, 10)
