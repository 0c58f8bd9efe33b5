"""The cells of an experiment."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from tests.bench.tiny import tiny_config
from trust_tta.bench.data import ExperimentData
from trust_tta.bench.experiment import ExperimentPlan, make_plan


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def plan(folder: Path, **changes: Any) -> ExperimentPlan:
    config = tiny_config(folder, **changes)
    return make_plan(config, ExperimentData(config.data))


def shape(found: ExperimentPlan) -> list[tuple[str, list[str]]]:
    return [(sequence.method.name, [key.domain for key in sequence.keys]) for sequence in found.sequences]


@pytest.mark.parametrize("setting", ["online", "standard", "online+correlated"])
def test_a_reset_before_each_domain_gives_sequences_of_one_cell(tmp_path: Path, setting: str) -> None:
    assert shape(plan(tmp_path, stream={"setting": setting})) == [
        ("source", ["gaussian_noise"]),
        ("tent", ["gaussian_noise"]),
        ("source", ["contrast"]),
        ("tent", ["contrast"]),
    ]


@pytest.mark.parametrize("setting", ["continual", "correlated"])
def test_without_resets_a_sequence_has_all_domains(tmp_path: Path, setting: str) -> None:
    both = ["gaussian_noise", "contrast"]
    assert shape(plan(tmp_path, stream={"setting": setting})) == [("source", both), ("tent", both)]


def test_mixed_domains_are_one_cell(tmp_path: Path) -> None:
    assert shape(plan(tmp_path, stream={"setting": "mixed"})) == [("source", ["mixed"]), ("tent", ["mixed"])]


def test_a_gradual_stream_is_reset_between_corruptions_only(tmp_path: Path) -> None:
    found = plan(tmp_path, stream={"setting": "online+gradual"}, methods=["tent"])
    assert [len(sequence.keys) for sequence in found.sequences] == [9, 9]
    assert [key.severity for key in found.sequences[0].keys] == [1, 2, 3, 4, 5, 4, 3, 2, 1]
    assert len({key.digest for key in found.keys}) == 18


def test_seeds_and_batch_sizes_multiply(tmp_path: Path) -> None:
    found = plan(tmp_path, stream={"seeds": [0, 1, 2], "batch_size": [8, 16]})
    assert len({key.digest for key in found.keys}) == 2 * 2 * 3 * 2
    assert [sequence.batches for sequence in found.sequences[:1]] == [(7,)]


def test_a_key_holds_all_options_and_the_weights(tmp_path: Path) -> None:
    (key, *_) = plan(tmp_path, methods=[{"name": "trust", "k": 2}]).keys
    options = key.option_values
    assert (options["k"], options["lr"], options["merge"], options["orders"]) == (2, 1e-4, "mean", None)
    assert key.checkpoint == sha256(tmp_path / "tiny10.pth")
    assert (key.dataset, key.severity, key.limit) == ("sample", 5, 50)


def test_statistics_of_clean_images_are_named_in_the_key(tmp_path: Path) -> None:
    (key, *_) = plan(tmp_path, methods=["foa"]).keys
    assert key.option_values["source_statistics"] == "256 clean images"


@pytest.mark.parametrize(
    "changes",
    [
        {"stream": {"shuffle": False}},
        {"stream": {"drop_last": True}},
        {"stream": {"setting": "online+correlated", "gamma": 0.5}},
        {"dtype": "bf16"},
        {"data": {"limit": 49}},
        {"data": {"severity": 4}},
        {"model": {"preprocessing": "squash224"}},
    ],
    ids=str,
)
def test_everything_that_changes_the_numbers_changes_the_key(tmp_path: Path, changes: dict[str, Any]) -> None:
    before, after = plan(tmp_path).keys, plan(tmp_path, **changes).keys
    assert not {key.fingerprint for key in before} & {key.fingerprint for key in after}


def test_what_decides_no_number_is_not(tmp_path: Path) -> None:
    assert plan(tmp_path).keys == plan(tmp_path, keep_samples=5, clean_after=True, confusion=True, device="auto").keys


def test_in_a_continual_stream_earlier_domains_change_the_fingerprint(tmp_path: Path) -> None:
    def fingerprints(setting: str, domains: list[str]) -> dict[str, str]:
        found = plan(tmp_path, stream={"setting": setting}, data={"domains": domains}, methods=["tent"])
        return {key.domain: key.fingerprint for key in found.keys}

    there, back = ["gaussian_noise", "contrast"], ["contrast", "gaussian_noise"]
    assert fingerprints("online", there) == fingerprints("online", back)
    one, other = fingerprints("continual", there), fingerprints("continual", back)
    assert one["gaussian_noise"] != other["gaussian_noise"]
    assert one["contrast"] != other["contrast"]


def test_a_network_for_each_domain(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    source = Path(str(config.model.checkpoint)).read_bytes()
    for name in ("gaussian_noise", "contrast"):
        (tmp_path / f"{name}.pth").write_bytes(source + name.encode())
    found = plan(tmp_path, model={"checkpoint": str(tmp_path / "{domain}.pth")}, methods=["tent"])
    assert [key.checkpoint for key in found.keys] == [
        sha256(tmp_path / "gaussian_noise.pth"),
        sha256(tmp_path / "contrast.pth"),
    ]


def test_stream_too_short_to_learn_from_is_noted(tmp_path: Path) -> None:
    (warning,) = make_plan(tiny_config(tmp_path)).warnings
    assert warning.startswith("too few batches between two resets to learn from (4)")
    assert not make_plan(tiny_config(tmp_path, stream={"batch_size": 8})).warnings
    assert not make_plan(tiny_config(tmp_path, methods=["source", "bn"])).warnings
