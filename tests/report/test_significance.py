"""Significance of differences by seeds and by images."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tests.report.samples import fill_store, make_cell, make_groups
from trust_tta.report.model import read_report
from trust_tta.report.significance import Difference, difference, mcnemar
from trust_tta.report.summary import summarize
from trust_tta.report.tables import accuracy_table, difference_table
from trust_tta.results import Cell

N = 2000


def cell_with_bits(method: str, right: set[int], *, seed: int = 0, domain: str = "fog", ms: float = 4.0) -> Cell:
    """A cell of 2,000 images of which those in `right` are right."""
    bits = sum(1 << (N - 1 - i) for i in right).to_bytes(N // 8, "big")
    made = make_cell(method, domain, seed=seed, accuracy=len(right) / N, fingerprint=f"{domain}{seed}", work=(1, 3, ms))
    return replace(made, result=replace(made.result, correct=bits))


def compare(*cells: Cell) -> Difference:
    (group,) = make_groups(cells)
    return difference(group, group.variants[1], group.variants[0])  # trust comes after bn


@given(st.integers(0, 40), st.integers(0, 40))
def test_mcnemar_is_the_exact_binomial_test(first: int, second: int) -> None:
    expected = stats.binomtest(first, first + second, 0.5).pvalue if first + second else 1.0
    assert mcnemar(first, second) == pytest.approx(expected)


def test_images_that_only_one_has_right_are_counted_in_pairs() -> None:
    bn, trust = set(range(1000)), set(range(20, 1050))
    found = compare(cell_with_bits("bn", bn), cell_with_bits("trust", trust))
    assert found.images is not None
    assert (found.images.first_only, found.images.second_only) == (50, 20)
    assert found.images.p == pytest.approx(stats.binomtest(50, 70).pvalue)
    assert found.significant


def test_repeated_seeds_do_not_lower_the_p_value() -> None:
    bn, trust = set(range(1000)), set(range(5, 1010))
    one = compare(cell_with_bits("bn", bn), cell_with_bits("trust", trust))
    seeds = [
        cell
        for seed in range(9)
        for cell in (cell_with_bits("bn", bn, seed=seed), cell_with_bits("trust", trust, seed=seed))
    ]
    many = compare(*seeds)
    assert one.images == many.images
    assert many.seeds.half_width == pytest.approx(0.0)
    assert many.tie  # ten images to five: the seeds agree, but on these images alone


def test_image_test_resolves_what_three_seeds_do_not() -> None:
    generator = random.Random(0)
    cells = []
    for seed, luck in enumerate((0, 60, -60)):  # the networks differ from seed to seed more than the methods
        bn = set(generator.sample(range(N), 1400 + luck))
        rest = sorted(set(range(N)) - bn)
        cells += [
            cell_with_bits("bn", bn, seed=seed),
            cell_with_bits("trust", bn | set(rest[: 10 + 12 * seed]), seed=seed),
        ]
    found = compare(*cells)
    assert found.seeds.half_width is not None
    assert found.gain < found.seeds.half_width
    assert found.significant
    bare = [replace(cell, result=replace(cell.result, correct=b"")) for cell in cells]
    assert compare(*bare).tie


def test_a_lead_of_a_few_images_is_a_tie_even_if_seeds_agree() -> None:
    cells = [make_cell(m, "fog", seed=s, accuracy=a) for m, a in (("bn", 0.70), ("trust", 0.7025)) for s in range(3)]
    found = compare(*cells)
    assert found.seeds.half_width == pytest.approx(0.0)
    assert found.gain * cells[0].result.samples == pytest.approx(5)
    assert found.tie
    assert not compare(*cells[:3], *(replace(c, result=replace(c.result, accuracy=0.71)) for c in cells[3:])).tie


def test_rows_are_compared_over_their_shared_seeds() -> None:
    """As in the demo, where TRUST has one seed of three: an easy or a hard seed is nobody's merit."""
    all_seeds = [make_cell("tide", "fog", seed=s, accuracy=a) for s, a in enumerate((0.70, 0.80, 0.90))]
    found = compare(make_cell("trust", "fog", seed=0, accuracy=0.68), *all_seeds)
    assert abs(found.gain) == pytest.approx(0.02)
    (group,) = make_groups([make_cell("trust", "fog", seed=0, accuracy=0.68), *all_seeds])
    assert "TRUST does not win here: trust is 2.0 points behind tide." in summarize(group)
    assert "1 to 3 seeds" in accuracy_table(group).caption


def test_significance_is_unknown_with_one_seed_and_no_images() -> None:
    found = compare(make_cell("bn", "fog", accuracy=0.7), make_cell("trust", "fog", accuracy=0.8))
    assert (found.significant, found.tie) == (None, False)


def test_other_images_or_a_missing_domain_are_not_paired() -> None:
    bn, other = cell_with_bits("bn", {1}), cell_with_bits("trust", {2})
    assert compare(bn, replace(other, key=replace(other.key, fingerprint="other"))).images is None
    bare = replace(cell_with_bits("trust", {2}, domain="snow"), result=make_cell("trust", "snow").result)
    assert compare(bn, other, cell_with_bits("bn", {1}, domain="snow"), bare).images is None


def test_a_tie_is_the_headline(tmp_path: Path) -> None:
    bn, trust = set(range(1000)), set(range(5, 1010))
    store = fill_store(tmp_path / "s.db", [cell_with_bits("bn", bn, ms=1.0), cell_with_bits("trust", trust, ms=17.0)])
    report = read_report(store)
    lead, *_ = summarize(report.groups[0])
    assert "a tie: trust and bn reach 50.0 to 50.2 % accuracy" in lead
    assert lead.endswith("(no significant difference: 1 seed and a paired test over images).")
    table = difference_table(report.groups[0])
    assert table is not None
    (line,) = table.rows
    assert [entry.text for entry in line.cells] == ["+0.2", "–", "1", "10", "5", "0.3", "no"]


def test_summary_counts_the_images_that_one_method_alone_gets_right() -> None:
    cells = [cell_with_bits("bn", set(range(1000))), cell_with_bits("tide", set(range(28, 1070)))]
    text = " ".join(summarize(make_groups(cells)[0]))
    assert "(the second; tide alone is right on 70 images, bn alone on 28, p = " in text
