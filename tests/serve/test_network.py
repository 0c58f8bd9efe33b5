"""Networks to serve: from a checkpoint, or from code that loads its own weights; class names and preprocessing."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

from tests.methods.networks import same
from tests.serve.services import CLASSES, SIZE, pixels, running, write_checkpoint
from trust_tta.cli.main import build_parser
from trust_tta.cli.serve import _network_source
from trust_tta.config_io import read_class_names
from trust_tta.errors import ConfigError
from trust_tta.live.guard import Guard
from trust_tta.live.stream import Stream
from trust_tta.methods.registry import create_method
from trust_tta.preprocessing import Preprocessing
from trust_tta.serve.network import NetworkSource, open_network
from trust_tta.serve.service import Service


class OwnNetwork(nn.Sequential):
    """A small CNN of four classes that makes its own weights."""

    def __init__(self) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            super().__init__(
                nn.Conv2d(3, 8, 3, stride=2, padding=1),
                nn.BatchNorm2d(8),
                nn.ReLU(),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
                nn.Linear(8, 4),
            )


class NarrowInput(OwnNetwork):
    """Its input lies between -0.5 and 0.5."""

    preprocessing = Preprocessing(size=32, resize=None, crop=False, mean=(0.5,) * 3, std=(1.0,) * 3)


OWN = f"{__name__}:OwnNetwork"


def source_of(*flags: str) -> NetworkSource:
    return _network_source(build_parser().parse_args(["serve", *flags]))


def test_default_is_the_shipped_network_unless_a_model_is_given(tmp_path: Path) -> None:
    assert source_of() == NetworkSource("vmamba_nano_cifar10")
    assert source_of("--model", OWN) == NetworkSource(None, OWN)
    file = write_checkpoint(tmp_path)
    assert source_of("--checkpoint", str(file), "--model", "vmamba_nano").checkpoint == str(file.resolve())
    with pytest.raises(ConfigError, match="give --checkpoint FILE, --model NAME, or both"):
        NetworkSource(None).open()


@pytest.mark.parametrize("method", ["tent", "tide", "roid", "cotta"])
def test_batches_of_noise_leave_the_method_as_it_was(method: str) -> None:
    network = open_network(source_of("--model", OWN, "--preprocessing", "cifar32"), method, warm_up=(1, 4, 8))
    fresh = create_method(method, OwnNetwork().eval(), statistics=network.method.options.statistics)
    assert same(network.method.state_dict(), fresh.state_dict())


def test_network_that_loads_itself_is_served(tmp_path: Path) -> None:
    names = tmp_path / "classes.txt"
    names.write_text("\n".join(CLASSES) + "\n")
    source = source_of("--model", OWN, "--preprocessing", "cifar32", "--classes", str(names))
    network = open_network(source, "tide")
    assert (network.name, network.classes, network.outputs) == ("ownnetwork", CLASSES, (4,))
    service = Service(network, tmp_path / "state")
    with running(service):
        raw = pixels(2, size=32)
        predicted = service.predict(torch.from_numpy(raw), stream="a", adapt=False).result(60)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            service.predict(torch.from_numpy(raw).permute(0, 3, 1, 2).float(), stream="a", adapt=False).result(60)
    stream = Stream(open_network(source, "tide").method, guard=Guard())
    expected = stream(network.preprocessing(raw), adapt=False).logits
    torch.testing.assert_close(predicted.logits, expected)
    assert any("values from 0 to 255" in str(warning.message) for warning in caught)


@pytest.mark.filterwarnings("error::trust_tta.errors.TrustWarning")
def test_the_first_run_takes_pixels_so_that_nothing_warns_of_their_range() -> None:
    open_network(NetworkSource(None, f"{__name__}:NarrowInput"), "tide")


def test_class_names_come_from_the_folders_of_the_reference_if_their_number_is_right(tmp_path: Path) -> None:
    for name in CLASSES:
        (tmp_path / "clean" / name).mkdir(parents=True)
        Image.fromarray(pixels(size=SIZE)[0]).save(tmp_path / "clean" / name / "1.png")
    flags = ("--model", OWN, "--preprocessing", "cifar32", "--reference", str(tmp_path / "clean"))
    assert read_class_names(tmp_path / "clean") == CLASSES
    assert source_of(*flags).classes == CLASSES
    (tmp_path / "clean" / "eel").mkdir()
    assert source_of(*flags).classes is None
    assert source_of("--reference", str(tmp_path / "clean")).classes is None  # the shipped network states its own


def test_wrong_number_of_class_names_is_refused() -> None:
    with pytest.raises(ConfigError, match="outputs 4 classes, but 2 names are given"):
        open_network(NetworkSource(None, OWN, "cifar32", ("a", "b")), "source")
