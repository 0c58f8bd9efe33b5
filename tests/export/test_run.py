"""Exports that need nothing but PyTorch, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import trust_tta as tt
from tests.export.networks import small
from trust_tta.cli.main import main
from trust_tta.errors import CheckpointError, ConfigError, StateError
from trust_tta.export import export_network
from trust_tta.live.snapshots import write_state

NANO = "vmamba_nano_cifar10"


def adapted(steps: int = 1) -> tt.Method:
    method = tt.create_method("tide", tt.create_model("vmamba_nano", checkpoint=NANO))
    images = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for _ in range(steps):
        method(images)
    return method


def test_a_saved_state_becomes_a_checkpoint_that_predicts_as_the_method(tmp_path: Path) -> None:
    method = adapted()
    torch.save(method.state_dict(), tmp_path / "state.pt")
    write_state(tmp_path / "snapshot.safetensors", {"method": method.state_dict(), "books": {"images": 8}}, about={})
    images = torch.randn(4, 3, 32, 32)
    expected = method.evaluate(images)
    for source in ("state.pt", "snapshot.safetensors"):
        out = tmp_path / f"{source}.safetensors"
        exported = export_network(tmp_path / source, "safetensors", out, checkpoint=NANO)
        assert exported.agreement.largest_error == 0
        network = tt.create_model("vmamba_nano", checkpoint=out)
        mirrored = torch.stack([network(images).softmax(1), network(images.flip(-1)).softmax(1)]).mean(0).log()
        torch.testing.assert_close(mirrored, expected)
        assert exported.about["adapted_by"] == "tide"


def test_a_folder_of_snapshots_gives_its_newest(tmp_path: Path) -> None:
    stream = tt.Stream(adapted(0), snapshots=tmp_path / "stream")
    stream(torch.randn(8, 3, 32, 32))
    stream.close()
    exported = export_network(tmp_path / "stream", "safetensors", tmp_path / "a.safetensors", checkpoint=NANO)
    assert '"images": 8' in exported.about["adapted_on"]


@pytest.mark.parametrize("statistics", ["source", "stream"])
def test_export_leaves_the_method_unchanged(statistics: Any, tmp_path: Path) -> None:
    network = small("vmamba")
    source = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    method = tt.create_method("tent", network, lr=1e-2, statistics=statistics)
    method(torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
    images = torch.randn(4, 3, 32, 32)
    expected = method.evaluate(images)
    export_network(method, "safetensors", tmp_path / "a.safetensors")
    written = tt.create_model("vmamba_nano", checkpoint=tmp_path / "a.safetensors").eval()
    torch.testing.assert_close(written(images), expected)
    assert torch.equal(method.evaluate(images), expected)
    method.reset()
    assert all(torch.equal(source[name], tensor) for name, tensor in method.detach().state_dict().items())


def test_invalid_requests_are_refused(tmp_path: Path) -> None:
    state = adapted().state_dict()
    torch.save(state, tmp_path / "state.pt")
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        (dict(origin=NANO, to="onx"), ConfigError, "unknown format 'onx'.*onnx"),
        (dict(origin=tmp_path / "state.pt"), ConfigError, "give the checkpoint it was adapted from"),
        (dict(origin=NANO, checkpoint=NANO), ConfigError, "is a checkpoint itself"),
        (dict(origin=NANO, int8=True), ConfigError, "int8 is for the format 'onnx'"),
        (dict(origin=NANO, pixels="int"), ConfigError, "pixels is 'int'"),
        (dict(origin=NANO, size="any"), ConfigError, "size 'any' is for the format 'onnx'"),
        (dict(origin=NANO, size=0), ConfigError, "size is 0; give a number of pixels"),
        (dict(origin=small("vim"), size="any", to="onnx"), ConfigError, "a Vim is exported for images of one size"),
        (dict(origin=tmp_path / "none.safetensors"), CheckpointError, "no checkpoint at"),
    ]
    for arguments, kind, message in cases:
        with pytest.raises(kind, match=message):
            export_network(**{"to": "safetensors", **arguments})
    other = {**state, "adapted": {"layers.0.nothing": torch.zeros(3)}}
    torch.save(other, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match="do not fit the network: 'layers.0.nothing'"):
        export_network(tmp_path / "other.pt", "safetensors", checkpoint=NANO)
    torch.save(tt.create_method("t3a", tt.create_model("vmamba_nano", checkpoint=NANO)).state_dict(), tmp_path / "h.pt")
    with pytest.raises(StateError, match="changes no weights or statistics"):
        export_network(tmp_path / "h.pt", "safetensors", checkpoint=NANO)


def test_command_prints_the_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a.safetensors"
    assert main(["export", NANO, "--to", "safetensors", "--out", str(out)]) == 0
    assert re.search(
        r"compared with PyTorch on 64 images: largest error 0 .* same class for 64", capsys.readouterr().out
    )
    with pytest.raises(SystemExit, match="2"):
        main(["export", NANO, "--to", "onxx", "--out", str(out)])
    assert capsys.readouterr().err.count("\n") == 1


def test_network_object_becomes_a_program_of_aten_operators(tmp_path: Path) -> None:
    network = small("vmamba")
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    exported = export_network(network, "pt2", tmp_path / "a.pt2")
    assert exported.agreement.largest_error < 1e-5
    files = {"metadata.json": ""}
    loaded = torch.export.load(tmp_path / "a.pt2", extra_files=files)
    assert "preprocessing" in files["metadata.json"]
    calls = {str(node.target) for node in loaded.graph.nodes if node.op == "call_function"}
    assert not [name for name in calls if "trust_tta" in name]
    assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())


@pytest.mark.slow
def test_compiled_library_runs_and_has_metadata(tmp_path: Path) -> None:
    """Made by a C++ compiler, run by PyTorch's runtime; it says what it is."""
    exported = export_network(small("vmamba"), "aoti", tmp_path / "a.pt2")
    assert exported.agreement.largest_error < 1e-5
    assert "preprocessing" in torch._inductor.aoti_load_package(str(tmp_path / "a.pt2")).get_metadata()
