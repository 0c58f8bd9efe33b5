from __future__ import annotations

import json

import pytest

from tests.report.samples import make_cell, make_groups
from trust_tta.report.model import ResultGroup
from trust_tta.report.paper import compare
from trust_tta.report.tables import paper_table
from trust_tta.results import Cell
from trust_tta.results.display import CORRUPTIONS


def group_of(*cells: Cell) -> ResultGroup:
    (group,) = make_groups(cells)
    return group


def test_pairs_differences_and_the_printed_mean() -> None:
    cells = [make_cell("trust", d, accuracy=0.8, options='{"k": 6, "steps": 1}') for d in CORRUPTIONS]
    (found,) = compare(group_of(*cells))
    assert found.table.place == "Table 1"
    (row,) = found.rows
    fog = next(pair for pair in row.pairs if pair.name == "fog")
    assert fog.published == pytest.approx(0.858)
    assert fog.ours == 0.8
    assert fog.difference == pytest.approx(-0.058)
    assert row.mean.published == pytest.approx(0.775)  # as printed
    assert row.mean.difference == pytest.approx(0.025)
    assert found.left_out == ()


def test_means_are_over_the_shared_domains_only() -> None:
    (found,) = compare(group_of(make_cell("bn", "fog"), make_cell("tent", "fog"), make_cell("tent", "snow")))
    tent = next(row for row in found.rows if row.variant.method == "tent")
    assert tent.mean.published == pytest.approx((0.779 + 0.763) / 2)
    assert len(found.left_out) == 13


def test_the_papers_source_only_is_our_bn_and_never_our_source() -> None:
    (found,) = compare(group_of(*(make_cell(m, "fog") for m in ("source", "bn", "tent"))))
    assert {row.label: row.variant.method for row in found.rows} == {"Source only": "bn", "Tent": "tent"}


@pytest.mark.parametrize(
    "options",
    [
        {"k": 2},
        {"k": 6, "steps": 2},
        {"k": 6, "merge": "slerp"},
        {"orders": ["acbd", "cabd"]},
        {"evaluate_order": "badc"},
    ],
    ids=["k", "steps", "merge", "orders", "evaluation"],
)
def test_another_variant_is_not_compared_with_the_papers_trust(options: dict[str, object]) -> None:
    cells = [make_cell("trust", d, options=json.dumps(options)) for d in CORRUPTIONS]
    assert all(row.label != "TRUST" for found in compare(group_of(*cells)) for row in found.rows)


def test_two_orders_stand_beside_table_9() -> None:
    cells = [make_cell("trust", d, accuracy=0.7, options='{"k": 2}') for d in CORRUPTIONS]
    (found,) = compare(group_of(*cells))
    assert (found.table.place, found.rows[0].label) == ("Table 9", "TRUST (K=2)")
    assert found.rows[0].mean.published == pytest.approx(0.756)


def test_variants_that_a_row_names_must_be_named_here_too() -> None:
    plain = group_of(make_cell("augmentation", "fog"), make_cell("bn", "fog"))
    assert compare(plain) == []
    jitter = group_of(make_cell("augmentation", "fog", options='{"kind": "jitter", "per": "batch"}'))
    (found,) = compare(jitter)
    assert [row.label for row in found.rows] == ["TRUST + Jitter per batch"]


def test_a_table_that_adds_nothing_is_not_repeated() -> None:
    cells = [make_cell(m, d) for m in ("bn", "tent", "trust") for d in CORRUPTIONS]
    assert [found.table.place for found in compare(group_of(*cells))] == ["Table 1"]


def test_settings_and_severities_are_not_confused() -> None:
    standard = compare(group_of(*(make_cell("tent", d, setting="standard") for d in CORRUPTIONS)))
    assert [found.table.place for found in standard] == ["Table 3"]
    assert compare(group_of(make_cell("tent", "fog", severity=3))) == []
    assert compare(group_of(make_cell("tent", "fog", setting="continual"))) == []
    assert compare(group_of(make_cell("tent", "fog", dataset="mine"))) == []


def test_the_shipped_images_are_compared_with_cifar10c() -> None:
    (found,) = compare(group_of(make_cell("tent", "fog", dataset="sample")))
    assert found.table.dataset == "cifar10-c"


