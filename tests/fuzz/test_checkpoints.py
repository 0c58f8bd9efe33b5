"""Files of weights that were damaged, or made to hurt."""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor

import trust_tta as tt
from tests.fuzz.harness import Drawn, Edit, damaged, edited, edits, fuzz, nothing_written, refusal, texts, values
from tests.fuzz.tensors import odd_tensors
from tests.models.networks import TINY, tiny_network
from trust_tta.models.checkpoint import Checkpoint, load_checkpoint

OVERRIDES = {"depths": [1, 2], "dims": [8, 16], "drop_path": 0.0}
METADATA: dict[str, Any] = {
    "variant": "vmamba_nano",
    "overrides": OVERRIDES,
    "classes": ["a", "b", "c"],
    "num_classes": 3,
    "preprocessing": {"size": 32, "mean": [0.5, 0.5, 0.5], "std": [0.2, 0.2, 0.2]},
    "license": "MIT",
}


@cache
def weights() -> dict[str, Tensor]:
    return {name: tensor.float().contiguous() for name, tensor in tiny_network().state_dict().items()}


@cache
def model() -> tt.VMamba:
    return tt.VMamba(TINY)


def safetensors(metadata: dict[str, Any]) -> bytes:
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in metadata.items()}
    return save(weights(), texts)


def pickled(content: Any, *, zipped: bool = True) -> bytes:
    file = io.BytesIO()
    torch.save(content, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


def unchanged(folder: Path, source: Any) -> None:
    """`source` is loaded whole, or refused and the network left as it was."""
    before = {name: tensor.clone() for name, tensor in model().state_dict().items()}
    try:
        with nothing_written(folder), refusal():
            load_checkpoint(model(), source)
            before = {name: tensor.clone() for name, tensor in model().state_dict().items()}
            assert all(bool(tensor.isfinite().all()) for tensor in before.values())
    finally:
        assert all(torch.equal(tensor, before[name]) for name, tensor in model().state_dict().items())


@fuzz(500, content=damaged(st.builds(lambda: safetensors(METADATA))))
def test_damaged_safetensors(folder: Path, content: bytes) -> None:
    (folder / "net.safetensors").write_bytes(content)
    unchanged(folder, folder / "net.safetensors")
    with nothing_written(folder), refusal():
        Checkpoint.open(folder / "net.safetensors")


@fuzz(400, content=damaged(st.booleans().map(lambda zipped: pickled({"model": weights()}, zipped=zipped))))
def test_damaged_pickles(folder: Path, content: bytes) -> None:
    (folder / "net.pth").write_bytes(content)
    unchanged(folder, folder / "net.pth")


@fuzz(
    400,
    changes=st.dictionaries(
        st.integers(0, 100) | texts, odd_tensors | values.map(lambda drawn: drawn.value), min_size=1, max_size=3
    ).map(Drawn),
    file=st.booleans(),
)
def test_odd_tensors(folder: Path, changes: Drawn, file: bool) -> None:
    names = sorted(weights())
    content: Any = weights() | {names[k % len(names)] if isinstance(k, int) else k: v for k, v in changes.value.items()}
    if file:
        try:
            (folder / "net.pth").write_bytes(pickled(content))
        except Exception:  # what cannot be saved cannot come in a file
            return
        content = folder / "net.pth"
    unchanged(folder, content)


@fuzz(400, changes=edits())
def test_odd_metadata(folder: Path, changes: list[Edit]) -> None:
    try:
        content = safetensors(edited(METADATA, changes, more=("step", "num_classes")))
    except Exception:  # what cannot be written as JSON and UTF-8
        return
    (folder / "net.safetensors").write_bytes(content)
    with nothing_written(folder), refusal():
        checkpoint = Checkpoint.open(folder / "net.safetensors")
        checkpoint.load()
