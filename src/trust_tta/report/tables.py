"""The tables of a report, which `formats` and the page render."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trust_tta.report.model import Aggregate, Cost, ResultGroup, Variant, finite_mean
from trust_tta.report.paper import PaperComparison, published_times
from trust_tta.report.significance import difference, pareto_front, ranking
from trust_tta.report.text import counted, domain_name, joined, safe_line, short_domain
from trust_tta.results import Cell, format_gain, format_number, format_percent
from trust_tta.results.display import MISSING
from trust_tta.results.order_records import EntropyByOrder

PUBLISHED = "published"
OURS = "this run"
INCOMPLETE = "some domains are missing"
COST_TOLERANCE = 0.02  # relative difference up to which updates or times count as equal
MAX_SHORT_STREAM = 10  # batches; methods that learn may not differ from bn on such streams


@dataclass(frozen=True)
class TableCell:
    """Text, the number to sort by, the standard deviation over seeds, and the runs it comes from."""

    text: str
    value: float | None = None
    std: str = ""
    best: bool = False
    role: str = "num"  # CSS classes: "num", "words" or "gap", and more
    tip: str = ""  # tooltip
    mark: str = ""  # sign after the text
    runs: tuple[Cell, ...] = ()


@dataclass(frozen=True)
class Column:
    """Title, CSS class ("mean", "worst", "gain", "words"), index of the domain, and of the variant gains are over."""

    title: str
    role: str = ""
    domain: int | None = None
    base: int | None = None


@dataclass(frozen=True)
class Row:
    """Name and cells; a row with a variant shows its marker and is hidden with its method."""

    name: str
    cells: tuple[TableCell, ...]
    variant: Variant | None = None
    runs: tuple[Cell, ...] = ()  # of cells that have none of their own


@dataclass(frozen=True)
class DataTable:
    """A table for any renderer; the first column holds the names of the rows."""

    name: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]

    @property
    def has_std(self) -> bool:
        return any(cell.std for row in self.rows for cell in row.cells)


def accuracy_table(group: ResultGroup) -> DataTable:
    """Accuracy of methods by domains, averaged over seeds, after the mean and the worst domain."""
    several = len(group.domains) > 1
    domains = [Column(short_domain(d), domain=i) for i, d in enumerate(group.domains)]
    gains = [Column(f"over {base.name}", "gain", base=base.index) for base in group.baselines]
    columns = [Column("mean", "mean"), Column("worst", "worst"), *gains, *domains] if several else [*domains, *gains]
    rows = []
    for variant in group.variants:
        cells, over = [_domain_cell(group, variant, domain) for domain in group.domains], []
        mean = group.mean(variant.label)
        for base in group.baselines:
            other = group.mean(base.label).mean
            gain = None if mean.mean is None or other is None else mean.mean - other
            over.append(number(gain, format_gain, role="num gain"))
        rows.append(_row(group, variant, [*_summary_cells(group, variant), *over, *cells] if several else cells + over))
    best = [j for j, column in enumerate(columns) if column.role != "gain"]
    fewest = min((len(group.seed_means(v.label)) for v in group.variants if group.cells_of(v.label)), default=0)
    seeds = counted(len(group.seeds), "seed")
    seeds = seeds if fewest in (0, len(group.seeds)) else f"{fewest} to {seeds}"
    measure = group.measure[0].upper() + group.measure[1:]
    caption = f"{measure} in percent{', gains in points' if gains else ''}; {seeds}; best in bold"
    return DataTable(f"accuracy {group.title}", caption, (Column("method"), *columns), _mark_best(rows, best))


def notes(group: ResultGroup) -> list[str]:
    """Unit, number of seeds, missing results and short streams, for tables in plain text."""
    counts = sorted({n for v in group.variants for domain in group.domains if (n := group.entry(v.label, domain).n)})
    seeds = "no results" if not counts else f"mean over {counted(counts[0], 'seed')}"
    seeds = f"mean over {counts[0]} to {counts[-1]} seeds" if len(counts) > 1 else seeds
    missing = [
        f"{variant.name} on {safe_line(domain)}"
        for variant in group.variants
        for domain in group.domains
        if group.entry(variant.label, domain).mean is None
    ]
    parts = [f"{group.measure} in percent, {seeds}", *([f"missing: {', '.join(missing)}"] if missing else [])]
    return [*parts, *short_stream_note(group)]


def short_stream_note(group: ResultGroup) -> list[str]:
    """A note on methods that equal bn on every domain because the streams have only a few batches."""
    bn = group.variant("bn")
    longest = max((cell.batches for cell in group.cells), default=0) * (1 if group.resets else len(group.domains))
    if bn is None or longest > MAX_SHORT_STREAM:
        return []

    def shown(variant: Variant) -> list[str]:
        return [format_percent(group.entry(variant.label, domain).mean) for domain in group.domains]

    learning = [v for v in group.variants if any(cell.result.updates for cell in group.cells_of(v.label))]
    equal = [v.name for v in learning if shown(v) == shown(bn)]
    batches = counted(longest, "batch")
    return [f"{joined(equal)} = bn: a stream of {batches} is too short to learn from"] if equal else []


def defaults_note(group: ResultGroup) -> str:
    """The defaults of options that other rows of the same method vary: "trust without options: k=6."."""
    sentences = []
    for variant in group.variants:
        others = [v for v in group.variants if v.method == variant.method and v is not variant]
        if variant.label == variant.method and others:
            values: dict[str, Any] = json.loads(variant.options)
            varied = [n for n in sorted(values) if any(json.loads(o.options).get(n) != values[n] for o in others)]
            sentences.append(f"{variant.name} without options: {', '.join(f'{n}={values[n]}' for n in varied)}.")
    return " ".join(sentences)


def cost_table(group: ResultGroup) -> DataTable | None:
    """Accuracy, passes, updates and time of each method, the time also relative to Tent beside the paper's."""
    if not group.costs:
        return None
    tent = group.variant("tent")
    base = next((c.milliseconds for c in group.costs if tent is not None and c.variant.label == tent.label), None)
    theirs = published_times(group) if base else {}
    titles = ["accuracy in %", "updates per batch", "forwards", "backwards", "ms per image"]
    titles += ["time, Tent = 1"] if base else []
    titles += ["published (Table 10)"] if theirs else []
    rows = []
    for c in group.costs:
        ms = c.milliseconds
        cells = [
            number(c.accuracy, std=group.mean(c.variant.label).std),
            *(number(count, "{:.4g}".format) for count in (c.updates, c.forwards, c.backwards)),
            number(ms, ("{:.1f}" if (ms or 0.0) >= 10 else "{:.2f}").format),
        ]
        cells += [number(ms / base if ms is not None else None, "{:.2f}".format)] if base else []
        cells += [number(theirs.get(c.variant.label), "{:.1f}".format, role="num theirs")] if theirs else []
        rows.append(_row(group, c.variant, cells))
    caption = f"Cost of each method, {group.scope} and seeds; forward and backward passes are per batch"
    return make_table(f"cost {group.title}", caption, ["method", *titles], rows)


