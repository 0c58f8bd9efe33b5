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
from trust_tta.cli.main import main
from trust_tta.data.sample import load_sample
from trust_tta.errors import TrustError
from trust_tta.export import Exported, export_network
from trust_tta.export.check import Agreement
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


def test_file_predicts_as_the_adapted_method(exported: tuple[Exported, Any]) -> None:
    file, method = exported
    pictures = np.random.default_rng(1).integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)
    expected = method.evaluate(method.model.preprocessing(pictures))
    torch.testing.assert_close(run(file.path, pictures), expected, rtol=1e-4, atol=1e-5)
    source = small("vmamba")(method.model.preprocessing(pictures))
    assert not torch.allclose(source, expected, atol=1e-3)


def test_metadata_describe_network_and_input(exported: tuple[Exported, Any]) -> None:
    model = onnx.load(exported[0].path)
    about = {entry.key: entry.value for entry in model.metadata_props}
    assert json.loads(about["classes"]) == list("abcde")
    assert json.loads(about["input"])["shape"] == ["n", 32, 32, 3]
    assert json.loads(about["preprocessing"])["size"] == 32
    assert about["adapted_by"] == "tent"
    assert json.loads(about["adapted_on"])["updates"] == 1


def test_int8_file_is_smaller_and_nearly_equal(exported: tuple[Exported, Any], tmp_path: Path) -> None:
    small = tmp_path / "int8.onnx"
    small.write_bytes(exported[0].path.read_bytes())
    quantize(small)
    pictures = np.random.default_rng(1).integers(0, 256, (8, 32, 32, 3), dtype=np.uint8)
    torch.testing.assert_close(run(small, pictures), run(exported[0].path, pictures), rtol=0.1, atol=0.05)
    about = {entry.key for entry in onnx.load(small).metadata_props}
    assert {"classes", "preprocessing", "adapted_by"} <= about
    assert small.stat().st_size != exported[0].path.stat().st_size


def test_file_has_standard_operators_only(exported: tuple[Exported, Any]) -> None:
    model = onnx.load(exported[0].path)
    onnx.checker.check_model(model, full_check=True)
    assert {node.domain for node in model.graph.node} == {""}
    assert not model.functions
    assert exported[0].details["operators"]["Scan"] == 2  # one for each block


@pytest.mark.parametrize(
    "family", ["vim", *(pytest.param(name, marks=pytest.mark.slow) for name in SMALL if name not in ("vim", "vmamba"))]
)
def test_every_family_is_exported(family: str, tmp_path: Path) -> None:
    """`export_network` itself compares: what it returns was run."""
    exported = export_network(small(family), "onnx", tmp_path / "a.onnx")
    assert exported.agreement.largest_error < 1e-5
    assert exported.agreement.equal_classes == exported.agreement.images
    assert b"site-packages" not in exported.path.read_bytes()  # no traces of the machine


def compare_sizes(file: Path, network: Any, preprocessing: Any) -> None:
    """At sizes that the command itself does not try."""
    for shape in ((1, 3, 32, 32), (3, 3, 50, 71), (2, 3, 117, 64)):
        images = torch.rand(shape, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            expected = network((images - _channels(preprocessing.mean)) / _channels(preprocessing.std))
        torch.testing.assert_close(run(file, images.numpy()), expected, rtol=1e-4, atol=1e-5)


def _channels(values: Any) -> torch.Tensor:
    return torch.tensor(values).view(1, 3, 1, 1)


@pytest.mark.parametrize("family", ["vmamba", pytest.param("groupmamba", marks=pytest.mark.slow)])
def test_images_of_any_size(family: str, tmp_path: Path) -> None:
    network = small(family)
    exported = export_network(network, "onnx", tmp_path / "a.onnx", size="any")
    assert json.loads(exported.about["input"])["shape"] == ["n", 3, "any", "any"]
    assert runtime.InferenceSession(str(exported.path)).get_inputs()[0].shape == ["n", 3, "h", "w"]
    compare_sizes(exported.path, network, network.preprocessing)


@pytest.mark.slow
def test_segmentation_of_any_size(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = tt.create_model("upernet_vmamba_nano", num_classes=4, dims=(8, 16), depths=(1, 1), channels=16).eval()
    with torch.no_grad():
        network.decode_head.conv_seg.weight.mul_(100)  # logits that are far apart
    preprocessing: Any = network.preprocessing
    network.preprocessing = preprocessing.changed(size=48)
    exported = export_network(network, "onnx", tmp_path / "a.onnx", size="any")
    assert exported.agreement.equal_classes == exported.agreement.images == 64
    compare_sizes(exported.path, network, preprocessing)


@pytest.mark.slow
def test_segmentation_of_one_size(tmp_path: Path) -> None:
    network = tt.create_model("upernet_vmamba_nano", num_classes=4, dims=(8, 16), depths=(1, 1), channels=16).eval()
    exported = export_network(network, "onnx", tmp_path / "a.onnx", size=40, pixels="uint8")
    assert runtime.InferenceSession(str(exported.path)).get_inputs()[0].shape == ["n", 40, 40, 3]
    assert exported.agreement.largest_error < 1e-5


@pytest.mark.slow
def test_int8_of_the_shipped_network_loses_less_than_a_point(tmp_path: Path) -> None:
    """On all shipped images."""
    images, labels = load_sample()
    inputs = np.split(images.transpose(0, 3, 1, 2).astype(np.float32) / 255, 20)
    accuracy = []
    for flags in ([], ["--int8"]):
        file = tmp_path / f"nano{len(flags)}.onnx"
        assert main(["export", "vmamba_nano_cifar10", *flags, "--out", str(file)]) == 0
        session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        logits = np.concatenate([session.run(["logits"], {"images": batch})[0] for batch in inputs])
        accuracy.append(100 * (logits.argmax(1) == labels).mean())
    assert accuracy[1] > accuracy[0] - 1


def test_large_error_is_refused() -> None:
    """Also where all logits are small."""
    with pytest.raises(TrustError, match="differs from the network by 0.001"):
        Agreement(16, 1e-3, 0.02, 16).require(Path("a.onnx"), tolerance=1e-3)
    with pytest.raises(TrustError, match="gives 15 of 16 images the same class"):
        Agreement(16, 0.0, 1.0, 15).require(Path("a.onnx"), tolerance=1e-3)
    for error in (float("nan"), float("inf")):
        with pytest.raises(TrustError, match="nothing was kept"):
            Agreement(16, error, 1.0, 16).require(Path("a.onnx"), tolerance=1e-3)
    Agreement(16, 1e-3, 1.0, 16).require(Path("a.onnx"), tolerance=1e-3)
