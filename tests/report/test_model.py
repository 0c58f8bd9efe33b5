from __future__ import annotations

from pathlib import Path

import pytest

from tests.report.samples import fill_store, make_cell, make_groups, plausible_cells
from trust_tta.errors import DataError
from trust_tta.report import model
from trust_tta.report.model import read_report
from trust_tta.results import Cell, Failure, ResultStore


def test_cells_that_differ_in_method_domain_and_seed_share_a_group() -> None:
    (group,) = make_groups(plausible_cells(methods=["trust", "source"], domains=["fog", "snow"], seeds=2))
    assert [variant.label for variant in group.variants] == ["source", "trust"]
    assert group.domains == ("snow", "fog")  # the field's order
    assert {len(cells) for cells in group.at.values()} == {2}
    assert group.title == "cifar10-c, online, severity 5, batch 100"


@pytest.mark.parametrize(
    "other",
    [
        make_cell("trust", "fog", batch_size=10),
        make_cell("trust", "fog", setting="continual"),
        make_cell("trust", "fog", dataset="pacs"),
        make_cell("trust", "fog", experiment="second"),
        make_cell("trust", "fog", severity=3),
        make_cell("trust", "fog", checkpoint="other"),
        make_cell("trust", "fog", fingerprint="other"),
    ],
    ids=["batch size", "setting", "data set", "experiment", "severity", "checkpoint", "fingerprint"],
)
def test_different_conditions_make_separate_groups(other: Cell) -> None:
    groups = make_groups([make_cell("trust", "fog"), other])
    assert [len(group.cells) for group in groups] == [1, 1]
    assert len({f"{group.experiment} {group.title}" for group in groups}) == 2


def test_a_method_with_a_new_option_has_two_rows_in_one_group() -> None:
    """A store that an older version began: all lines but that one go on as they were."""
    domains = ("fog", "snow")
    old = [make_cell("tide", d, options='{"lr":1.0}', label="tide") for d in domains]
    new = [make_cell("tide", d, options='{"lr":1.0,"shares":true}', label="tide") for d in domains]
    (group,) = model.make_groups([*old, *new, *(make_cell("bn", d, label="bn") for d in domains)])
    assert {variant.label for variant in group.variants} == {"bn", "tide (no shares)", "tide (shares=True)"}
    assert set(group.means()) == {variant.label for variant in group.variants}


def test_a_checkpoint_for_each_domain_is_no_conflict() -> None:
    cells = [make_cell("trust", d, checkpoint=d, dataset="pacs") for d in ("photo", "sketch")]
    (group,) = make_groups(cells)
    assert group.distinction == ""


@pytest.mark.parametrize("setting", ["gradual", "sequence", "sequence+correlated"])
def test_severities_of_one_stream_stay_together(setting: str) -> None:
    cells = [make_cell("tent", f"fog/{s}", severity=s, setting=setting) for s in (1, 2, 3)]
    (group,) = make_groups(cells)
    assert not group.resets
    assert group.domains == ("fog/1", "fog/2", "fog/3")


def test_clean_images_belong_to_the_stream_of_each_severity() -> None:
    clean = make_cell("tent", "clean", severity=None)
    (group,) = make_groups(
        [clean, make_cell("tent", "fog"), make_cell("tent", "snow")], [], [make_cell("bn", "clean", severity=None).key]
    )
    assert group.domains == ("clean", "snow", "fog")
    assert group.severity == 5
    assert [variant.label for variant in group.variants] == ["bn", "tent"]
    groups = make_groups([clean, make_cell("tent", "fog"), make_cell("tent", "fog", severity=3)])
    assert [(group.severity, group.domains) for group in groups] == [(3, ("clean", "fog")), (5, ("clean", "fog"))]
    assert [group.severity for group in make_groups([clean])] == [None]


def test_variants_of_a_method_are_rows_of_their_own_in_numeric_order() -> None:
    cells = [make_cell("trust", "fog", options=f'{{"k": {k}}}') for k in (10, 2, 6)]
    (group,) = make_groups(cells)
    assert [(row.label, row.number) for row in group.variants] == [
        ("trust (k=2)", 0),
        ("trust (k=6)", 1),
        ("trust (k=10)", 2),
    ]


def test_options_that_look_alike_do_not_break_the_grouping() -> None:
    cells = [make_cell("trust", "fog", options=o) for o in ('{"k": 6}', '{"k": "6"}')]
    assert sorted(len(group.cells) for group in make_groups(cells)) == [1, 1]


def test_failed_and_absent_cells_have_rows_and_columns() -> None:
    done, failed, absent = make_cell("tent", "fog"), make_cell("trust", "snow").key, make_cell("sar", "frost").key
    (group,) = make_groups([done], [Failure(failed, "no memory")], [absent])
    assert [variant.label for variant in group.variants] == ["tent", "sar", "trust"]
    assert group.domains == ("snow", "frost", "fog")
    assert {label for label, _ in group.at} == {"tent"}


def test_reading_a_store_changes_nothing(tmp_path: Path) -> None:
    path = fill_store(tmp_path / "store.db", [make_cell("trust", "fog")])
    with ResultStore(path) as store:
        store.plan([make_cell("trust", "snow").key])
    contents = read_report(path)
    assert (contents.counts.done, contents.counts.pending) == (1, 1)
    assert len(contents.groups[0].pending) == 1
    assert read_report(path) == contents


def test_a_store_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no results store"):
        read_report(tmp_path / "none.db")
    assert not (tmp_path / "none.db").exists()