def equal_cost_table(group: ResultGroup) -> DataTable | None:
    """TRUST and the best other method at equal numbers of updates, and at equal times."""
    ours, others = ([c for c in group.costs if (c.variant.method == "trust") is wanted] for wanted in (True, False))
    pairs: dict[str, tuple[Cost, list[Cost]]] = {}
    for trust in sorted(ours, key=lambda c: (c.updates, -c.accuracy)):
        near = [c for c in others if trust.updates and abs(c.updates / trust.updates - 1) <= COST_TOLERANCE]
        pairs.setdefault(f"{counted(trust.updates, 'update')} per batch", (trust, near))
    timed = [(c, c.milliseconds) for c in ours if c.milliseconds is not None]
    for trust, limit in pareto_front(timed, key=lambda pair: (pair[1], pair[0].accuracy)):
        within = [c for c in others if c.milliseconds is not None and c.milliseconds <= limit * (1 + COST_TOLERANCE)]
        pairs[f"at most {limit:.3g} ms per image"] = (trust, within)
    rows = []
    for budget, (trust, candidates) in pairs.items():
        if not candidates:
            continue
        other = max(candidates, key=lambda c: c.accuracy)
        found = difference(group, trust.variant, other.variant)
        better = trust if found.gain > 0 else other
        cells = (
            TableCell(budget, role="words"),
            number(trust.accuracy),
            TableCell(other.variant.name, role="words"),
            number(other.accuracy),
            number(found.gain, format_gain, role="num gain"),
            TableCell("tie" if found.tie else better.variant.name, role="words"),
        )
        runs = [cell for cost in (trust, other) for cell in group.cells_of(cost.variant.label)]
        rows.append(Row(trust.variant.name, cells, trust.variant, tuple(runs)))
    if not rows:
        return None
    titles = ("TRUST", "budget", "accuracy in %", "best other method", "its accuracy in %", "gain in points", "better")
    return make_table(f"equal cost {group.title}", "TRUST and the best other method at equal cost", titles, rows)


