"""Data sets from outside the package: by "module:Name" and by an installed entry point."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.trees import thumbnails
from trust_tta.cli.main import main
from trust_tta.data import StreamConfig, available_domains, open_dataset, stream_datasets
from trust_tta.data.registry import find_spec
from trust_tta.errors import ConfigError, DataError
from trust_tta.preprocessing import Preprocessing

MODULE = """
import numpy as np
from PIL import Image


class Shapes:
    class_names = ("circle", "square")

    def __init__(self, root, count=12):
        self.images = [Image.new("RGB", (20 + i, 24), (i, 2 * i, 3 * i)) for i in range(count)]
        self.labels = [i % 2 for i in range(count)]
        self.domains = ["dusk" if i % 3 else "dawn" for i in range(count)]

    @staticmethod
    def fetch(root):
        (root / "shapes.txt").write_text("here")


class Arrays:
    class_names = ["a", "b"]
    images = np.arange(4 * 8 * 8 * 3, dtype=np.uint8).reshape(4, 8, 8, 3)
    labels = np.array([1, 0, 1, 0], dtype=np.int8)

    def __init__(self, root):
        pass


def nothing(root):
    return object()


def floats(root):
    found = Arrays(root)
    found.images = list(Arrays.images / 255)
    return found


thing = 3
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outside_shapes.py").write_text(MODULE)
    info = tmp_path / "outside_shapes-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-shapes\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[trust_tta.datasets]\nshapes = outside_shapes:Shapes\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "outside_shapes", raising=False)


@pytest.mark.parametrize("name", ["outside_shapes:Shapes", "shapes"])
def test_domains_images_and_labels(name: str, tmp_path: Path) -> None:
    assert find_spec(name).layout == "python"
    assert available_domains(name, tmp_path) == ("dawn", "dusk")
    dusk = open_dataset(name, tmp_path, domain="dusk")
    assert (dusk.name, dusk.domain, dusk.class_names, len(dusk)) == (name, "dusk", ("circle", "square"), 8)
    assert dusk.labels.tolist() == [i % 2 for i in range(12) if i % 3]
    assert (dusk.image(2) == np.asarray(Image.new("RGB", (24, 24), (4, 8, 12)))).all()
    assert len(open_dataset(name, tmp_path, domain="dusk", options={"count": 3})) == 2


def test_it_streams_like_any_other(tmp_path: Path) -> None:
    datasets = [open_dataset("shapes", tmp_path, domain=domain) for domain in ("dawn", "dusk")]
    assert datasets[0].fingerprint != datasets[1].fingerprint
    config = StreamConfig(setting="mixed", batch_size=5)
    (mixed,) = stream_datasets(datasets, config, preprocessing=Preprocessing(size=8, resize=None, crop=False))
    assert [tuple(batch.images.shape) for batch in mixed.batches] == [(5, 3, 8, 8), (5, 3, 8, 8), (2, 3, 8, 8)]


def test_arrays_have_one_domain(tmp_path: Path) -> None:
    dataset = open_dataset("outside_shapes:Arrays", tmp_path)
    assert dataset.domain == "all"
    assert dataset.labels.dtype == np.int64
    assert (dataset.image(3) == np.arange(4 * 8 * 8 * 3, dtype=np.uint8).reshape(4, 8, 8, 3)[3]).all()


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("outside_shapes:Shape", {}, ConfigError, "did you mean 'Shapes'"),
        ("shape", {}, ConfigError, "unknown data set 'shape'; did you mean 'shapes'"),
        ("outside_shapes:thing", {}, ConfigError, "is a int; give a class or a function"),
        ("outside_shapes:nothing", {}, DataError, "has no images and no labels and no class_names"),
        ("outside_shapes:Shapes", {"size": 3}, ConfigError, "cannot be made from a folder and {'size': 3}"),
        ("cifar10", {"size": 3}, ConfigError, "cifar10 takes no options, but size is given"),
    ],
)
def test_mistakes(name: str, options: dict[str, int], error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        open_dataset(name, tmp_path, options=options)


def test_images_of_another_kind_are_refused_when_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"image 0 is float64 \(8, 8, 3\); give uint8 \(h, w, 3\)"):
        open_dataset("outside_shapes:floats", tmp_path).image(0)


def test_commands_know_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "list"]) == 0
    assert "shapes: of an installed package" in capsys.readouterr().out
    assert main(["data", "get", "shapes", "--root", str(tmp_path)]) == 0
    assert (tmp_path / "shapes.txt").read_text() == "here"
    assert main(["data", "check", str(tmp_path), "--dataset", "shapes"]) == 0
    assert "dusk: 8 images in 2 classes" in capsys.readouterr().out
    assert main(["data", "check", str(tmp_path), "--dataset", "outside_shapes:floats"]) == 1
    assert main(["data", "get", "outside_shapes:Arrays", "--root", str(tmp_path)]) == 2
    assert "has no function `fetch(root)`" in capsys.readouterr().err
    assert main(["data", "get", "imagenet", "--root", str(tmp_path)]) == 2
    assert "get it from https://www.image-net.org" in capsys.readouterr().err


def test_check_compares_class_folders_with_a_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for k, name in enumerate(["ape", "bee"]):
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.fromarray(thumbnails(2)[k]).save(tmp_path / "photos" / name / "a.png")
    arguments = ["data", "check", str(tmp_path / "photos"), "--checkpoint", "vmamba_nano_cifar10"]
    assert main(arguments) == 1
    assert "the network has no ape, bee" in capsys.readouterr().out
