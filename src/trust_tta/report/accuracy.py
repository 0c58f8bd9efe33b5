"""The table of methods by domains: seeds gathered, best in bold, what failed or is missing marked with its reason."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape

from trust_tta.report import markup, series
from trust_tta.report.groups import Group, Place
from trust_tta.report.markup import Entry, Line
from trust_tta.report.palette import display_name, domain_name
from trust_tta.report.tables import SHORT_LABELS
from trust_tta.results import Aggregate, Table, format_gain, format_percent
from trust_tta.results.display import MISSING


def accuracy_table(group: Group, run_index: Mapping[str, int]) -> str:
    """Methods by domains: seeds gathered, best in bold, what failed or is missing marked."""
    table = group.table()
    baselines = [row.label for method in ("source", "bn") if (row := group.row(method)) is not None]
    failed, absent = _places(group)
    best = _best(group, table)
    look = series.looks(group)
    lines = []
    for row in group.rows:
        entries = []
        for domain in group.domains:
            place = (row.label, domain)
            entry = _aggregate(table, *place)
            runs = tuple(run_index[cell.key.digest] for cell in group.at.get(place, []))
            if entry.mean is None:
                entries.append(_gap(place, failed, absent, runs))
                continue
            text = format_percent(entry.mean)
            gaps = len(failed.get(place, [])) + absent.get(place, 0)
            role = "num best" if text == best.get(domain) else "num"
            tip = _tip(table, place, entry, baselines, gaps)
            entries.append(Entry(text + ("†" if gaps else ""), entry.mean, tip, role, runs, _spread(entry)))
        entries += _row_means(group, table, row.label, baselines, best)
        runs = tuple(run_index[cell.key.digest] for cell in series.row_cells(group, row.label))
        lines.append(Line(row.label, tuple(entries), look[row.label], runs))
    several = len(group.domains) > 1
    header = ["method", *(SHORT_LABELS.get(d, domain_name(d)) for d in group.domains), *(["mean"] if several else [])]
    header += [f"over {display_name(label).split()[0]}" for label in baselines]
    seeds = sorted({cell.key.seed for cell in group.cells})
    counted = f"{len(seeds)} {'seed' if len(seeds) == 1 else 'seeds'}"
    gains = ", gains in points" if baselines else ""
    caption = f"Accuracy in percent{gains}; {counted}; the best as shown in bold"
    drawn = markup.data_table(f"accuracy {group.title}", caption, header, lines, groups=len(group.domains))
    return drawn + _unsaid(group) + _gap_list(group)


def _unsaid(group: Group) -> str:
    """What a method without brackets stands for, where other lines of it have brackets."""
    said = []
    for row in group.rows:
        others = [other for other in group.rows if other.method == row.method and other is not row]
        if row.label == row.method and others:
            values = json.loads(row.options)
            varied = [n for n in sorted(values) if any(json.loads(o.options).get(n) != values[n] for o in others)]
            said.append(f"{display_name(row.label)} alone: {', '.join(f'{n}={values[n]}' for n in varied)}.")
    return f'<p class="note under">{escape(" ".join(said))}</p>' if said else ""


def _gap_list(group: Group) -> str:
    """Failed cells with their reasons, and how many are missing."""
    items = [
        f"<li><b>{escape(display_name(group.label(f.key)))}</b> on {escape(f.key.domain)}, seed {f.key.seed}: "
        f"{escape(f.message)} <code>{f.key.digest[:12]}</code></li>"
        for f in group.failures
    ]
    items += [
        f"<li>still to be run: {escape(f'{display_name(group.label(key))} on {key.domain}, seed {key.seed}')}</li>"
        for key in group.absent[:40]
    ]
    if len(group.absent) > 40:
        items.append(f"<li>and {len(group.absent) - 40} more still to be run</li>")
    if not items:
        return ""
    counted = ((len(group.failures), "failed"), (len(group.absent), "missing"))
    count = ", ".join(f"{n} {word}" for n, word in counted if n)
    return f'<details class="gaps"><summary>{count}</summary><ul>{"".join(items)}</ul></details>'


def _places(group: Group) -> tuple[dict[Place, list[str]], dict[Place, int]]:
    failed: dict[Place, list[str]] = defaultdict(list)
    for failure in group.failures:
        failed[group.label(failure.key), failure.key.domain].append(f"seed {failure.key.seed}: {failure.message}")
    absent: dict[Place, int] = defaultdict(int)
    for key in group.absent:
        absent[group.label(key), key.domain] += 1
    return failed, absent


def _aggregate(table: Table, row: str, column: str) -> Aggregate:
    return table.cell(row, column) if row in table.rows and column in table.columns else Aggregate()


def _best(group: Group, table: Table) -> dict[str, str]:
    """The best text of each column; none where there is nothing to compare."""
    if len(table.rows) < 2:
        return {}
    columns = {c: [line[j].mean for line in table.cells] for j, c in enumerate(table.columns)}
    found = {c: [v for v in values if v is not None] for c, values in columns.items()}
    best = {c: format_percent(max(values)) for c, values in found.items() if len(values) > 1}
    reached = series.means(group)
    return {**best, "": format_percent(max(reached.values()))} if len(reached) > 1 else best


def _gap(
    place: Place,
    failed: Mapping[Place, Sequence[str]],
    absent: Mapping[Place, int],
    runs: tuple[int, ...],
) -> Entry:
    where = f"{display_name(place[0])} on {domain_name(place[1])}"
    if place in failed:
        return Entry("failed", None, f"{where} failed. {'; '.join(failed[place])}", "gap failed")
    if runs:
        return Entry("NaN", None, f"{where} finished, but its accuracy is not a number", "gap failed", runs)
    why = "still to be run" if place in absent else "not part of this run"
    return Entry(MISSING, None, f"{where}: {why}", "gap missing")


def _tip(table: Table, place: Place, entry: Aggregate, baselines: Sequence[str], gaps: int) -> str:
    parts = [f"{display_name(place[0])} on {domain_name(place[1])}: {format_percent(entry.mean)}{_around(entry)}"]
    for label in baselines:
        base = _aggregate(table, label, place[1]).mean
        if base is not None and entry.mean is not None and label != place[0]:
            parts.append(f"{format_gain(entry.mean - base)} over {display_name(label)}")
    return "\n".join([*parts, *([f"† {gaps} more failed or missing"] if gaps else [])])


def _around(entry: Aggregate) -> str:
    if entry.n < 2:
        return ", one seed"
    return f" ± {format_percent(entry.std)} (std), 95 % interval ± {format_percent(entry.half_width)}, {entry.n} seeds"


def _spread(entry: Aggregate) -> str:
    return f" ± {format_percent(entry.std)}" if entry.std is not None else ""


def _row_means(
    group: Group, table: Table, label: str, baselines: Sequence[str], best: Mapping[str, str]
) -> list[Entry]:
    reached = series.means(group)
    mean = reached.get(label)
    entries = []
    if len(group.domains) > 1:
        entry = table.means[table.rows.index(label)] if label in table.rows else Aggregate()
        text = format_percent(mean)
        tip = "not every domain is there" if mean is None else f"{display_name(label)}: {text}{_around(entry)}"
        role = "num mean" + (" best" if mean is not None and text == best.get("") else "")
        entries.append(Entry(text, mean, tip, role, (), _spread(entry) if mean is not None else ""))
    for base in baselines:
        gain = mean - reached[base] if mean is not None and base in reached else None
        entries.append(Entry(format_gain(gain), gain, "", "num gain"))
    return entries
