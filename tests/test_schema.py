"""Values that a declaration accepts, and messages about those that it does not."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from trust_tta.errors import ConfigError
from trust_tta.schema import Count, Name, Rate, Schema, did_you_mean, parse


class Inner(Schema):
    size: Count = 4
    kind: Literal["mean", "median"] = "mean"


class Outer(Schema):
    name: Name
    lr: Rate = 1e-4
    inner: Inner = Inner()
    parts: tuple[Inner, ...] = ()
    flag: bool = False


def test_values_and_defaults() -> None:
    outer = parse(Outer, {"name": "a", "lr": 1, "inner": {"size": 2}})
    assert (outer.lr, outer.inner.size, outer.inner.kind) == (1.0, 2, "mean")
    assert Outer.defaults() == {"lr": 1e-4, "inner": Inner(), "parts": (), "flag": False}


def test_every_mistake_is_told_at_once_with_its_key() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(Outer, {"lr": -1, "inner": {"sise": 2, "kind": "medain"}, "flag": "yes"}, where="my.toml")
    message = str(caught.value)
    assert message.startswith("my.toml: ")
    assert "\n" not in message
    for part in (
        "name is missing",
        "lr is -1; give a value >= 0",
        "inner.sise: there is no such option; did you mean 'size'?",
        "inner.kind is 'medain'; did you mean 'median'?",
        "flag is 'yes'; give true or false",
    ):
        assert part in message


@pytest.mark.parametrize(
    "lr", [float("nan"), float("inf"), "0.1", True, None, 10**5000, [[[1]]]], ids=lambda value: type(value).__name__
)
def test_values_of_another_kind_are_one_short_line(lr: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(Outer, {"name": "a", "lr": lr})
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


class Choices(Schema):
    sizes: tuple[Count, ...] = ()
    size: Count | Literal["auto"] | None = None
    named: dict[str, Inner] = {}


def test_lists_serve_as_tuples_and_unions_are_one_mistake() -> None:
    assert parse(Choices, {"sizes": [1, 2], "size": "auto"}) == Choices(sizes=(1, 2), size="auto")
    with pytest.raises(ConfigError) as caught:
        parse(Choices, {"sizes": [1, "b"], "size": 1.5, "named": {"x": {"size": 0}}})
    assert str(caught.value) == (
        "sizes.1 is 'b'; give an integer; size is 1.5; give an integer or choose one of auto; "
        "named.x.size is 0; give a value >= 1"
    )


def test_keywords_are_checked_as_files_are() -> None:
    with pytest.raises(ConfigError, match="there is no such option; did you mean 'name'"):
        Outer(name="a", nme="b")  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="lr is -1"):
        Outer(name="a").changed(lr=-1)
    assert Outer(name="a").changed(lr=0.5).lr == 0.5


def test_did_you_mean() -> None:
    assert did_you_mean("trsut", ["trust", "tent"]) == "did you mean 'trust'?"
    assert did_you_mean("x", ["trust", "tent"]) == "choose one of trust, tent"


def test_what_is_nested_too_deep_is_refused() -> None:
    deep: Any = 1
    for _ in range(3000):
        deep = [deep]
    for values in ({"sizes": deep}, {"named": {"x": {"size": deep}}}):
        with pytest.raises(ConfigError, match="nested deeper than 64 levels"):
            parse(Choices, values)