def test_pacs_is_its_photo_domain() -> None:
    cells = [
        make_cell("tent", d, dataset="pacs", severity=None, accuracy=a) for d, a in (("photo", 0.6), ("sketch", 0.1))
    ]
    (found,) = compare(group_of(*cells))
    assert found.rows[0].mean.ours == 0.6
    assert found.rows[0].mean.published == pytest.approx(0.674)


def test_a_few_corruptions_are_not_compared_with_the_mean_of_all() -> None:
    cells = [make_cell("trust", d, options='{"k": 2}') for d in CORRUPTIONS[:14]]
    assert compare(group_of(*cells)) == []


def test_a_row_that_lacks_domains_has_no_mean_and_no_gain() -> None:
    cells = [
        make_cell(m, d) for m, d in (("bn", "fog"), ("bn", "snow"), ("tent", "fog"), ("sar", "fog"), ("sar", "snow"))
    ]
    group = group_of(*cells)
    drawn = paper_table(group, compare(group)[0])
    rows = [[entry.text for entry in line.cells] for line in drawn.rows]
    assert [(row[0], row.count("–")) for row in rows] == [("Source only", 0), ("SAR", 0), ("Tent", 5)]


LOW = '{"k": 6, "orders": null}'
HIGH = '{"k": 6, "orders": ["cadb", "bdac", "cdba", "bcad", "cbda", "cdab"]}'


def entropy_cells(experiment: str, *options: str) -> list[Cell]:
    accuracies = dict(zip(options, (0.8, 0.5, 0.4), strict=False))
    return [
        *(make_cell("bn", d, accuracy=0.6, experiment=experiment) for d in CORRUPTIONS),
        *(
            make_cell("trust", d, accuracy=a, options=o, experiment=experiment)
            for o, a in accuracies.items()
            for d in CORRUPTIONS
        ),
    ]


@pytest.mark.parametrize("experiment", ["high_entropy_orders", "high_entropy_orders-small"])
def test_the_orders_of_highest_entropy_are_compared_with_table_6(experiment: str) -> None:
    found = {c.table.place: c for c in compare(group_of(*entropy_cells(experiment, LOW, HIGH)))}
    ours = {row.label: (row.mean.ours, row.mean.published) for row in found["Table 6"].rows}
    assert ours == {
        "Source only": pytest.approx((0.6, 0.659)),
        "TRUST (top-k high entropy)": pytest.approx((0.5, 0.534)),
        "TRUST (top-k low entropy)": pytest.approx((0.8, 0.775)),
    }
    assert [row.mean.ours for row in found["Table 1"].rows if row.label == "TRUST"] == [pytest.approx(0.8)]


@pytest.mark.parametrize(
    ("experiment", "options"),
    [
        ("mine", (LOW, HIGH)),
        ("high_entropy_orders", (LOW, '{"k": 6, "orders": ["cadb", "bdac"]}')),
        ("high_entropy_orders", (LOW, HIGH, '{"k": 6, "orders": ["dcab", "cdab", "dcba", "cdba", "bcad", "bdac"]}')),
    ],
    ids=["another experiment", "two orders", "which of two"],
)
def test_other_orders_are_not_compared_with_table_6(experiment: str, options: tuple[str, ...]) -> None:
    found = compare(group_of(*entropy_cells(experiment, *options)))
    assert all("high" not in row.label for comparison in found for row in comparison.rows)


def test_a_figure_of_single_values_is_compared_with_the_mean_of_all_corruptions() -> None:
    options = ['{"kind": "rotation"}', '{"kind": "jitter"}']
    cells = [make_cell("augmentation", domain, options=o) for o in options for domain in CORRUPTIONS]
    found = compare(group_of(*cells))
    (figure,) = [comparison for comparison in found if comparison.table.place == "Figure 4"]
    published = {row.label: row.mean.published for row in figure.rows}
    assert published == pytest.approx({"Rotation": 0.668, "Jitter": 0.683})
    assert not [c for c in compare(group_of(*cells[:3])) if c.table.place == "Figure 4"]
