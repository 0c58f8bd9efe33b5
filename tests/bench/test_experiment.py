"""The checkpoint and the device of an experiment."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.bench.tiny import OVERRIDES, write_checkpoint
from trust_tta.bench.config import DataConfig, ModelConfig
from trust_tta.bench.data import ExperimentData
from trust_tta.bench.environment import choose_device
from trust_tta.bench.experiment import find_checkpoint, load_network
from trust_tta.errors import CheckpointError, ConfigError


def test_the_domain_is_filled_in(tmp_path: Path) -> None:
    write_checkpoint(tmp_path).rename(tmp_path / "without_fog.pth")
    config = ModelConfig(checkpoint=str(tmp_path / "without_{domain}.pth"), name="vmamba_nano")
    assert find_checkpoint(config, domain="fog").file == tmp_path / "without_fog.pth"
    with pytest.raises(CheckpointError, match="without_snow.pth"):
        find_checkpoint(config, domain="snow")


def test_other_classes_than_the_data_has_are_refused(tmp_path: Path) -> None:
    config = ModelConfig(
        checkpoint=str(write_checkpoint(tmp_path, classes=7)), name="vmamba_nano", num_classes=7, overrides=OVERRIDES
    )
    dataset = ExperimentData(DataConfig(dataset="sample")).clean()
    checkpoint = find_checkpoint(config, domain="clean")
    with pytest.raises(ConfigError, match="outputs 7 classes, but sample has 10"):
        load_network(checkpoint, dataset=dataset, device=torch.device("cpu"))


def test_devices() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="'gpu' is unknown"):
        choose_device("gpu")
    if not torch.cuda.is_available():
        assert choose_device("auto") == torch.device("cpu")
        with pytest.raises(ConfigError, match="needs a GPU"):
            choose_device("cuda")