def difference_table(group: ResultGroup) -> DataTable | None:
    """The best method against each other one, over seeds and over images that only one of the two classifies right."""
    if len(group.means()) < 2:
        return None
    best, *others = ranking(group)
    found = [difference(group, best, other) for other in others]
    tested = any(d.images is not None for d in found)
    titles = ["method", f"{best.name} better by", "± over seeds", "seeds"]
    titles += [f"only {best.name} right", "only this right", "p"] if tested else []
    rows = []
    for d in found:
        cells = [number(d.gain, format_gain, role="num gain"), number(d.seeds.half_width), number(d.seeds.n, str)]
        if tested:
            cells += [
                number(n, str) for n in ((d.images.first_only, d.images.second_only) if d.images else (None, None))
            ]
            cells.append(number(d.images.p if d.images else None, "{:.2g}".format))
        significant = False if d.equal_as_shown else d.significant
        cells.append(TableCell({None: "unknown", True: "yes", False: "no"}[significant], role="words"))
        rows.append(_row(group, d.second, cells))
    caption = f"{best.name}, the best {group.scope}, against each other method, in points"
    return make_table(f"comparison {group.title}", caption, [*titles, "significant"], rows)


def calibration_table(group: ResultGroup) -> DataTable | None:
    """ECE, NLL, Brier score and entropy of each method, averaged over domains and seeds."""
    rows = []
    for variant in group.variants:
        ece, *others = (group.mean(variant.label, value).mean for value in ("ece", "nll", "brier", "entropy"))
        if any(mean is not None for mean in (ece, *others)):
            rows.append(_row(group, variant, [number(ece), *(number(mean, format_number) for mean in others)]))
    if not rows:
        return None
    titles = ("method", "ECE in %", "NLL in nats", "Brier score (0 to 2)", "entropy in nats")
    caption = f"Calibration, {group.scope} and seeds; lower is better, except for the entropy"
    return make_table(f"calibration {group.title}", caption, titles, _mark_best(rows, range(3), lowest=True))


def class_table(group: ResultGroup, class_names: Sequence[str]) -> DataTable | None:
    """IoU of each class over all domains and seeds, mean Dice score and pixel accuracy; None for classification."""
    if not group.is_segmentation:
        return None
    classes = max(len(cell.result.pixels or ()) for cell in group.cells)
    names = list(map(safe_line, class_names))[:classes] or [f"class {i}" for i in range(classes)]
    rows = []
    for variant in group.variants:
        runs = group.cells_of(variant.label)
        counts = [cell.result.pixels for cell in runs if cell.result.pixels is not None]
        per_class = [[sum(column) for column in zip(*each, strict=True)] for each in zip(*counts, strict=False)]
        values = [
            finite_mean(c.result.mean_dice for c in runs if c.result.mean_dice is not None),
            finite_mean(c.result.pixel_accuracy for c in runs if c.result.pixel_accuracy is not None),
        ]
        for right, predicted, labeled in per_class:
            values.append(right / (predicted + labeled - right) if predicted + labeled else math.nan)
        rows.append(_row(group, variant, [number(x if math.isfinite(x) else None) for x in values]))
    caption = "IoU of each class in percent, over all pixels of all domains and seeds"
    titles = ["method", "mean Dice", "pixel accuracy", *names]
    return make_table(f"classes {group.title}", caption, titles, rows)


