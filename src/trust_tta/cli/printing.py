"""Results in the terminal: the numbers, order and rounding of every other report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from trust_tta.report.tables import Entry, Layout, layout, notes, to_text
from trust_tta.results import Cell, Table, format_gain, format_percent, split, table

_BASELINES = ("source", "bn")
_WIDEST_SPREAD = 6  # columns that fit a terminal together with their spreads


def find_baseline(rows: Iterable[str]) -> str | None:
    """The row that gains are measured against."""
    present = tuple(rows)
    return next((name for name in _BASELINES if name in present), None)


def result_tables(cells: Sequence[Cell]) -> list[str]:
    """For each data set, setting and batch size: accuracies by domain, then accuracy against cost."""
    blocks = []
    for values, group in split(cells, ("dataset", "setting", "batch_size")).items():
        severities = sorted({str(cell.key.severity) for cell in group if cell.key.severity is not None})
        severity = f"severity {', '.join(severities)}, " if severities else ""
        accuracies = table(group, rows="label")
        baseline = find_baseline(accuracies.rows)
        few = len(accuracies.columns) <= _WIDEST_SPREAD
        drawn = layout(accuracies, baseline=baseline, spread=few)
        title = f"{values[0]}, {severity}{values[1]}, batch {values[2]}: {'; '.join(notes(accuracies))}"
        blocks.append(f"{title}\n{to_text(drawn)}\n{to_text(cost_table(group, accuracies))}")
    return blocks


def cost_table(cells: Sequence[Cell], accuracies: Table) -> Layout:
    """Mean accuracy and its spread over seeds, gain, and what it cost for each batch and image."""
    groups: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        groups[cell.label].append(cell)
    baseline = find_baseline(accuracies.rows)
    gains = accuracies.gains(baseline) if baseline else (None,) * len(accuracies.rows)
    lines = []
    for row, mean, gain in zip(accuracies.rows, accuracies.means, gains, strict=True):
        spread = "" if mean.std is None else format_percent(mean.std)
        costs = (Entry(text) for text in _costs(groups[row]))
        lines.append((Entry(row), Entry(format_percent(mean.mean), spread), Entry(format_gain(gain)), *costs))
    header = ("", "accuracy", f"over {baseline}" if baseline else "gain")
    return Layout((*header, "forwards/batch", "backwards/batch", "updates/batch", "ms/image"), tuple(lines))


def verdict(cells: Sequence[Cell]) -> str:
    """Who leads, by how much over the next, and in how many of the seeds, which share their images."""
    means = _means(cells)
    ranked = sorted(means, key=lambda row: -means[row])
    if len(ranked) < 2:
        return "Fewer than two methods have complete results; there is no one to lead."
    leader, follower = ranked[:2]
    lead = format_gain(means[leader] - means[follower])
    text = f"{leader} leads with {format_percent(means[leader])} % mean accuracy, {lead} over {follower}"
    seeds = [_means(group) for group in split(cells, ("seed",)).values()]
    gains = [found[leader] - found[follower] for found in seeds if leader in found and follower in found]
    if len(gains) < 2:
        return f"{text}."
    ahead, listed = sum(gain > 0 for gain in gains), ", ".join(map(format_gain, gains))
    if ahead == len(gains):
        return f"{text}; it is ahead in all {ahead} seeds ({listed})."
    return f"{text}; it is ahead in {ahead} of {len(gains)} seeds ({listed}), which do not tell the two apart."


def _means(cells: Sequence[Cell]) -> dict[str, float]:
    """The mean accuracy of every row that has all domains."""
    found = table(cells, rows="label")
    return {row: mean.mean for row, mean in zip(found.rows, found.means, strict=True) if mean.mean is not None}


def _costs(cells: Sequence[Cell]) -> tuple[str, ...]:
    batches = sum(-(-cell.result.samples // cell.key.batch_size) for cell in cells)
    images = sum(cell.result.samples for cell in cells)
    counts = [sum(getattr(cell.result, name) for cell in cells) for name in ("forwards", "backwards", "updates")]
    seconds = sum(cell.result.seconds_total for cell in cells)
    return *(f"{count / batches:.1f}" for count in counts), f"{1000 * seconds / images:.2f}"
