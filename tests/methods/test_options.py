"""Options are refused before anything runs, in one line, whoever gives them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.methods.networks import batches, make, vmamba
from trust_tta.errors import ConfigError, TrustError
from trust_tta.methods.ranking import rank_orders
from trust_tta.methods.registry import create_method, list_methods, method_options

WRONG: dict[type, tuple[Any, ...]] = {bool: ("False", "no", 0, 1.0), int: (2.5, "6", True), float: ("0.1", True, [1])}


@pytest.mark.parametrize("name", list_methods())
def test_a_value_of_another_kind_is_refused(name: str) -> None:
    """The word False, which is true, must not switch anything on."""
    for option, default in method_options(name).items():
        for value in WRONG.get(type(default), ()):
            with pytest.raises(ConfigError, match=f"^method '{name}': {option} is .*; give ") as error:
                make(name, vmamba(), **{option: value})
            assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "options", [{"orders": 5}, {"orders": "abcd"}, {"orders": {"abcd"}}, {"mode": ["parallel"]}, {"merge": 3}], ids=str
)
def test_odd_values_are_refused_in_one_line(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        create_method("trust", vmamba(), **options)
    assert "\n" not in str(error.value)


def test_what_is_no_network_is_refused() -> None:
    with pytest.raises(ConfigError, match="the model is a NoneType; give a torch.nn.Module"):
        create_method("tent", None)  # type: ignore[arg-type]


def test_whole_numbers_are_numbers() -> None:
    assert make("tent", vmamba(), lr=1).options.lr == 1


def test_orders_are_ranked_on_batches_that_mean_something() -> None:
    (images,) = batches(1)
    spoilt = images.clone()
    spoilt[0, 0, 0, 0] = float("nan")
    for batch in (images[:0], spoilt, (images, images), images.double()):
        with pytest.raises(TrustError) as error:
            rank_orders(vmamba(), [batch])  # type: ignore[list-item]
        assert "\n" not in str(error.value)
    model = vmamba()
    model.classifier.head.bias.data.fill_(float("nan"))
    with pytest.raises(ConfigError, match="predictions are not finite"):
        rank_orders(model, [images])
