"""The tables of a report; `formats` and the page render them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from trust_tta.report.model import Aggregate, Cost, Place, ResultGroup, Variant
from trust_tta.report.paper import PaperComparison, published_times
from trust_tta.report.significance import difference, pareto_front, ranking
from trust_tta.report.text import counted, domain_name, joined, safe_line, short_domain
from trust_tta.results import Cell, format_gain, format_percent, format_value
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
    """Methods by domains, averaged over seeds; mean and worst domain come first, failed and missing runs are marked."""
    several, gaps = len(group.domains) > 1, _gaps(group)
    domains = [Column(short_domain(d), domain=i) for i, d in enumerate(group.domains)]
    gains = [Column(f"over {base.name}", "gain", base=base.index) for base in group.baselines]
    columns = [Column("mean", "mean"), Column("worst", "worst"), *gains, *domains] if several else [*domains, *gains]
    rows = []
    for variant in group.variants:
        cells, over = [_domain_cell(group, variant, domain, gaps) for domain in group.domains], []
        mean = group.mean(variant.label)
        for base in group.baselines:
            other = group.mean(base.label).mean
            over.append(_gain(None if mean.mean is None or other is None else mean.mean - other))
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
    said = [f"{group.measure} in percent, {seeds}", *([f"missing: {', '.join(missing)}"] if missing else [])]
    return [*said, *short_stream_note(group)]


def short_stream_note(group: ResultGroup) -> list[str]:
    """Methods that learn but equal bn on every domain, if the streams have only a few batches."""
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


def cost_table(group: ResultGroup) -> DataTable | None:
    """Accuracy, passes, updates and time of each method; time also relative to Tent, next to the paper's."""
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
            replace(_percent(c.accuracy), std=_std(group.mean(c.variant.label))),
            *(TableCell(f"{number:.4g}", number) for number in (c.updates, c.forwards, c.backwards)),
            _number(ms, "{:.1f}" if (ms or 0.0) >= 10 else "{:.2f}"),
        ]
        cells += [_number(ms / base if ms is not None else None, "{:.2f}")] if base else []
        cells += [_number(theirs.get(c.variant.label), "{:.1f}", "num theirs")] if theirs else []
        rows.append(_row(group, c.variant, cells))
    caption = f"Cost of each method, {group.scope} and seeds; forward and backward passes are per batch"
    return DataTable(f"cost {group.title}", caption, _columns("method", *titles), tuple(rows))


def equal_cost_table(group: ResultGroup) -> DataTable | None:
    """TRUST and the best other method at equal updates, and within the time of each variant on TRUST's Pareto front."""
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
            _words(budget),
            _percent(trust.accuracy),
            _words(other.variant.name),
            _percent(other.accuracy),
            _gain(found.gain),
            _words("tie" if found.tie else better.variant.name),
        )
        runs = [cell for cost in (trust, other) for cell in group.cells_of(cost.variant.label)]
        rows.append(Row(trust.variant.name, cells, trust.variant, tuple(runs)))
    if not rows:
        return None
    titles = ("budget", "accuracy in %", "best other method", "its accuracy in %", "gain in points", "better")
    caption = "TRUST and the best other method at equal cost"
    return DataTable(f"equal cost {group.title}", caption, _columns("TRUST", *titles, words=(1, 3, 6)), tuple(rows))


def difference_table(group: ResultGroup) -> DataTable | None:
    """The best method against each other one: difference over seeds, and images that only one of them gets right."""
    if len(group.means()) < 2:
        return None
    best, *others = ranking(group)
    found = [difference(group, best, other) for other in others]
    tested = any(d.images is not None for d in found)
    titles = [f"{best.name} better by", "± over seeds", "seeds"]
    titles += [f"only {best.name} right", "only this right", "p"] if tested else []
    rows = []
    for d in found:
        half = d.seeds.half_width
        cells = [_gain(d.gain), _GAP if half is None else _percent(half), TableCell(str(d.seeds.n), d.seeds.n)]
        if tested:
            counts = [d.images.first_only, d.images.second_only] if d.images else []
            cells += [TableCell(str(n), n) for n in counts] or [_GAP, _GAP]
            cells.append(_number(d.images.p if d.images else None, "{:.2g}"))
        significant = False if d.equal_as_shown else d.significant
        cells.append(_words({None: "unknown", True: "yes", False: "no"}[significant]))
        rows.append(_row(group, d.second, cells))
    caption = f"{best.name}, the best {group.scope}, against each other method, in points"
    columns = (*_columns("method", *titles), Column("significant", "words"))
    return DataTable(f"comparison {group.title}", caption, columns, tuple(rows))


