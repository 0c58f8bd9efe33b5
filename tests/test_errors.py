"""The tree of errors, and optional packages."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from trust_tta import errors
from trust_tta.errors import DependencyError, TrustError, reason_of
from trust_tta.optional import available, require

CLASSES = {
    n: c
    for n, c in vars(errors).items()
    if isinstance(c, type) and issubclass(c, Exception) and not issubclass(c, Warning)
}


@pytest.mark.parametrize("name", sorted(set(CLASSES) - {"TrustError"}))
def test_every_error_is_caught_by_its_base_and_by_a_builtin(name: str) -> None:
    error = CLASSES[name]
    assert issubclass(error, TrustError)
    assert any(base.__module__ == "builtins" and base not in (Exception, object) for base in error.__bases__)


def test_a_missing_package_says_how_to_get_it() -> None:
    assert not available("no_such_package_at_all")
    with pytest.raises(DependencyError, match=r"'no_such_package_at_all' .* pip install 'trust-tta\[figures\]'"):
        require("no_such_package_at_all", extra="figures")


def test_a_package_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchvision, whose builds for GPUs raise a RuntimeError under a PyTorch for CPUs."""
    (tmp_path / "misfit.py").write_text("raise RuntimeError('operator misfit::nms does not exist')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(DependencyError, match="is installed and cannot be imported: RuntimeError .operator misfit"):
        require("misfit", extra="timm")


def test_a_present_package_is_imported() -> None:
    assert available("json")
    assert require("json", extra="figures").dumps([1]) == "[1]"


@pytest.mark.parametrize("name", sorted(CLASSES))
@pytest.mark.parametrize("quoted", ["a\nb", "\x1b[31mred", "\udcff", "\u2028", "x" * 10**6, "\x00" * 10**4])
def test_a_message_is_one_printable_line_whatever_it_quotes(name: str, quoted: str) -> None:
    message = str(CLASSES[name](f"the label is {quoted}; give another"))
    assert message.isprintable()
    assert len(message) <= errors.LONGEST_MESSAGE
    assert message.startswith("the label is ")
    message.encode()


def test_a_message_keeps_letters_of_all_languages_and_its_end() -> None:
    assert str(TrustError("straße, 猫, é")) == "straße, 猫, é"
    assert str(TrustError(f"{'x' * 10**5}; give another")).endswith("; give another")
    assert str(pickle.loads(pickle.dumps(TrustError("one")))) == "one"


def test_the_reason_of_another_librarys_error_is_one_short_line() -> None:
    assert reason_of(ValueError("two\n  lines")) == "two lines"
    assert reason_of(ValueError("x" * 300)) == "x" * 200
    assert reason_of(KeyboardInterrupt()) == "KeyboardInterrupt"