def paper_table(group: ResultGroup, comparison: PaperComparison) -> DataTable:
    """A published table and this run: means over the shared domains, and gains over bn."""
    table, widest = comparison.table, max(len(row.pairs) for row in comparison.rows)
    whole = [row for row in comparison.rows if len(row.pairs) == widest]  # means over fewer domains are not comparable
    base = next((row.mean for row in whole if row.variant.method == "bn"), None)
    rows = []
    for row in comparison.rows:
        mean = row.mean
        numbers = [
            number(mean.published, role="num theirs"),
            number(mean.ours),
            number(mean.difference, format_gain, role="num gain"),
        ]
        if base is not None:
            numbers.append(number(mean.published - base.published, format_gain, role="num theirs"))
            numbers.append(number(mean.ours - base.ours, format_gain, role="num gain"))
        gap = TableCell(MISSING, role="gap", tip=INCOMPLETE)
        cells = [TableCell(row.label, role="words"), *(numbers if row in whole else [gap] * len(numbers))]
        rows.append(_row(group, row.variant, cells))
    titles = ["method", "paper's name", f"{PUBLISHED} mean", f"{OURS} mean", "difference"]
    titles += [f"{PUBLISHED} gain", f"{OURS} gain"] if base is not None else []
    about = f"{table.place}, {table.dataset or 'data sets'}: {table.about}, in percent; this run: {group.title}."
    about += f" Means are over the {widest} shared domains." if comparison.left_out else ""
    about += f" {table.note[0].upper()}{table.note[1:]}." if table.note else ""
    return make_table(f"paper {table.place}", about, titles, rows)


def paper_domains_table(group: ResultGroup, comparison: PaperComparison) -> DataTable:
    """A published table and this run, domain by domain."""
    names = [pair.name for pair in max(comparison.rows, key=lambda row: len(row.pairs)).pairs]
    below = comparison.table.below_source()
    rows = []
    for row in comparison.rows:
        pairs = [{pair.name: pair for pair in row.pairs}.get(name) for name in names]
        published = [number(p.published if p else None, role="num theirs") for p in pairs]
        if row.variant.method == "trust":
            published = [replace(c, mark=" ▼") if n in below else c for c, n in zip(published, names, strict=True)]
        ours = [number(p.ours if p else None) for p in pairs]
        less = [number(p.difference if p else None, format_gain, role="num gain") for p in pairs]
        rows.append(Row(row.variant.name, (TableCell(PUBLISHED, role="words"), *published), row.variant))
        rows.append(_row(group, row.variant, [TableCell(OURS, role="words"), *ours]))
        rows.append(_row(group, row.variant, [TableCell("difference", role="words"), *less]))
    caption = "Domain by domain, in percent"
    if any(name in below for name in names):
        caption += "; ▼: the paper's TRUST is below the paper's source"
    titles = ["method", "", *map(short_domain, names)]
    return make_table(f"paper {comparison.table.place} by domain", caption, titles, rows)


def entropy_table(records: Sequence[EntropyByOrder]) -> DataTable:
    """Mean prediction entropy of each scan order, a row per record."""
    orders, rows = sorted({order for record in records for order in record.orders}), []
    for record in records:
        known = {order: value for order, value in record.by_order.items() if math.isfinite(value)}
        chosen = sorted(known, key=lambda order: (known[order], order))[: record.k]
        cells = [replace(number(known.get(order), "{:.3f}".format), best=order in chosen) for order in orders]
        rows.append(Row(safe_line(record.title), tuple(cells)))
    caption = "Mean prediction entropy of each scan order in nats; the chosen orders in bold"
    return make_table("entropy by order", caption, ["data", *orders], rows)


def make_table(name: str, caption: str, titles: Sequence[str], rows: Sequence[Row]) -> DataTable:
    """A table with these column titles; the first is that of the row names."""
    inner = zip(*(row.cells for row in rows), strict=True) if rows else ([] for _ in titles[1:])
    roles = ["words" if cells and cells[0].role == "words" else "" for cells in inner]
    return DataTable(name, caption, tuple(map(Column, titles, ["", *roles])), tuple(rows))