def calibration_table(group: ResultGroup) -> DataTable | None:
    """ECE, NLL, Brier score and entropy of each method, averaged over domains and seeds."""
    rows = []
    for variant in group.variants:
        means = [(value, group.mean(variant.label, value).mean) for value in ("ece", "nll", "brier", "entropy")]
        if any(mean is not None for _, mean in means):
            cells = [TableCell(format_value(v, x), x, role="gap" if x is None else "num") for v, x in means]
            rows.append(_row(group, variant, cells))
    if not rows:
        return None
    titles = ("ECE in %", "NLL in nats", "Brier score (0 to 2)", "entropy in nats")
    caption = f"Calibration, {group.scope} and seeds; lower is better, except for the entropy"
    marked = _mark_best(rows, range(3), lowest=True)
    return DataTable(f"calibration {group.title}", caption, _columns("method", *titles), marked)


def paper_table(group: ResultGroup, comparison: PaperComparison) -> DataTable:
    """A published table and this run: means over the shared domains, and gains over bn."""
    table, widest = comparison.table, max(len(row.pairs) for row in comparison.rows)
    whole = [row for row in comparison.rows if len(row.pairs) == widest]  # means over fewer domains are not comparable
    base = next((row.mean for row in whole if row.variant.method == "bn"), None)
    rows = []
    for row in comparison.rows:
        mean = row.mean
        numbers = [_percent(mean.published, "num theirs"), _percent(mean.ours), _gain(mean.difference)]
        if base is not None:
            numbers += [_gain(mean.published - base.published, "num theirs"), _gain(mean.ours - base.ours)]
        gap = TableCell(MISSING, role="gap", tip=INCOMPLETE)
        cells = [_words(row.label), *(numbers if row in whole else [gap] * len(numbers))]
        rows.append(_row(group, row.variant, cells))
    titles = ["paper's name", f"{PUBLISHED} mean", f"{OURS} mean", "difference"]
    titles += [f"{PUBLISHED} gain", f"{OURS} gain"] if base is not None else []
    about = f"{table.place}, {table.dataset or 'data sets'}: {table.about}, in percent; this run: {group.title}."
    about += f" Means are over the {widest} shared domains." if comparison.left_out else ""
    about += f" {table.note[0].upper()}{table.note[1:]}." if table.note else ""
    return DataTable(f"paper {table.place}", about, _columns("method", *titles, words=(1,)), tuple(rows))


def paper_domains_table(group: ResultGroup, comparison: PaperComparison) -> DataTable:
    """A published table and this run, domain by domain."""
    names = [pair.name for pair in max(comparison.rows, key=lambda row: len(row.pairs)).pairs]
    below = comparison.table.below_source()
    rows = []
    for row in comparison.rows:
        pairs = [{pair.name: pair for pair in row.pairs}.get(name) for name in names]
        published = [_percent(p.published, "num theirs") if p else _GAP for p in pairs]
        if row.variant.method == "trust":
            published = [replace(c, mark=" ▼") if n in below else c for c, n in zip(published, names, strict=True)]
        ours = [_percent(p.ours) if p else _GAP for p in pairs]
        less = [_gain(p.difference) if p else _GAP for p in pairs]
        rows.append(Row(row.variant.name, (_words(PUBLISHED), *published), row.variant))
        rows += [_row(group, row.variant, (_words(w), *cells)) for w, cells in ((OURS, ours), ("difference", less))]
    columns = _columns("method", "", *(short_domain(name) for name in names), words=(1,))
    caption = "Domain by domain, in percent"
    if any(name in below for name in names):
        caption += "; ▼: the paper's TRUST is below the paper's source"
    return DataTable(f"paper {comparison.table.place} by domain", caption, columns, tuple(rows))


def entropy_table(records: Sequence[EntropyByOrder]) -> DataTable:
    """Mean prediction entropy of each scan order, a row per record."""
    orders, rows = sorted({order for record in records for order in record.orders}), []
    for record in records:
        known = {order: value for order, value in record.by_order.items() if math.isfinite(value)}
        chosen = sorted(known, key=lambda order: (known[order], order))[: record.k]
        cells = [
            TableCell(f"{known[order]:.3f}", known[order], best=order in chosen) if order in known else _GAP
            for order in orders
        ]
        rows.append(Row(safe_line(record.title), tuple(cells)))
    caption = "Mean prediction entropy of each scan order in nats; the chosen orders in bold"
    return DataTable("entropy by order", caption, _columns("data", *orders), tuple(rows))


_GAP = TableCell(MISSING, role="gap")


