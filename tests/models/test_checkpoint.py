"""Checkpoints: every spelling loads, nothing runs, nothing is loaded by halves."""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import trust_tta as tt
from tests.models.networks import TINY, TINY_CONFIGS, TINY_VANILLA, tiny_network
from trust_tta.errors import CheckpointError
from trust_tta.models.checkpoint import Checkpoint, load_checkpoint
from trust_tta.models.networks import FAMILIES
from trust_tta.models.weights import read_weights, state_digest

State = dict[str, Tensor]

LINEAR = re.compile(r"(in_proj|out_proj|fc1|fc2|reduction)\.weight$")


def respell(*rules: tuple[str, str]) -> Callable[[State], State]:
    def apply(state: State) -> State:
        for pattern, replacement in rules:
            state = {re.sub(pattern, replacement, name): tensor for name, tensor in state.items()}
        return state

    return apply


def as_convolutions(state: State) -> State:
    return {n: t[:, :, None, None] if LINEAR.search(n) else t for n, t in state.items()}


def without_counters(state: State) -> State:
    return {n: t for n, t in state.items() if "num_batches" not in n}


def everything_old(state: State) -> State:
    rules = [(r"^classifier\.(norm|head)\.", r"\1."), (r"(blocks\.\d+)\.norm\.", r"\1.ln_1.")]
    return respell(*rules, (r"\.op\.", ".self_attention."), (r"^", "module."))(as_convolutions(state))


SPELLINGS: dict[str, Callable[[State], State]] = {
    "as-it-is": respell(),
    "head_": respell((r"^classifier\.head\.", "classifier.head_.")),
    "ln_1-self_attention": respell((r"(blocks\.\d+)\.norm\.", r"\1.ln_1."), (r"\.op\.", ".self_attention.")),
    "head-and-norm-on-top": respell((r"^classifier\.(norm|head)\.", r"\1.")),
    "module": respell((r"^", "module.")),
    "1x1-convolutions": as_convolutions,
    "without-counters": without_counters,
    "everything-old": everything_old,
}


def assert_same(model: tt.VMamba, state: State) -> None:
    own = model.state_dict()
    assert own.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(own[name], tensor), name


@pytest.mark.parametrize("config", TINY_CONFIGS)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_loads(spelling: str, config: str) -> None:
    source, target = tiny_network(TINY_CONFIGS[config], seed=1), tiny_network(TINY_CONFIGS[config], seed=2)
    expected = source.state_dict()
    load_checkpoint(target, SPELLINGS[spelling](expected))
    if spelling != "without-counters":
        assert_same(target, expected)


def test_the_old_patch_embedding_loads() -> None:
    source, target = tiny_network(TINY_VANILLA, seed=1), tiny_network(TINY_VANILLA, seed=2)
    rules = respell((r"^patch_embed\.0\.", "patch_embed.proj."), (r"^patch_embed\.2\.", "patch_embed.norm."))
    load_checkpoint(target, rules(source.state_dict()))
    assert_same(target, source.state_dict())


@pytest.mark.parametrize("key", [None, "model", "state_dict", "model_ema"])
def test_pth_files(tmp_path: Path, key: str | None) -> None:
    state = tiny_network(seed=1).state_dict()
    torch.save(state if key is None else {key: state, "epoch": 3, "optimizer": {"lr": 0.1}}, tmp_path / "net.pth")
    assert_same(load_into_tiny(tmp_path / "net.pth"), state)


def load_into_tiny(source: Any, **options: Any) -> tt.VMamba:
    model = tiny_network(seed=9)
    assert load_checkpoint(model, source, **options) is model
    return model


def test_the_moving_average_is_taken_on_request(tmp_path: Path) -> None:
    plain, average = tiny_network(seed=1).state_dict(), tiny_network(seed=2).state_dict()
    torch.save({"model": plain, "model_ema": average}, tmp_path / "net.pth")
    assert_same(load_into_tiny(tmp_path / "net.pth"), plain)
    assert_same(load_into_tiny(tmp_path / "net.pth", ema=True), average)


def test_safetensors(tmp_path: Path) -> None:
    state = {k: v.contiguous() for k, v in tiny_network(seed=1).state_dict().items()}
    save_file(state, tmp_path / "net.safetensors")
    assert_same(load_into_tiny(tmp_path / "net.safetensors"), state)


def test_half_precision_is_widened() -> None:
    state = tiny_network(seed=1).half().state_dict()
    model = load_into_tiny(state)
    assert model.classifier.head.weight.dtype == torch.float64
    assert_same(model, {k: v.double() for k, v in state.items()})


def test_the_head_can_be_kept() -> None:
    source, target = tt.VMamba(TINY.override({"num_classes": 11})), tiny_network(seed=2).float()
    head = target.classifier.head.weight.clone()
    load_checkpoint(target, source.state_dict(), head=False)
    assert torch.equal(target.classifier.head.weight, head)
    assert torch.equal(target.classifier.norm.weight, source.classifier.norm.weight)  # type: ignore[arg-type]


def test_a_file_with_a_foreign_configuration_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's training files carry a yacs CfgNode; yacs need not be installed to read them."""
    config = types.ModuleType("yacs.config")

    class CfgNode(dict):  # type: ignore[type-arg]
        def __init__(self, values: dict[str, Any]) -> None:
            super().__init__(values)
            self.__dict__["__immutable__"] = False
            self.__dict__["__renamed_keys__"] = {}

    CfgNode.__module__, CfgNode.__qualname__ = "yacs.config", "CfgNode"
    config.CfgNode = CfgNode  # type: ignore[attr-defined]
    state = tiny_network(seed=1).state_dict()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "yacs", types.ModuleType("yacs"))
        patch.setitem(sys.modules, "yacs.config", config)
        content = {"model": state, "config": CfgNode({"MODEL": CfgNode({"NAME": "vssm", "DEPTHS": [2, 2]})})}
        torch.save(content, tmp_path / "net.pth")
    assert "yacs" not in sys.modules
    assert_same(load_into_tiny(tmp_path / "net.pth"), state)


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def dump(content: Any, path: Path) -> None:
    path.write_bytes(pickle.dumps(content, protocol=2))


