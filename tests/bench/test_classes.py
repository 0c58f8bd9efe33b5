"""Classes are matched by name all the way from class folders to the accuracy of a cell."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from tests.bench.tiny import Recorder, run
from trust_tta.bench.config import MethodConfig, RunConfig
from trust_tta.bench.experiment import make_plan
from trust_tta.bench.parsing import parse_config
from trust_tta.cli.main import main
from trust_tta.data import load_sample
from trust_tta.data.class_names import CIFAR10_CLASSES
from trust_tta.errors import ConfigError
from trust_tta.models.checkpoint import Checkpoint
from trust_tta.results import Cell

PER_CLASS = 3


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Three shipped images of each class, in a folder of its name."""
    images, labels = load_sample()
    for label, name in enumerate(CIFAR10_CLASSES):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i, index in enumerate(np.flatnonzero(labels == label)[:PER_CLASS]):
            Image.fromarray(images[index]).save(tmp_path / "photos" / name / f"{i}.png")
    return tmp_path / "photos"


def write_network(path: Path, *, classes: list[str] | None, order: list[int]) -> Path:
    """The shipped network with its outputs in another order, and a description with or without their names."""
    shipped = Checkpoint.open("vmamba_nano_cifar10")
    head = {"classifier.head.weight", "classifier.head.bias"}
    state = {name: tensor[order].clone() if name in head else tensor for name, tensor in shipped.state.items()}
    metadata = {"variant": "vmamba_nano", "preprocessing": shipped.preprocessing.to_json(), "num_classes": "10"}
    save_file(state, path, metadata=metadata | ({"classes": json.dumps(classes)} if classes else {}))
    return path


def config(folder: Path, photos: Path, checkpoint: str, **data: Any) -> RunConfig:
    content = {
        "experiment": "classes",
        "model": {"checkpoint": checkpoint},
        "data": {"dataset": "folder", "root": str(photos), **data},
        "stream": {"batch_size": 30},
        "methods": ["source"],
        "device": "cpu",
        "store": str(folder / f"{Path(checkpoint).stem}.sqlite"),
    }
    return parse_config(content, name="classes", origin="the test")


def accuracy(found: tuple[list[Cell], Recorder]) -> float:
    (cell,), _ = found
    return cell.result.accuracy


def test_outputs_in_another_order_change_nothing(photos: Path, tmp_path: Path) -> None:
    usual = run(config(tmp_path, photos, "vmamba_nano_cifar10"))
    order = np.random.default_rng(0).permutation(10).tolist()
    other = write_network(tmp_path / "other.safetensors", classes=[CIFAR10_CLASSES[k] for k in order], order=order)
    assert accuracy(usual) > 0.7
    assert accuracy(run(config(tmp_path, photos, str(other)))) == accuracy(usual)


def test_a_subset_of_the_classes_is_scored(photos: Path, tmp_path: Path) -> None:
    """Among four classes the network errs no more often than among its ten."""
    for name in CIFAR10_CLASSES[:6]:
        shutil.rmtree(photos / name)
    found, recorder = run(config(tmp_path, photos, "vmamba_nano_cifar10"))
    assert found[0].result.samples == 4 * PER_CLASS
    assert found[0].result.accuracy > 0.7
    (warning,) = recorder.warnings
    assert warning.startswith("warning: folder has 4 of the 10 classes of ")


def test_a_misspelled_class_is_refused_with_both_lists(photos: Path, tmp_path: Path) -> None:
    """It comes first in the order of names: all labels would be off by one, and the accuracy that of chance."""
    (photos / "truck").rename(photos / "Truck")
    wrong = config(tmp_path, photos, "vmamba_nano_cifar10")
    with pytest.raises(ConfigError, match="'Truck' is spelled 'truck' in the network.*folder has Truck, airplane"):
        make_plan(wrong)