def _row(group: ResultGroup, variant: Variant, cells: Sequence[TableCell]) -> Row:
    return Row(variant.name, tuple(cells), variant, tuple(group.cells_of(variant.label)))


def number(
    value: float | None, shown: Callable[[float], str] = format_percent, *, role: str = "num", std: float | None = None
) -> TableCell:
    """A cell with a number, by default in percent, and its standard deviation; a dash for None."""
    if value is None:
        return TableCell(MISSING, role=role.replace("num", "gap"))
    return TableCell(shown(value), value, "" if std is None else format_percent(std), role=role)


def _mark_best(rows: Sequence[Row], columns: Iterable[int], *, lowest: bool = False) -> tuple[Row, ...]:
    """Mark the cells of each column that show its best number, if it has two or more."""
    cells = [list(row.cells) for row in rows]
    for j in columns:
        known = [row[j] for row in cells if row[j].value is not None]
        if len(known) > 1:
            best = (min if lowest else max)(known, key=lambda cell: cell.value or 0.0).text
            for row in cells:
                row[j] = replace(row[j], best=row[j].value is not None and row[j].text == best)
    return tuple(replace(row, cells=tuple(marked)) for row, marked in zip(rows, cells, strict=True))


def _domain_cell(group: ResultGroup, variant: Variant, domain: str) -> TableCell:
    """The accuracy of a variant on a domain, or the reason for its absence."""
    where, runs = f"{variant.name} on {domain_name(domain)}", tuple(group.at.get((variant.label, domain), []))
    entry = group.entry(variant.label, domain)
    failed = [f for f in group.failures if (f.label, f.key.domain) == (variant.label, domain)]
    pending = [p for p in group.pending if (p.label, p.key.domain) == (variant.label, domain)]
    if entry.mean is None and failed:
        why = [f"seed {failure.key.seed} failed: {safe_line(failure.message)}" for failure in failed]
        why += [f"seed {planned.key.seed} has not run yet" for planned in pending]
        return TableCell("failed", role="gap failed", tip=f"{where}: {'; '.join(why)}")
    if entry.mean is None and runs:
        return TableCell("NaN", role="gap failed", tip=f"{where} finished, but its accuracy is NaN", runs=runs)
    if entry.mean is None:
        why_not = "not run yet" if pending else "not part of this run"
        return TableCell(MISSING, role="gap missing", tip=f"{where}: {why_not}")
    lines = [f"{where}: {format_percent(entry.mean)}{_interval(entry)}"]
    for base in group.baselines:
        theirs = group.entry(base.label, domain).mean
        if theirs is not None and base.label != variant.label:
            lines.append(f"{format_gain(entry.mean - theirs)} over {base.name}")
    absent = len(failed) + len(pending)
    lines += [f"† {absent} more failed or missing"] if absent else []
    return replace(number(entry.mean, std=entry.std), tip="\n".join(lines), mark="†" if absent else "", runs=runs)


def _summary_cells(group: ResultGroup, variant: Variant) -> list[TableCell]:
    """The mean over domains, and the worst of them."""
    entry = group.mean(variant.label)
    if entry.mean is None:
        return [TableCell(MISSING, role=f"gap {role}", tip=INCOMPLETE) for role in ("mean", "worst")]
    tip = f"{variant.name}: {format_percent(entry.mean)}{_interval(entry)}, {group.scope}"
    means = {domain: group.entry(variant.label, domain).mean or 0.0 for domain in group.domains}
    domain = min(means, key=means.__getitem__)
    worst = replace(number(means[domain], role="num worst"), tip=f"{variant.name} is worst on {domain_name(domain)}")
    return [replace(number(entry.mean, role="num mean", std=entry.std), tip=tip), worst]


def _interval(entry: Aggregate) -> str:
    if entry.n < 2:
        return ", one seed"
    return f" ± {format_percent(entry.std)} (std), 95 % interval ± {format_percent(entry.half_width)}, {entry.n} seeds"
