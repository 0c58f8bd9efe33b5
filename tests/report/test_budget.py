from __future__ import annotations

from tests.report.samples import make_cell
from trust_tta.report.budget import cost_table, duel_table, equal_time, equal_updates
from trust_tta.report.groups import Group, make_groups
from trust_tta.report.published import load_published
from trust_tta.report.series import costs
from trust_tta.results import Cell


def line(method: str, accuracy: float, updates: int, milliseconds: float, options: str = "{}") -> Cell:
    return make_cell(method, "fog", accuracy=accuracy, work=(updates, 2 * updates + 1, milliseconds), options=options)


def group_of(*cells: Cell) -> Group:
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


def test_at_equal_updates_the_best_of_both_sides_meet() -> None:
    duels = [(d.trust.row.label, d.other.row.label, round(d.gain, 3)) for d in equal_updates(costs(GROUP))]
    assert duels == [
        ("trust (k=1)", "sar", 0.01),  # nobody else makes two
        ("trust (k=6, merge=slerp)", "trust_naive", 0.02),
    ]


def test_in_equal_time_only_what_is_no_slower_counts() -> None:
    duels = [(d.trust.row.label, d.other.row.label) for d in equal_time(costs(GROUP))]
    assert duels == [
        ("trust (k=1)", "tent"),
        ("trust (k=2)", "sar"),
        ("trust (k=6, merge=slerp)", "trust_naive"),  # 25.0 is 24.9 for this purpose; the slower k=6 adds nothing
    ]


def test_without_trust_or_without_others_there_is_no_duel() -> None:
    alone, others = group_of(line("trust", 0.7, 6, 1.0)), group_of(line("tent", 0.7, 1, 1.0))
    for group in (alone, others):
        assert equal_updates(costs(group)) == equal_time(costs(group)) == []
        assert duel_table(group, {}) == ""
        assert cost_table(group, load_published(), {}).count("<tr") == 2


def test_time_is_told_relative_to_tent_beside_the_paper_s() -> None:
    two = '{"k": 2, "lr": 0.0001}'
    text = cost_table(group_of(line("tent", 0.7, 1, 4.0), line("trust", 0.75, 2, 10.0, two)), load_published(), {})
    assert "time, Tent = 1" in text
    assert ">2.50<" in text
    assert ">3.2<" in text  # Table 10, TRUST with K = 2
    assert "Tent = 1" not in cost_table(group_of(line("trust", 0.75, 2, 10.0, two)), load_published(), {})
    six = cost_table(
        group_of(line("tent", 0.7, 1, 4.0), line("trust", 0.75, 6, 10.0, '{"k": 6}')), load_published(), {}
    )
    assert "published" not in six
