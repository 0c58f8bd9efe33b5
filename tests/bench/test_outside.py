"""A method, a network and a data set that a user wrote, in one benchmark, without a change to the package."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from trust_tta.cli.main import main
from trust_tta.results import ResultStore

MODULE = '''
import numpy as np
import torch
from torch import nn

import trust_tta as tt
from trust_tta.preprocessing import Preprocessing


class SmallCnn(nn.Module):
    """Two convolutions with batch normalization; it says itself how images become its input."""

    preprocessing = Preprocessing(size=16, resize=None, crop=False)
    classes = ("dark", "light")

    def __init__(self, width=4):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3), nn.BatchNorm2d(width)
        )
        self.head = nn.Linear(width, 2)

    def forward(self, images):
        return self.head(self.body(images).mean((2, 3)))


def make_cnn(width=4):
    torch.manual_seed(0)
    return SmallCnn(width)


class Brightness:
    """Gray squares of two kinds, in two domains; the classes are listed in another order than the network's."""

    class_names = ("light", "dark")

    def __init__(self, root, count=40):
        draw = np.random.default_rng(0)
        self.labels = np.arange(count) % 2
        level = np.where(self.labels == 0, 200, 50)[:, None, None, None]
        self.images = np.clip(level + draw.normal(0, 20, (count, 12, 12, 3)), 0, 255).astype(np.uint8)
        self.domains = ["day" if i < count // 2 else "night" for i in range(count)]


class Constant(tt.Method):
    """Predicts what the network says, and a little more of the first class."""

    class Options(tt.Method.Options):
        bonus: float = 0.0

    def adapt(self, images):
        return self.predict(images) + torch.tensor([self.options.bonus, 0.0])
'''
TOML = """
store = "{folder}/results.sqlite"
methods = ["source", "tent", {{ name = "my_things:Constant", bonus = 1e6, label = "always dark" }}]
model = {{ name = "my_things:make_cnn", overrides = {{ width = 6 }}{checkpoint} }}
data = {{ dataset = "my_things:Brightness", root = "{folder}", options = {{ count = 48 }} }}
stream = {{ batch_size = 12 }}
device = "cpu"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "my_things.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("my_things", None)


def bench(folder: Path, *, checkpoint: str = "") -> dict[tuple[str, str], float]:
    """Accuracies by label and domain."""
    path = folder / "mine.toml"
    path.write_text(TOML.format(folder=folder, checkpoint=checkpoint), encoding="utf-8")
    assert main(["bench", str(path)]) == 0
    with ResultStore(folder / "results.sqlite", create=False) as store:
        return {(cell.label, cell.key.domain): cell.result.accuracy for cell in store.results()}


def test_method_network_and_data_set_of_a_user_run_like_the_packages_own(folder: Path) -> None:
    found = bench(folder)
    assert {label for label, _ in found} == {"source", "tent", "always dark"}
    assert {domain for _, domain in found} == {"day", "night"}
    assert found["always dark", "day"] == found["always dark", "night"] == 0.5  # half of the images are dark


def test_labels_follow_the_class_order_of_the_network(folder: Path) -> None:
    """Against a loop that a reader would write, with the classes matched by name."""
    found = bench(folder)
    import my_things  # type: ignore[import-not-found]

    network, data = my_things.make_cnn(6).eval(), my_things.Brightness(folder, count=48)
    chosen = np.array(data.domains) == "day"
    with torch.no_grad():
        predicted = network(network.preprocessing(data.images[chosen])).argmax(1).numpy()
    names = np.array(data.class_names)[data.labels[chosen]]
    assert found["source", "day"] == (np.array(network.classes)[predicted] == names).mean()


def test_weights_from_a_file(folder: Path) -> None:
    before = bench(folder)
    import my_things

    network = my_things.make_cnn(6)
    with torch.no_grad():
        network.head.bias.copy_(torch.tensor([-1e6, 1e6]))
    torch.save(network.state_dict(), folder / "mine.pth")
    (folder / "results.sqlite").unlink()
    after = bench(folder, checkpoint=f', checkpoint = "{folder}/mine.pth"')
    assert after["source", "day"] == 0.5
    assert after != before or before["source", "day"] == 0.5


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ("my_things:make_cnn", "my_things:make_cn", "did you mean 'make_cnn'?"),
        ("my_things:Brightness", "my_thing:Brightness", "cannot be imported"),
        ("my_things:Constant", "my_things:SmallCnn", "is not a subclass of trust_tta.Method"),
        ("bonus = 1e6", "bonuss = 1e6", "bonuss: there is no such option; did you mean 'bonus'?"),
    ],
)
def test_a_mistake_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, part: str) -> None:
    path = folder / "mine.toml"
    path.write_text(TOML.format(folder=folder, checkpoint="").replace(old, new), encoding="utf-8")
    assert main(["bench", str(path)]) == 2
    error = capsys.readouterr().err
    assert part in error
    assert len(error.splitlines()) == 1
