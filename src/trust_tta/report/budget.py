"""TRUST beside the best other method at equal cost: as many updates a batch, or no more time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trust_tta.report import markup, series
from trust_tta.report.compare import match_row
from trust_tta.report.groups import Group
from trust_tta.report.markup import Entry, Line, Runs
from trust_tta.report.palette import display_name
from trust_tta.report.placing import frontier
from trust_tta.report.published import Published
from trust_tta.report.series import Cost
from trust_tta.results import format_gain, format_percent

SAME_UPDATES = 0.02  # two numbers of updates a batch within two percent count as equal
SAME_TIME = 0.02  # and so do two times


@dataclass(frozen=True)
class Duel:
    """A line of TRUST and the best other line at equal cost."""

    trust: Cost
    other: Cost

    @property
    def gain(self) -> float:
        return self.trust.accuracy - self.other.accuracy

    @property
    def level(self) -> bool:
        """Whether the two are the same as shown."""
        return format_percent(self.gain) in ("0.0", "-0.0")


def equal_updates(found: Sequence[Cost]) -> list[Duel]:
    """At each number of updates that both sides have, the best of TRUST beside the best of the others, by updates."""
    duels: dict[float, Duel] = {}
    for trust in sorted((c for c in found if _is_trust(c) and c.updates > 0), key=lambda c: (c.updates, -c.accuracy)):
        near = [c for c in found if not _is_trust(c) and abs(c.updates / trust.updates - 1) <= SAME_UPDATES]
        if near:
            duels.setdefault(round(trust.updates, 2), Duel(trust, _best(near)))
    return list(duels.values())


def equal_time(found: Sequence[Cost]) -> list[Duel]:
    """Each line of TRUST that no faster line of TRUST matches, beside the best other that takes no more time."""
    timed = [c for c in found if c.milliseconds is not None]
    ours = frontier([c for c in timed if _is_trust(c)], key=lambda c: (c.milliseconds or 0.0, c.accuracy))
    duels = []
    for trust in ours:
        limit = (trust.milliseconds or 0.0) * (1 + SAME_TIME)
        within = [c for c in timed if not _is_trust(c) and (c.milliseconds or 0.0) <= limit]
        if within:
            duels.append(Duel(trust, _best(within)))
    return duels


def cost_table(group: Group, published: Published, runs: Runs) -> str:
    """Accuracy, updates, passes and time of each line; the time also relative to Tent, beside the paper's."""
    found, look = series.costs(group), series.looks(group)
    if not found:
        return ""
    tent = group.row("tent")
    base = next((c.milliseconds for c in found if tent is not None and c.row.label == tent.label), None)
    theirs = _published_times(group, published) if base else {}
    lines = []
    for c in found:
        entries = [
            Entry(format_percent(c.accuracy), c.accuracy, "", "num"),
            Entry(f"{c.updates:.4g}", c.updates, "", "num"),
            Entry(f"{c.passes:.4g}", c.passes, "", "num"),
            _number(c.milliseconds, "{:.1f}" if (c.milliseconds or 0.0) >= 10 else "{:.2f}"),
        ]
        if base:
            entries.append(_number(c.milliseconds / base if c.milliseconds is not None else None, "{:.2f}"))
        if theirs:
            entries.append(_number(theirs.get(c.row.label), "{:.1f}", "num theirs"))
        lines.append(Line(c.row.label, tuple(entries), look[c.row.label], runs.get(c.row.label, ())))
    header = ["method", "accuracy in %", "updates a batch", "passes a batch", "ms an image"]
    header += ["time, Tent = 1"] if base else []
    header += ["published (Table 10)"] if theirs else []
    caption = "Cost of each method, mean over domains and seeds; passes are forward and backward ones"
    return markup.data_table(f"cost {group.title}", caption, header, lines)


def duel_table(group: Group, runs: Runs) -> str:
    """TRUST at equal updates and at equal time beside the best other method, in numbers."""
    found, look = series.costs(group), series.looks(group)
    costly = [
        (f"{d.trust.updates:.4g} {'update' if d.trust.updates == 1 else 'updates'} a batch", d)
        for d in equal_updates(found)
    ]
    costly += [(f"at most {d.trust.milliseconds:.3g} ms an image", d) for d in equal_time(found)]
    if not costly:
        return ""
    lines = []
    for at, duel in costly:
        winner = "level" if duel.level else display_name((duel.trust if duel.gain > 0 else duel.other).row.label)
        entries = (
            Entry(at, None, "", "words"),
            Entry(format_percent(duel.trust.accuracy), duel.trust.accuracy, "", "num"),
            Entry(display_name(duel.other.row.label), None, "", "words"),
            Entry(format_percent(duel.other.accuracy), duel.other.accuracy, "", "num"),
            Entry(format_gain(duel.gain), duel.gain, "", "num gain"),
            Entry(winner, None, "", "words"),
        )
        both = [run for cost in (duel.trust, duel.other) for run in runs.get(cost.row.label, ())]
        lines.append(Line(duel.trust.row.label, entries, look[duel.trust.row.label], tuple(both)))
    header = ["TRUST", "at", "accuracy in %", "best other there", "its accuracy in %", "gain in points", "ahead"]
    caption = "TRUST beside the best other method at equal cost"
    return markup.data_table(f"equal cost {group.title}", caption, header, lines)


def _published_times(group: Group, published: Published) -> Mapping[str, float]:
    """The paper's times relative to Tent, by the label of our line."""
    rows = [row for item in published.items if item.measure == "relative_time" for row in item.rows]
    matched = [(match_row(group, row, published), row.values[0]) for row in rows]
    return {row.label: value for row, value in matched if row is not None and row.method != "tent"}


def _is_trust(cost: Cost) -> bool:
    return cost.row.method == "trust"


def _best(costs: Sequence[Cost]) -> Cost:
    return max(costs, key=lambda c: c.accuracy)


def _number(value: float | None, pattern: str, role: str = "num") -> Entry:
    return Entry("–", None, "", "gap") if value is None else Entry(pattern.format(value), value, "", role)
