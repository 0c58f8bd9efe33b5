"""Experiments, networks and recipes that nobody should write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.harness import Drawn, Edit, damaged, edited, edits, fuzz, nothing_written, refusal, texts, values
from trust_tta.bench.config import DataConfig, ModelConfig, RunConfig, StreamsConfig
from trust_tta.bench.parsing import parse_config, read_parts
from trust_tta.methods.registry import METHODS, check_options, method_options
from trust_tta.models.config import VMambaConfig
from trust_tta.preprocessing import Preprocessing
from trust_tta.schema import parse
from trust_tta.training.recipe import FinetuneRecipe, TrainRecipe, recipe_for

ROOT = Path(__file__).parents[2]
FILES = [file.read_bytes() for file in sorted((ROOT / "configs").rglob("*.toml"))]
RECIPES = [file.read_bytes() for file in sorted((ROOT / "recipes").rglob("*.toml"))]
CONTENT: dict[str, Any] = {
    "experiment": "e",
    "model": {"name": "vmamba_nano", "checkpoint": "vmamba_nano_cifar10", "overrides": {"d_state": 1}},
    "data": {"dataset": "sample", "domains": ["fog", "snow"], "limit": 50},
    "stream": {"setting": "online", "batch_size": 16, "seeds": [0, 1]},
    "methods": ["source", {"name": "tent", "lr": 1e-3, "label": "t"}, {"name": "trust", "k": 2, "mode": "split"}],
    "device": "cpu",
}
NAMES = tuple(
    {*RunConfig.model_fields, *ModelConfig.model_fields, *DataConfig.model_fields, *StreamsConfig.model_fields}
    | {*VMambaConfig.model_fields, "parts", "small", "options", "CORRUPTION", "OPTIM"}
)
OFFICIAL: dict[str, Any] = {
    "depths": [2, 2, 8, 2], "dims": 96, "num_classes": 10, "in_chans": 3, "patch_size": 4, "drop_path_rate": 0.2,
    "ssm_d_state": 1, "ssm_ratio": 1.0, "ssm_dt_rank": "auto", "ssm_conv": 3, "ssm_conv_bias": False, "mlp_ratio": 4.0,
    "forward_type": "v05_noz", "norm_layer": "ln2d", "downsample_version": "v3", "patchembed_version": "v2",
}  # fmt: skip
PREPROCESSING: dict[str, Any] = {
    "size": 32, "resize": 36, "crop": True, "mean": [0.5, 0.5, 0.5], "std": [0.2, 0.2, 0.2], "interpolation": "bicubic",
}  # fmt: skip


@fuzz(900, content=damaged(st.sampled_from(FILES)), small=st.booleans())
def test_damaged_toml(folder: Path, content: bytes, small: bool) -> None:
    (folder / "c.toml").write_bytes(content)
    with nothing_written(folder), refusal():
        read_parts(folder / "c.toml", small=small)


@fuzz(1100, changes=edits())
def test_odd_values_in_experiments(folder: Path, changes: list[Edit]) -> None:
    content = edited(CONTENT, changes, more=NAMES)
    with refusal():
        parse_config(content if isinstance(content, dict) else {"model": content}, name="e", origin="the test")


@fuzz(400, name=st.sampled_from(sorted(METHODS)), changes=edits())
def test_odd_options_of_methods(folder: Path, name: str, changes: list[Edit]) -> None:
    options = edited({key: value for key, value in method_options(name).items()}, changes, more=("lr", "k", "mode"))
    with refusal():
        check_options(name, options)


@fuzz(300, changes=edits(), official=st.booleans())
def test_odd_fields_of_networks(folder: Path, changes: list[Edit], official: bool) -> None:
    with refusal():
        if official:
            VMambaConfig.from_official(edited(OFFICIAL, changes, more=("imgsize", "gmlp", "posembed")))
        else:
            VMambaConfig().override(edited({"dims": [8, 16], "depths": [1, 1]}, changes, more=NAMES))


@fuzz(200, changes=edits())
def test_odd_preprocessing(folder: Path, changes: list[Edit]) -> None:
    with refusal():
        Preprocessing.from_mapping(edited(PREPROCESSING, changes), where="the test")


@fuzz(300, content=damaged(st.sampled_from(RECIPES) | st.just(b'epochs = 3\nlr = 1e-3\nprecision = "bf16"\n')))
def test_damaged_recipes(folder: Path, content: bytes) -> None:
    from trust_tta.config_io import read_toml

    (folder / "r.toml").write_bytes(content)
    with nothing_written(folder), refusal():
        recipe_for("cifar10", read_toml(folder / "r.toml"), where="r.toml")


@fuzz(400, changes=edits(), dataset=texts, size=st.none() | st.integers(1, 512))
def test_odd_values_in_recipes(folder: Path, changes: list[Edit], dataset: str, size: int | None) -> None:
    given = edited({"epochs": 3, "mean": [0.5, 0.5, 0.5]}, changes, more=tuple(TrainRecipe.model_fields))
    with refusal():
        recipe_for(dataset, given, size=size)
    with refusal():
        parse(FinetuneRecipe, given, where="the test")


@fuzz(200, value=values)
def test_odd_json(folder: Path, value: Drawn) -> None:
    from trust_tta.config_io import read_json

    try:
        text = json.dumps(value.value, default=str)
    except (ValueError, RecursionError):
        text = "[" * 5000
    (folder / "x.json").write_text(text, encoding="utf-8", errors="surrogatepass")
    with nothing_written(folder), refusal():
        read_json(folder / "x.json")
