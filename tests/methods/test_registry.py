"""Methods by name: ours, those of installed packages, and those of a module."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import trust_tta as tt
from tests.methods.networks import batches, convnet, vmamba
from trust_tta import methods
from trust_tta.errors import ConfigError
from trust_tta.methods import Learner, LearningOptions, MethodOptions, Tent
from trust_tta.methods.registry import METHODS, check_options, create_method, find_method, list_methods, method_options

PACKAGE = '''
from trust_tta.methods import Learner, LearningOptions
from trust_tta.methods.losses import entropy

class MineOptions(LearningOptions):
    power: float = 1.0

class Mine(Learner):
    """Entropy to a power."""
    Options = MineOptions

    def loss(self, logits):
        return (entropy(logits) ** self.options.power).mean()

def no_method(model):
    return model
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package from outside with a method and an entry point for it."""
    (tmp_path / "outside_methods.py").write_text(PACKAGE)
    info = tmp_path / "outside_methods-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-methods\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[trust_tta.methods]\nmine = outside_methods:Mine\n")
    monkeypatch.syspath_prepend(tmp_path)
    return "outside_methods:Mine"


def test_a_method_from_outside_is_one_of_ours(package: str) -> None:
    for name in (package, "mine"):
        method = create_method(name, convnet(), lr=1e-2, power=1.0)
        tent = create_method("tent", convnet(), lr=1e-2)
        for images in batches(2):
            assert torch.equal(method(images), tent(images))
        assert method.name == "mine"
        with pytest.raises(ConfigError, match="method 'mine': pwr: there is no such option; did you mean 'power'"):
            check_options(name, {"pwr": 1})
    assert method_options(package) == {**LearningOptions.defaults(), "power": 1.0}
    assert list_methods()[-1] == "mine"


def test_what_is_no_method_is_refused(package: str) -> None:
    for name in ("outside_methods:no_method", "collections:OrderedDict"):
        with pytest.raises(ConfigError, match="not a subclass of trust_tta.Method"):
            find_method(name)
    with pytest.raises(ConfigError, match="did you mean 'Mine'"):
        find_method("outside_methods:Minee")


def test_a_class_will_do() -> None:
    method = tt.create_method(Tent, convnet(), lr=0.5)
    assert method.options.lr == 0.5
    assert isinstance(Tent(convnet()).options, Tent.Options)
    with pytest.raises(ConfigError, match="the options of 'tent' are .*; give a TentOptions"):
        Tent(convnet(), MethodOptions())


def test_all_mistakes_in_one_line() -> None:
    with pytest.raises(ConfigError) as error:
        create_method("tent", vmamba(), lr=-1, step=2, episodic="yes", statistics="batches")
    expected = (
        "method 'tent': ", "lr is -1; give a value >= 0", "step: there is no such option; did you mean 'steps'?",
        "episodic is 'yes'; give true or false", "statistics is 'batches'; did you mean 'batch'?",
    )  # fmt: skip
    assert all(part in str(error.value) for part in expected)
    assert "\n" not in str(error.value)


def test_options_that_do_not_go_together() -> None:
    for options, message in (
        ({"nesterov": True}, "nesterov=True goes with optimizer='sgd'"),
        ({"nesterov": True, "optimizer": "sgd", "momentum": 0.0}, "momentum above 0"),
        ({"momentum": 1.0}, "give one below 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            create_method("tent", vmamba(), **options)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_declared_once_and_exported(name: str) -> None:
    found = find_method(name)
    assert getattr(methods, found.__name__) is found
    assert found.name == name
    assert found.__doc__
    assert found.Options.defaults() == method_options(name)
    assert found.Options() == found.Options(**method_options(name))
    if issubclass(found, Learner):
        assert issubclass(found.Options, LearningOptions)


def test_the_exports_are_what_is_promised() -> None:
    assert dir(methods) == sorted(methods.__all__)
    for name in methods.__all__:
        assert getattr(methods, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Tend'"):
        methods.Tend  # type: ignore[attr-defined]  # noqa: B018
