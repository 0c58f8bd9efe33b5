from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.report.samples import make_cell
from trust_tta.report.groups import make_groups
from trust_tta.report.labels import row_labels, stated_methods
from trust_tta.report.palette import short_name


def labels_of(*variants: dict[str, object]) -> list[str]:
    keys = [make_cell("trust", "fog", options=json.dumps(options)).key for options in variants]
    return [row_labels(keys)(key) for key in keys]


@pytest.mark.parametrize(
    ("variants", "expected"),
    [
        ([{"k": 6, "lr": 1.0}], ["trust"]),
        ([{"k": 2, "lr": 1.0}, {"k": 6, "lr": 1.0}], ["trust (k=2)", "trust (k=6)"]),
        (
            [{"k": 6, "m": "mean"}, {"k": 2, "m": "mean"}, {"k": 6, "m": "slerp"}],
            ["trust", "trust (k=2)", "trust (m=slerp)"],
        ),
        ([{"k": 6, "a": 1}, {"k": 6, "a": 2}, {"a": 1}], ["trust (k=6)", "trust (a=2, k=6)", "trust"]),
    ],
    ids=["alone", "a pair", "around a common setting", "an option not all have"],
)
def test_what_most_lines_share_goes_without_saying(variants: list[dict[str, object]], expected: list[str]) -> None:
    assert labels_of(*variants) == expected


def test_the_line_that_was_run_as_it_comes_has_the_plain_name() -> None:
    """Most lines are parallel, but only the sequential one is TRUST without any option stated."""
    variants: list[dict[str, object]] = [
        {"mode": m, "parallel": p} for m, p in (("seq", "rep"), ("par", "rep"), ("par", "split"))
    ]
    keys = [make_cell("trust", "fog", options=json.dumps(options)).key for options in variants]
    stated = [("trust", {}), ("trust", variants[1]), ("trust", variants[2]), ("tent", variants[0])]
    labels = [row_labels(keys, stated)(key) for key in keys]
    assert labels == ["trust", "trust (mode=par)", "trust (mode=par, parallel=split)"]
    assert [row_labels(keys, stated[1:2])(key) for key in keys] == labels_of(*variants)  # two lines are left


@pytest.mark.parametrize("text", ["", "toml = 1", "[]", "{}", '{"methods": [{"name": "trust"}]}', '{"methods": 3}'])
def test_a_configuration_of_another_kind_states_nothing(text: str) -> None:
    assert stated_methods([text]) == []
    stated = '{"methods": [{"name": "trust", "options": {"k": 2}}]}'
    assert stated_methods([text, stated]) == [("trust", {"k": 2})]


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(0, 2)), min_size=1, max_size=8))
def test_different_options_never_share_a_label(variants: list[dict[str, object]]) -> None:
    labels = labels_of(*variants)
    assert len(set(labels)) == len({json.dumps(options, sort_keys=True) for options in variants})


def test_the_common_line_comes_first_with_the_method_s_own_marker() -> None:
    options = [{"k": 6, "m": "mean"}, {"k": 2, "m": "mean"}, {"k": 6, "m": "entropy"}]
    (group,) = make_groups([make_cell("trust", "fog", options=json.dumps(o)) for o in options])
    assert [(row.label, row.variant) for row in group.rows] == [
        ("trust", 0),
        ("trust (k=2)", 1),
        ("trust (m=entropy)", 2),
    ]


@pytest.mark.parametrize(
    ("label", "short"),
    [
        ("trust (k=2)", "TRUST (k=2)"),
        ("trust (evaluate_order=badc)", "TRUST (badc)"),
        ("trust (orders=['abcd', 'badc', 'dcba'])", "TRUST (3 orders)"),
        ("trust (stochastic_depth=True)", "TRUST (stochasti…"),
        ("trust (stochastic_depth=False)", "TRUST (stochasti…"),
    ],
    ids=["short", "long", "a list", "on", "off"],
)
def test_names_in_charts_are_short_and_say_something(label: str, short: str) -> None:
    assert short_name(label, 17) == short
