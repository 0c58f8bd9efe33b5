from __future__ import annotations

from tests.report.samples import make_cell, make_groups
from trust_tta.report.model import ResultGroup
from trust_tta.report.tables import DataTable, cost_table, equal_cost_table
from trust_tta.results import Cell


def line(method: str, accuracy: float, updates: int, milliseconds: float, options: str = "{}") -> Cell:
    return make_cell(method, "fog", accuracy=accuracy, work=(updates, 2 * updates + 1, milliseconds), options=options)


def group_of(*cells: Cell) -> ResultGroup:
    (group,) = make_groups(cells)
    return group


GROUP = group_of(
    line("bn", 0.70, 0, 1.0),
    line("tent", 0.71, 1, 4.0),
    line("sar", 0.72, 1, 7.0),
    line("trust_naive", 0.74, 6, 25.0, '{"steps": 6}'),
    line("trust", 0.73, 1, 5.0, '{"k": 1}'),
    line("trust", 0.735, 2, 8.0, '{"k": 2}'),
    line("trust", 0.725, 6, 30.0, '{"k": 6}'),
    line("trust", 0.76, 6, 24.9, '{"k": 6, "merge": "slerp"}'),
)


def rows_of(group: ResultGroup, budget: str) -> list[tuple[str, ...]]:
    """TRUST, the best other method and the gain in points, of the rows with a kind of budget."""
    table = equal_cost_table(group)
    rows = [] if table is None else table.rows
    return [(r.name, r.cells[2].text, r.cells[4].text) for r in rows if budget in r.cells[0].text]


def test_at_equal_updates_the_best_methods_are_compared() -> None:
    assert rows_of(GROUP, "per batch") == [
        ("trust (k=1)", "sar", "+1.0"),  # nobody else makes two
        ("trust (k=6, merge=slerp)", "trust_naive", "+2.0"),
    ]


def test_equal_time_considers_only_methods_that_are_not_slower() -> None:
    assert [names[:2] for names in rows_of(GROUP, "ms per image")] == [
        ("trust (k=1)", "tent"),
        ("trust (k=2)", "sar"),
        ("trust (k=6, merge=slerp)", "trust_naive"),  # 25.0 is 24.9 for this purpose; the slower k=6 adds nothing
    ]


def test_equal_cost_needs_trust_and_another_method() -> None:
    alone, others = group_of(line("trust", 0.7, 6, 1.0)), group_of(line("tent", 0.7, 1, 1.0))
    for group in (alone, others):
        assert equal_cost_table(group) is None
        assert len(costs(group).rows) == 1


def costs(group: ResultGroup) -> DataTable:
    table = cost_table(group)
    assert table is not None
    return table


def test_time_is_shown_relative_to_tent_beside_the_papers() -> None:
    trust = line("trust", 0.75, 2, 10.0, '{"k": 2, "lr": 0.0001}')
    both = costs(group_of(line("tent", 0.7, 1, 4.0), trust))
    assert [column.title for column in both.columns[-2:]] == ["time, Tent = 1", "published (Table 10)"]
    assert [entry.text for entry in both.rows[1].cells[-2:]] == ["2.50", "3.2"]  # Table 10, TRUST with K = 2
    assert "Tent" not in costs(group_of(trust)).columns[-1].title
    six = costs(group_of(line("tent", 0.7, 1, 4.0), line("trust", 0.75, 6, 10.0, '{"k": 6}')))
    assert six.columns[-1].title == "time, Tent = 1"