def _columns(*titles: str, words: Iterable[int] = ()) -> tuple[Column, ...]:
    """Columns of numbers, or of words where `words` has their index."""
    texts = set(words)
    return tuple(Column(title, "words" if j in texts else "") for j, title in enumerate(titles))


def _row(group: ResultGroup, variant: Variant, cells: Sequence[TableCell]) -> Row:
    return Row(variant.name, tuple(cells), variant, tuple(group.cells_of(variant.label)))


def _percent(value: float, role: str = "num") -> TableCell:
    return TableCell(format_percent(value), value, role=role)


def _gain(value: float | None, role: str = "num gain") -> TableCell:
    return TableCell(format_gain(value), value, role="gap gain" if value is None else role)


def _words(text: str) -> TableCell:
    return TableCell(text, role="words")


def _number(value: float | None, pattern: str, role: str = "num") -> TableCell:
    return _GAP if value is None else TableCell(pattern.format(value), value, role=role)


def _mark_best(rows: Sequence[Row], columns: Iterable[int], *, lowest: bool = False) -> tuple[Row, ...]:
    """Mark the best of each column as shown, if there are two or more to compare."""
    cells = [list(row.cells) for row in rows]
    for j in columns:
        known = [row[j] for row in cells if row[j].value is not None]
        if len(known) > 1:
            best = (min if lowest else max)(known, key=lambda cell: cell.value or 0.0).text
            for row in cells:
                row[j] = replace(row[j], best=row[j].value is not None and row[j].text == best)
    return tuple(replace(row, cells=tuple(marked)) for row, marked in zip(rows, cells, strict=True))


def _gaps(group: ResultGroup) -> Mapping[Place, list[str]]:
    """Why runs are missing: the messages of failed ones, and pending ones."""
    found: dict[Place, list[str]] = defaultdict(list)
    for failure in group.failures:
        why = f"seed {failure.key.seed} failed: {safe_line(failure.message)}"
        found[failure.label, failure.key.domain].append(why)
    for pending in group.pending:
        found[pending.label, pending.key.domain].append(f"seed {pending.key.seed} has not run yet")
    return found


def _domain_cell(group: ResultGroup, variant: Variant, domain: str, gaps: Mapping[Place, list[str]]) -> TableCell:
    place = (variant.label, domain)
    where, runs = f"{variant.name} on {domain_name(domain)}", tuple(group.at.get(place, []))
    entry, why = group.entry(*place), gaps.get(place, [])
    if entry.mean is None and any("failed" in reason for reason in why):
        return TableCell("failed", role="gap failed", tip=f"{where}: {'; '.join(why)}")
    if entry.mean is None and runs:
        return TableCell("NaN", role="gap failed", tip=f"{where} finished, but its accuracy is NaN", runs=runs)
    if entry.mean is None:
        return TableCell(
            MISSING, role="gap missing", tip=f"{where}: {'not run yet' if why else 'not part of this run'}"
        )
    lines = [f"{where}: {format_percent(entry.mean)}{_interval(entry)}"]
    for base in group.baselines:
        theirs = group.entry(base.label, domain).mean
        if theirs is not None and base.label != variant.label:
            lines.append(f"{format_gain(entry.mean - theirs)} over {base.name}")
    lines += [f"† {len(why)} more failed or missing"] if why else []
    text, mark = format_percent(entry.mean), "†" if why else ""
    return TableCell(text, entry.mean, _std(entry), tip="\n".join(lines), mark=mark, runs=runs)


def _summary_cells(group: ResultGroup, variant: Variant) -> list[TableCell]:
    """The mean over domains, and the worst of them."""
    entry = group.mean(variant.label)
    if entry.mean is None:
        return [TableCell(MISSING, role=f"gap {role}", tip=INCOMPLETE) for role in ("mean", "worst")]
    text = format_percent(entry.mean)
    tip = f"{variant.name}: {text}{_interval(entry)}, {group.scope}"
    means = {domain: group.entry(variant.label, domain).mean or 0.0 for domain in group.domains}
    domain = min(means, key=means.__getitem__)
    worst = replace(_percent(means[domain], "num worst"), tip=f"{variant.name} is worst on {domain_name(domain)}")
    return [TableCell(text, entry.mean, _std(entry), role="num mean", tip=tip), worst]


def _interval(entry: Aggregate) -> str:
    if entry.n < 2:
        return ", one seed"
    return f" ± {format_percent(entry.std)} (std), 95 % interval ± {format_percent(entry.half_width)}, {entry.n} seeds"


def _std(entry: Aggregate) -> str:
    return format_percent(entry.std) if entry.std is not None else ""
