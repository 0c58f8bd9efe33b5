from __future__ import annotations

import math

import pytest

from trust_tta.report.paper import PERCENT, PublishedTable, load_published
from trust_tta.results.display import CORRUPTIONS, DATASETS, METHODS

PUBLISHED = load_published()
SEGMENTATION = {"voc21", "context59"}


def find(place: str, dataset: str | None = None) -> PublishedTable:
    return next(t for t in PUBLISHED.tables if t.place == place and dataset in (None, t.dataset))


def row(item: PublishedTable, label: str) -> tuple[float, ...]:
    return next(r.values for r in item.rows if r.label == label)


def printed_means() -> dict[tuple[str, str | None, str], float]:
    """How far each printed mean is from the mean of its printed columns."""
    found = [(item, row, row.mean) for item in PUBLISHED.tables for row in item.rows]
    return {
        (item.place, item.dataset, row.label): abs(mean - math.fsum(row.values) / len(row.values))
        for item, row, mean in found
        if mean is not None
    }


def test_every_printed_mean_is_that_of_its_columns_within_a_tenth() -> None:
    means = printed_means()
    assert len(means) == 3 * 8 + 5 + 4 + 3 + 6 + 4
    assert max(means.values()) <= 0.1


def test_printed_means_that_rounding_alone_does_not_explain() -> None:
    """Half a unit of the last digit is what rounding explains; these six of the paper's means are off by more."""
    off = {place for place, gap in printed_means().items() if gap > 0.05 + 1e-9}
    assert off == {
        ("Table 1", "cifar100-c", "SAR"),
        ("Table 1", "cifar100-c", "TRUST naive"),
        ("Table 1", "imagenet-c", "LAME"),
        ("Table 1", "imagenet-c", "Tent"),
        ("Table 4", "imagenet-c", "Tent, BN"),
        ("Table 8", "imagenet-c", "Tent"),
    }


def test_all_places_are_there_under_our_names() -> None:
    places = {item.place for item in PUBLISHED.tables}
    assert {f"Table {i}" for i in range(1, 11)} <= places
    assert {"Figure 4", "Figure 7"} <= places
    for item in PUBLISHED.tables:
        assert item.dataset in {None, *DATASETS, *SEGMENTATION}
        assert {r.method for r in item.rows} <= set(METHODS)
        if item.columns == "domain":
            assert set(item.names) == set(CORRUPTIONS)
        if item.columns == "dataset":
            assert set(item.names) <= set(DATASETS)


def test_the_paper_has_frost_before_snow() -> None:
    names = find("Table 1", "cifar10-c").names
    assert names.index("frost") == names.index("snow") - 1


@pytest.mark.parametrize("dataset", ["cifar10-c", "cifar100-c", "imagenet-c"])
def test_table_2_repeats_the_means_of_table_1(dataset: str) -> None:
    first, second = find("Table 1", dataset), find("Table 2")
    column = second.names.index(dataset)
    assert {r.label: r.mean for r in first.rows} == {r.label: r.values[column] for r in second.rows}


@pytest.mark.parametrize(
    ("place", "dataset", "labels"),
    [
        ("Table 4", "imagenet-c", {"Source only": "Source only", "Tent, BN": "Tent", "TRUST, SS2D": "TRUST"}),
        ("Table 5", "cifar10-c", {"Source only": "Source only", "TRUST": "TRUST"}),
        ("Table 6", "cifar10-c", {"Source only": "Source only", "TRUST (top-k low entropy)": "TRUST"}),
        ("Table 8", "imagenet-c", {"Source only": "Source only", "Tent": "Tent", "TRUST": "TRUST"}),
    ],
)
def test_tables_that_repeat_rows_of_table_1_agree_with_it(place: str, dataset: str, labels: dict[str, str]) -> None:
    main, other = find("Table 1", dataset), find(place, dataset)
    assert {label: row(other, label) for label in labels} == {label: row(main, name) for label, name in labels.items()}


def test_figures_agree_with_the_tables_on_shared_numbers() -> None:
    assert row(find("Table 9"), "TRUST (K=2)") == (75.6, 51.7, 54.4)
    for dataset in ("cifar10-c", "cifar100-c"):
        figure, table = find("Figure 4", dataset), find("Table 1", dataset)
        for first, second in ((figure.rows[0], table.rows[0]), (figure.rows[-1], table.rows[-1])):
            assert (first.method, first.values[0]) == (second.method, second.mean)


def test_percentages_are_percentages_and_nothing_is_empty() -> None:
    for item in PUBLISHED.tables:
        assert item.rows
        assert len({r.label for r in item.rows}) == len(item.rows)
        for r in item.rows:
            assert all(math.isfinite(v) for v in r.values)
            assert len(r.values) == len(item.names) == len(set(item.names))
            if item.measure in PERCENT:
                assert all(1 < v < 100 for v in r.values)