@pytest.mark.parametrize("write", [torch.save, dump])
def test_code_in_a_file_is_not_run(tmp_path: Path, write: Callable[[Any, Path], None]) -> None:
    write({"config": Malicious(tmp_path / "ran")}, tmp_path / "net.pth")
    assert_refused(tmp_path / "net.pth", "asks for the Python object '.*mkdir', and loading a file never executes code")
    assert not (tmp_path / "ran").exists()


def assert_refused(source: Any, words: str, model: tt.VMamba | None = None) -> str:
    """Refused in one line with these words, and not one value of the network has changed."""
    model = model or tiny_network(seed=9)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=words) as caught:
        load_checkpoint(model, source)
    assert "\n" not in str(caught.value)
    assert_same(model, before)
    return str(caught.value)


@pytest.mark.parametrize("keep", [0, 10, 0.5, 0.99])
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_truncated_file_is_refused(tmp_path: Path, suffix: str, keep: float) -> None:
    path = tmp_path / f"net{suffix}"
    state = {k: v.contiguous() for k, v in tiny_network().state_dict().items()}
    save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
    content = path.read_bytes()
    path.write_bytes(content[: int(keep if keep >= 1 else len(content) * keep)])
    assert_refused(path, "cannot be read as a checkpoint: .*; is the download complete")


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    assert_refused(tmp_path / "absent.pth", "no checkpoint at .*absent.pth'")
    assert_refused(tmp_path, "no checkpoint at")
    (tmp_path / "page.pth").write_text("<html>not found</html>")
    assert_refused(tmp_path / "page.pth", "cannot be read")
    torch.save([1, 2], tmp_path / "list.pth")
    assert_refused(tmp_path / "list.pth", "holds a list, not a state dict")
    assert_refused({"epoch": 3}, "the given state dict holds no parameters")


def test_layer_norm_and_batch_norm_are_told_apart() -> None:
    layer, batch = (tiny_network(TINY_CONFIGS[norm]) for norm in ("layer", "batch"))
    assert_refused(layer.state_dict(), "trained with LayerNorm .* network has BatchNorm; .*without '_bn'", batch)
    assert_refused(batch.state_dict(), "trained with BatchNorm .* network has LayerNorm; .*'_bn' variant", layer)


def test_missing_unknown_and_misshapen_parameters_are_named() -> None:
    state = tiny_network().state_dict()
    lost = "layers.0.blocks.0.op.A_logs"
    message = assert_refused({k: v for k, v in state.items() if k != lost}, "1 missing from the file")
    assert lost in message
    message = assert_refused(state | {"layers.7.extra": torch.zeros(2)}, "1 unknown to the network")
    assert "layers.7.extra" in message
    message = assert_refused(state | {"classifier.head.bias": torch.zeros(5)}, "1 of another shape")
    assert "classifier.head.bias (5,) in the file, (3,) in the network" in message
    both = {k: v for k, v in state.items() if k != lost} | {"classifier.head.bias": torch.zeros(5)}
    message = assert_refused(both, "missing.*another shape")


def test_weights_that_no_network_can_use_are_named() -> None:
    state = tiny_network().state_dict()
    spoilt = state["classifier.head.weight"].clone()
    spoilt[1, 2] = torch.nan
    message = assert_refused(state | {"classifier.head.weight": spoilt}, "1 with values that are not finite")
    assert "classifier.head.weight" in message
    assert_refused(state | {"classifier.head.bias": torch.zeros(3, dtype=torch.int64)}, "1 of whole numbers")


def test_another_number_of_classes_is_explained() -> None:
    other = tt.VMamba(TINY.override({"num_classes": 7})).state_dict()
    message = assert_refused(other, "another shape")
    assert "classifier.head.weight (7, 16) in the file, (3, 16) in the network" in message


def test_two_spellings_of_one_parameter_are_refused() -> None:
    state = tiny_network().state_dict()
    double = state | {"head.bias": state["classifier.head.bias"] + 1}
    assert_refused(double, "twice")


def test_digests(tmp_path: Path) -> None:
    state = tiny_network(seed=1).state_dict()
    assert state_digest(state) == state_digest(dict(reversed(state.items())))
    changed = {k: v.clone() for k, v in state.items()}
    changed["classifier.head.bias"][0] += 1
    assert state_digest(changed) != state_digest(state)
    torch.save(state, tmp_path / "net.pth")
    assert read_weights(tmp_path / "net.pth").sha256 == hashlib.sha256((tmp_path / "net.pth").read_bytes()).hexdigest()


def test_a_network_far_larger_than_the_file_is_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "small.safetensors"
    save_file({"classifier.head.bias": torch.zeros(10)}, file, {"variant": "vmamba_base_s2l15"})
    monkeypatch.setattr(FAMILIES[tt.VMambaConfig], "__init__", lambda *_: pytest.fail("it was built"))
    with pytest.raises(CheckpointError, match=r"holds 1\.0e\+01 numbers and the network .* has about 8\.\de\+07"):
        Checkpoint.open(file).load()
