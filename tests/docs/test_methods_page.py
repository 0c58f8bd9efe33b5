"""The pages state the options, defaults and costs that the code has."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import DOCS, sections, table_rows
from tests.methods.networks import LEARNERS, OPEN, batches, make, run, vmamba
from trust_tta.methods.base import Learner, LearningOptions, MethodOptions
from trust_tta.methods.registry import find_method, list_methods, method_options

PAGES = (DOCS / "reference" / "methods.md", DOCS / "reference" / "trust.md")
SECTIONS = {name: text for page in PAGES for name, text in sections(page).items()}
EVERYONE, LEARNING = MethodOptions.defaults(), LearningOptions.defaults()
S, K, P = 2, 3, 4


@pytest.mark.parametrize("name", list_methods())
def test_every_method_has_its_section(name: str) -> None:
    text = SECTIONS[name]
    assert "**Fails**" in text
    assert name in ("source", "trust_naive") or "**Cite**" in text
    assert name in ("source", "repetition") or "$$" in text


def test_every_section_belongs_to_a_method() -> None:
    lower = {name for name in SECTIONS if re.fullmatch(r"[a-z0-9_]+", name)}
    assert lower == set(list_methods())


@pytest.mark.parametrize("name", list_methods())
def test_options_and_defaults_are_those_of_the_code(name: str) -> None:
    """A table holds what a method has beyond the options of all methods, or of those that learn, and other defaults."""
    shared = LEARNING if issubclass(find_method(name), Learner) else EVERYONE
    options = {
        option: default for option, default in method_options(name).items() if default != shared.get(option, ...)
    }
    if not options:
        assert "No options of its own" in SECTIONS[name]
        return
    assert defaults_in(SECTIONS[name]) == options


def test_shared_options_and_defaults_are_those_of_the_code() -> None:
    assert defaults_in(SECTIONS["Options of every method"]) == EVERYONE
    assert EVERYONE | defaults_in(SECTIONS["Options of methods that learn"]) == LEARNING


def defaults_in(text: str) -> dict[str, Any]:
    return {option.strip("`"): ast.literal_eval(default.strip("`")) for option, default, _ in table_rows(text)}


COSTS = {row[0].strip("`"): row[1:4] for row in table_rows(sections(PAGES[0])["What a batch costs"])}


def test_every_method_has_its_cost() -> None:
    assert list(COSTS) == list_methods()


@pytest.mark.parametrize("name", list_methods())
def test_costs_of_a_batch_are_as_documented(name: str) -> None:
    options: dict[str, Any] = dict(OPEN.get(name, {}))
    if name in LEARNERS:
        options["steps"] = S
    if name in ("trust", "ensemble", "repetition", "augmentation"):
        options["k"] = K
    if name == "cotta":
        options["augmentations"] = K
    if name == "dpcore":
        options |= {"steps": S, "new_steps": S}
    if name == "foa":
        options["population"] = P
    method = make(name, vmamba(), **options)
    run(method, batches(2))
    counters = method.counters
    expected = [2 * evaluate(text) for text in COSTS[name]]
    assert [counters.forwards, counters.backwards, counters.updates] == expected


def evaluate(text: str) -> int:
    """A sum of products of S, K, P and numbers."""
    assert re.fullmatch(r"[SKP0-9 +*()]+", text)
    return int(eval(text, {"S": S, "K": K, "P": P}))


def test_costs_of_the_parallel_mode_are_as_documented() -> None:
    """One forward and one backward pass for all orders together when split, and the prediction."""
    method = make("trust", vmamba(), k=K, mode="split")
    run(method, batches(1))
    assert (method.counters.forwards, method.counters.backwards, method.counters.updates) == (2, 1, K)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_citations_are_links_to_abstracts(page: Path) -> None:
    links = re.findall(r"\(https://arxiv\.org/([^)]*)\)", page.read_text(encoding="utf-8"))
    assert all(re.fullmatch(r"abs/\d{4}\.\d{5}", link) for link in links)
