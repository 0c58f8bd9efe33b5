"""Experiments from TOML and flags: what they mean, and every mistake at once."""

from __future__ import annotations

import tomllib
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch

import trust_tta
from tests.bench.tiny import content, read_config, tiny_config
from trust_tta.bench.config import RunConfig
from trust_tta.bench.data import ExperimentData
from trust_tta.bench.parsing import parse_config, read_parts
from trust_tta.data.corruptions.table import CORRUPTIONS
from trust_tta.errors import ConfigError
from trust_tta.preprocessing import find_preset

DEMO = Path(__file__).parents[2] / "configs" / "demo.toml"
OURS = """
[stream]
setting = "online"
seeds = [7]
batch_size = 200
[model]
name = "vmamba_nano"
checkpoint = "net.pth"
[data]
dataset = "cifar10-c"
domains = ["fog", "snow"]
severity = 4
limit = 300
[[methods]]
name = "tent"
lr = 0.01
steps = 2
"""


def read(tmp_path: Path, text: str, changes: dict[str, Any] | None = None) -> RunConfig:
    path = tmp_path / "experiment.toml"
    path.write_text(text, encoding="utf-8")
    return read_config(path, changes)


def test_the_demo_runs_its_configuration() -> None:
    first, *_ = read_parts(Path(trust_tta.__file__).parent / "assets" / "demo_classification.toml")
    assert read_config(DEMO).changed(store="x") == first.changed(store="x")


def test_defaults_are_the_papers(tmp_path: Path) -> None:
    config = read(tmp_path, "methods = ['trust']\n[model]\ncheckpoint = 'x.pth'\n[data]\ndataset = 'sample'")
    assert config.experiment == "experiment"
    assert config.store == "runs/experiment.sqlite"
    assert (config.stream.setting, config.stream.batch_size, config.stream.seeds) == ("online", (128,), (0,))
    assert ExperimentData(config.data).domains() == CORRUPTIONS
    assert config.methods[0].all_options()["k"] == 6


