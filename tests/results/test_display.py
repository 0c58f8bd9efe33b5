"""Labels: the one function that makes them, and those of cells that were stored without one."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.results.samples import FACTS, KEY, RESULT
from trust_tta.results import Cell, discordant, make_label
from trust_tta.results.display import old_labels


def labels_of(*variants: dict[str, object], config: str = "") -> list[str]:
    keys = [replace(KEY, options=json.dumps(options)) for options in variants]
    found = old_labels((key, config) for key in keys)
    return [found[key.digest] for key in keys]


def test_a_label_shows_what_sets_a_method_apart() -> None:
    assert make_label("trust", {}) == "trust"
    assert make_label("trust", {"merge": "slerp", "k": 2}) == "trust (k=2, merge=slerp)"
    assert make_label("my\x1b[31m", {"a": "\n"}) == "my?[31m (a=?)"


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
    ids=["alone", "a pair", "around a common value", "an option not all have"],
)
def test_old_cells_show_the_options_that_are_not_usual(variants: list[dict[str, object]], expected: list[str]) -> None:
    assert labels_of(*variants) == expected


def test_the_recorded_configuration_tells_defaults_and_labels() -> None:
    """Most variants are parallel, but only the sequential one was run without any option stated."""
    variants: list[dict[str, object]] = [{"mode": m, "n": n} for m, n in (("seq", 1), ("par", 1), ("par", 2))]
    methods: list[dict[str, Any]] = [{"name": "trust", "options": o} for o in ({}, variants[1], variants[2])]
    assert labels_of(*variants, config=json.dumps({"methods": methods})) == [
        "trust",
        "trust (mode=par)",
        "trust (mode=par, n=2)",
    ]
    methods[2]["label"] = "both"
    assert labels_of(*variants, config=json.dumps({"methods": methods}))[2] == "both"


@pytest.mark.parametrize("text", ["", "toml = 1", "[]", "{}", '{"methods": [{"name": "trust"}]}', '{"methods": 3}'])
def test_a_configuration_of_another_kind_states_nothing(text: str) -> None:
    assert labels_of({"k": 2}, {"k": 6}, config=text) == ["trust (k=2)", "trust (k=6)"]


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(0, 2)), min_size=1, max_size=8))
def test_different_options_never_share_a_label(variants: list[dict[str, object]]) -> None:
    labels = labels_of(*variants)
    assert len(set(labels)) == len({json.dumps(options, sort_keys=True) for options in variants})


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40))
def test_discordant_images_are_counted(pairs: list[tuple[bool, bool]]) -> None:
    def cell(right: list[bool], method: str = "trust", fingerprint: str = "abc") -> Cell:
        bits = "".join("1" if r else "0" for r in right).ljust(-(-len(right) // 8) * 8, "0")
        correct = bytes(int(bits[i : i + 8], 2) for i in range(0, len(bits), 8))
        key = replace(KEY, method=method, fingerprint=fingerprint)
        return Cell(key, replace(RESULT, samples=len(right), correct=correct), FACTS)

    one, other = cell([a for a, _ in pairs]), cell([b for _, b in pairs], method="tent")
    assert discordant(one, other) == (sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs))
    assert discordant(one, cell([b for _, b in pairs], fingerprint="other")) is None
    assert discordant(one, Cell(KEY, RESULT, FACTS)) is None
