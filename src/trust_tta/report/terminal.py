"""A report in the terminal: for each group its tables, and in words what they say."""

from __future__ import annotations

from collections.abc import Sequence

from trust_tta.report.formats import to_text
from trust_tta.report.model import Group, make_groups
from trust_tta.report.published import load_published
from trust_tta.report.summary import summarize
from trust_tta.report.tables import accuracy_table, cost_table, notes
from trust_tta.results import Cell


def group_text(group: Group) -> str:
    """Title, tables and summary of a group."""
    return "\n".join([tables_text(group).rstrip(), "", " ".join(summarize(group)), ""])


def tables_text(group: Group) -> str:
    """Title, accuracies by domain, and accuracy against cost."""
    if not group.cells:
        return f"{group.heading}\n"
    cost = cost_table(group, load_published())
    title = f"{group.heading}\n({'; '.join(notes(group))})"
    return f"{title}\n{to_text(accuracy_table(group))}" + (f"\n{to_text(cost)}" if cost else "")


def results_text(cells: Sequence[Cell]) -> list[str]:
    """The tables of finished cells, a text for each group."""
    return [tables_text(group) for group in make_groups(cells)]


def verdict(cells: Sequence[Cell]) -> str:
    """In two sentences who leads, by how much, and whether the runs tell."""
    return " ".join(sentence for group in make_groups(cells) for sentence in summarize(group)[:2])