def test_every_mistake_is_told_at_once(tmp_path: Path) -> None:
    wrong = {
        "experiment": 3,
        "dtyp": "bf16",
        "dtype": "float16",
        "model": {"name": "resnet50", "overrides": {"width": 3}, "preprocessing": "cifar64"},
        "data": {"dataset": "sample", "severity": 6, "domains": ["fog", "rain"], "limit": 0},
        "stream": {"setting": "offline", "batch_size": [16, 0], "seeds": [1, 1], "gamma": -1},
        "methods": ["tent", {"name": "trust", "kk": 2}, "tents", 5, {"name": "tent", "steps": 1}],
    }
    with pytest.raises(ConfigError) as caught:
        parse_config(wrong, name="x", origin="x.toml")
    message = str(caught.value)
    assert "\n" not in message
    expected = (
        "x.toml has 17 mistakes",
        "experiment is 3; give a string",
        "dtyp: there is no such option; did you mean 'dtype'?",
        "dtype is 'float16'; did you mean 'float32'?",
        "model.name: unknown network 'resnet50'; choose one of",
        "model.overrides: there is no field width",
        "model.checkpoint: is missing",
        "model.preprocessing: unknown preprocessing 'cifar64'; did you mean 'cifar",
        "data.severity is 6; give a value <= 5",
        "data.domains: 'rain' is not a corruption; choose one of clean, gaussian_noise",
        "data.limit is 0; give a value >= 1",
        "stream.setting: the setting 'offline' is not known",
        "stream.batch_size.1 is 0; give a value >= 1",
        "stream.seeds: [1, 1] has a value twice",
        "stream.gamma is -1; give a value > 0",
        "methods.1: method 'trust': kk: there is no such option",
        "methods.2: unknown method 'tents'",
        "methods.3: 5 is not a name",
    )
    for part in expected:
        assert part in message


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"methods": []}, "methods: the list is empty; name at least one"),
        ({"methods": ["tent", {"name": "tent", "lr": 1e-4}]}, "'tent' is listed twice with the same options"),
        ({"data": {"dataset": "cifar11"}}, "unknown data set 'cifar11'"),
        ({"data": {"dataset": "array"}}, "needs the files images and labels"),
        (
            {"data": {"dataset": "sample", "images": "mine.npy"}},
            "data.images: only the data set 'array' takes images and labels",
        ),
        ({"experiment": "a\x1b[31mred"}, "experiment: 'a\\x1b[31mred' has control characters"),
        ({"methods": [{"name": "tent", "label": "x\n"}]}, "label: 'x\\n' has control characters"),
        ({"methods": [{"name": "tent", "label": "trust"}, "trust"]}, "two methods have the label 'trust'"),
        ({"stream": {"gamma": float("inf")}}, "stream.gamma is inf; give a finite number"),
        ({"stream": {"gamma": date(2026, 1, 2)}}, "stream.gamma is datetime.date(2026, 1, 2); give a number"),
        ({"stream": {"batch_size": 10**5000}}, "batch_size.0 is an integer of 5001 digits; give a value <= 92233"),
        ({"stream": {"seeds": [[1]]}}, "stream.seeds.0 is (1,); give an integer"),
        ({"data": {"dataset": "pacs", "domains": ["photo"]}, "stream": {"setting": "gradual"}}, "no severities"),
        ({"model": {"checkpoint": "{domain}.pth"}, "stream": {"setting": "continual"}}, "needs a reset at each"),
        ({"model": {"preprocessing": {"size": 32, "hue": 1}}}, "model.preprocessing.hue: there is no such option"),
        ({"model": {"preprocessing": {"mean": [0.5, 0.5]}}}, "model.preprocessing.mean.2 is missing"),
        ({"model": {"preprocessing": {"size": 64, "resize": 32}}}, "resize is 32; it must be at least the size 64"),
        ({"data": {"dataset": "sample", "domains": []}}, "data.domains: the list is empty; give at least one"),
        ({"data": {"dataset": "cifar10-c", "domains": []}}, "data.domains: the list is empty"),
        ({"model": 5}, "model is 5; give a table"),
        ({"stream": {"seeds": True}}, "1 mistake: stream.seeds.0 is True; give an integer"),
        ({"options": {"lr": 0.5}}, "options: there is no such option"),
        ({"methods": [{"name": "tent", "lr": "fast"}]}, "method 'tent': lr is 'fast'; give a number"),
        ({"methods": [{"name": "trust", "episodic": "False"}]}, "episodic is 'False'; give true or false"),
        ({"methods": [{"name": "trust", "mode": "paralel"}]}, "mode is 'paralel'; choose one of sequential"),
        ({"methods": [{"name": "trust", "k": 2.5}]}, "method 'trust': k is 2.5; give an integer"),
        ({"methods": [{"name": "tent", "lr": -1.0}]}, "lr is -1.0; give a value >= 0"),
        ({"methods": [{"name": "foa", "seed": -1}]}, "method 'foa': seed is -1; give a value >= 0"),
        ({"keep_samples": -1}, "keep_samples is -1; give a value >= 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_is_named(tmp_path: Path, changes: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({**content(tmp_path), **changes}, name="x", origin="x.toml")
    assert part in str(caught.value)


def test_an_infinite_margin_is_an_option_like_any_other(tmp_path: Path) -> None:
    methods = [{"name": "eta", "margin": float("inf"), "weighting": False}, {"name": "eta", "weighting": False}]
    config = parse_config({**content(tmp_path), "methods": methods}, name="x", origin="x.toml")
    assert [m.all_options()["margin"] for m in config.methods] == ["inf", 0.4]
    assert config.methods[0].options["margin"] == float("inf")
    assert '"margin":"inf"' in config.to_json().replace(" ", "")


def test_reading_an_experiment_draws_no_random_numbers(tmp_path: Path) -> None:
    given = content(tmp_path)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    parse_config(given, name="x", origin="x.toml")
    assert torch.equal(torch.rand(2), expected)


def test_flags_change_the_file(tmp_path: Path) -> None:
    text = OURS + '[[methods]]\nname = "trust"\nlr = 0.5\nlabel = "mine"\n'
    changes = {
        "stream": {"seeds": [0, 1]},
        "data": {"limit": 8},
        "methods": ["bn", "trust"],
        "method_options": [("trust", "k", 4)],
    }
    config = read(tmp_path, text, changes)
    assert config.stream.seeds == (0, 1)
    assert config.stream.batch_size == (200,)
    assert (config.data.limit, config.data.severity) == (8, 4)
    assert [(m.name, m.label, dict(m.options)) for m in config.methods] == [
        ("bn", "", {}),
        ("trust", "mine", {"lr": 0.5, "k": 4}),
    ]


def test_an_option_of_a_method_that_is_not_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trust.k: the method 'trust' is not run; add it to --methods"):
        read(tmp_path, OURS, {"method_options": [("trust", "k", 4)]})


@pytest.mark.parametrize("text", ["9" * 5000, "[" * 3000 + "]" * 3000], ids=["5,000 digits", "3,000 deep"])
def test_values_too_large_to_read_are_one_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="experiment.toml' is n") as caught:
        read(tmp_path, f"stream.seeds = {text}")
    assert len(str(caught.value)) < 400


def test_a_name_that_is_a_huge_number_is_one_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="1 mistake: experiment is an integer of 5001 digits; give a string"):
        tiny_config(tmp_path, experiment=10**5000, store=str(tmp_path / "s.sqlite"))
    changed = {**content(tmp_path), "experiment": 10**5000}
    del changed["store"]
    with pytest.raises(ConfigError, match="1 mistake: experiment"):
        parse_config(changed, name="e", origin="the test")


def test_broken_and_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not TOML"):
        read(tmp_path, "methods = [")
    with pytest.raises(ConfigError, match="there is no file"):
        read_config(tmp_path / "nothing.toml")


def test_preprocessing_by_name_and_by_table(tmp_path: Path) -> None:
    named = tiny_config(tmp_path, model={"preprocessing": "cifar32"})
    assert named.model.preprocessing == find_preset("cifar32")
    spelled = tiny_config(
        tmp_path,
        model={
            "preprocessing": {
                "size": 32,
                "crop": True,
                "mean": [0.4914, 0.4822, 0.4465],
                "std": [0.247, 0.2435, 0.2616],
            }
        },
    )
    assert spelled.model.preprocessing == named.model.preprocessing


def test_the_record_of_a_configuration_is_complete(tmp_path: Path) -> None:
    import json

    recorded = json.loads(tiny_config(tmp_path).to_json())
    assert recorded["data"]["domains"] == ["gaussian_noise", "contrast"]
    assert recorded["model"]["overrides"]["dims"] == [8, 16]
    assert tomllib.loads(OURS)["data"]["limit"] == 300