def test_a_network_without_class_names_gives_a_warning(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nameless = write_network(tmp_path / "nameless.safetensors", classes=None, order=list(range(10)))
    cells, recorder = run(config(tmp_path, photos, str(nameless)))
    (warning,) = recorder.warnings
    assert (
        "nameless.safetensors' does not name its classes: those of folder are taken in the order airplane," in warning
    )
    assert cells[0].result.accuracy > 0.7
    data = ["--dataset", "folder", "--root", str(photos), "--methods", "source", "--device", "cpu"]
    assert main(["bench", "--checkpoint", str(nameless), *data, "--store", str(tmp_path / "cli.sqlite")]) == 0
    assert "warning: '" in capsys.readouterr().out


def test_classes_file_names_the_outputs(photos: Path, tmp_path: Path) -> None:
    usual = accuracy(run(config(tmp_path, photos, "vmamba_nano_cifar10")))
    order = np.random.default_rng(0).permutation(10).tolist()
    nameless = write_network(tmp_path / "nameless.safetensors", classes=None, order=order)
    (tmp_path / "classes.txt").write_text("\n".join(CIFAR10_CLASSES[k] for k in order) + "\n")
    named = config(tmp_path, photos, str(nameless))
    named = named.changed(model=named.model.changed(classes=str(tmp_path / "classes.txt")))
    assert accuracy(run(named)) == usual
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    with pytest.raises(ConfigError, match="outputs 10 classes, but 2 names are given"):
        make_plan(named)


def test_clean_domain_serves_eata_and_clean_after(photos: Path, tmp_path: Path) -> None:
    world = tmp_path / "world"
    for domain in ("day", "night"):
        shutil.copytree(photos, world / domain)
    data = {"domains": ["night"], "clean": "day"}
    eata = config(tmp_path, world, "vmamba_nano_cifar10", **data)
    eata = eata.changed(methods=(MethodConfig(name="eata"),), clean_after=True)
    (cell,), _ = run(eata)
    assert cell.result.clean_accuracy is not None
    assert cell.key.option_values["fisher"] == "256 clean images of day"
    with pytest.raises(ConfigError, match="not known which images of folder are clean"):
        run(eata.changed(data=eata.data.changed(clean=None), store=str(tmp_path / "none.sqlite")))


def test_a_subset_of_the_classes_is_scored_among_itself_and_among_all(photos: Path, tmp_path: Path) -> None:
    for name in CIFAR10_CLASSES[3:]:
        shutil.rmtree(photos / name)
    (cell,), _ = run(config(tmp_path, photos, "vmamba_nano_cifar10"))
    shipped = Checkpoint.open("vmamba_nano_cifar10")
    images, labels = load_sample()
    chosen = np.concatenate([np.flatnonzero(labels == label)[:PER_CLASS] for label in range(3)])
    with torch.no_grad():
        logits = shipped.load()(shipped.preprocessing(images[chosen]))
    truth = torch.from_numpy(labels[chosen])
    assert cell.result.accuracy == float((logits[:, :3].argmax(1) == truth).double().mean())
    assert cell.result.accuracy_all_outputs == float((logits.argmax(1) == truth).double().mean())


OUTSIDE = """
import numpy as np
from trust_tta.data import load_sample
class Some:
    class_names = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    def __init__(self, root, count=20):
        self.images, self.labels = (array[:count] for array in load_sample())
        self.domains = ["first"] * 10 + ["second"] * (count - 10)
"""


def test_a_data_set_from_outside_goes_through_a_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outside_bench.py").write_text(OUTSIDE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "outside_bench", raising=False)
    changes: dict[str, Any] = {"dataset": "outside_bench:Some", "options": {"count": 40}}
    cells, recorder = run(config(tmp_path, tmp_path, "vmamba_nano_cifar10", **changes))
    assert {cell.key.domain: cell.result.samples for cell in cells} == {"first": 10, "second": 30}
    assert recorder.warnings == []


def test_a_sequence_of_short_domains(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"dataset": "sample", "domains": ["contrast", "brightness"], "limit": 4}
    short = config(tmp_path, tmp_path, "vmamba_nano_cifar10", **changes)
    short = short.changed(stream=short.stream.changed(setting="sequence", segments=12, batch_size=(4,)))
    cells, _ = run(short)
    names = [cell.key.domain for cell in sorted(cells, key=lambda cell: cell.key.domain)]
    assert [name[:4] for name in names] == [f"{k:03d}-" for k in range(1, 13)]
    assert len({name[4:] for name in names[:10]}) == 10
    assert {cell.key.severity for cell in cells} == {1, 2, 3, 4, 5}


def test_images_belong_to_arrays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "--checkpoint", "vmamba_nano_cifar10", "--dataset", "sample", "--methods", "source"]
    assert main([*arguments, "--images", "mine.npy", "--store", str(tmp_path / "x.sqlite")]) == 2
    assert "--images: only the data set 'array' takes images and labels" in capsys.readouterr().err
