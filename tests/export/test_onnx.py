"""ONNX files, run by onnxruntime beside PyTorch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trust_tta as tt
from tests.export.networks import SMALL, small
from trust_tta.export import Exported, export_network
from trust_tta.export.onnx import quantize

onnx = pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Exported, nn.Module]:
    """A VMamba whose method has adapted weights and statistics, as ONNX that takes bytes."""
    method = tt.create_method("tent", small("vmamba"), lr=1e-2, statistics="stream")
    method(torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
    file = tmp_path_factory.mktemp("export") / "adapted.onnx"
    return export_network(method, "onnx", file, pixels="uint8"), method


def run(file: Path, images: np.ndarray[Any, Any]) -> torch.Tensor:
    session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(["logits"], {"images": images})[0])


def test_it_predicts_as_the_adapted_method_does(exported: tuple[Exported, Any]) -> None:
    file, method = exported
    pictures = np.random.default_rng(1).integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)
    expected = method.evaluate(method.model.preprocessing(pictures))
    torch.testing.assert_close(run(file.path, pictures), expected, rtol=1e-4, atol=1e-5)
    source = small("vmamba")(method.model.preprocessing(pictures))
    assert not torch.allclose(source, expected, atol=1e-3)


def test_it_says_what_it_is(exported: tuple[Exported, Any]) -> None:
    model = onnx.load(exported[0].path)
    about = {entry.key: entry.value for entry in model.metadata_props}
    assert json.loads(about["classes"]) == list("abcde")
    assert json.loads(about["input"])["shape"] == ["n", 32, 32, 3]
    assert json.loads(about["preprocessing"])["size"] == 32
    assert about["adapted_by"] == "tent"
    assert json.loads(about["adapted_on"])["updates"] == 1


def test_int8_is_smaller_and_nearly_the_same(exported: tuple[Exported, Any], tmp_path: Path) -> None:
    small = tmp_path / "int8.onnx"
    small.write_bytes(exported[0].path.read_bytes())
    quantize(small)
    pictures = np.random.default_rng(1).integers(0, 256, (8, 32, 32, 3), dtype=np.uint8)
    torch.testing.assert_close(run(small, pictures), run(exported[0].path, pictures), rtol=0.1, atol=0.05)
    about = {entry.key for entry in onnx.load(small).metadata_props}
    assert {"classes", "preprocessing", "adapted_by"} <= about
    assert small.stat().st_size != exported[0].path.stat().st_size


def test_it_needs_no_operators_but_those_of_onnx(exported: tuple[Exported, Any]) -> None:
    model = onnx.load(exported[0].path)
    onnx.checker.check_model(model, full_check=True)
    assert {node.domain for node in model.graph.node} == {""}
    assert not model.functions
    assert exported[0].details["operators"]["Scan"] == 2  # one for each block


@pytest.mark.parametrize(
    "family", ["vim", *(pytest.param(name, marks=pytest.mark.slow) for name in SMALL if name not in ("vim", "vmamba"))]
)
def test_every_family(family: str, tmp_path: Path) -> None:
    """`export_network` itself compares: what it returns was run."""
    exported = export_network(small(family), "onnx", tmp_path / "a.onnx")
    assert exported.agreement.largest_error < 1e-5
    assert exported.agreement.equal_classes == exported.agreement.images
    assert b"site-packages" not in exported.path.read_bytes()  # no traces of the machine
