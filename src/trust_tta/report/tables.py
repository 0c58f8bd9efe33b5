"""The tables of a report, each computed once for every rendering: page, terminal, CSV, Markdown and LaTeX."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from trust_tta.report.model import Group, Place, Variant
from trust_tta.report.paper import Comparison, SweepPair, published_times
from trust_tta.report.published import Published
from trust_tta.report.significance import Difference, Duel, difference, equal_time, equal_updates, ranking, seed_means
from trust_tta.report.text import counted, domain_name, safe_line, short_domain
from trust_tta.results import Aggregate, Cell, format_gain, format_percent, format_value
from trust_tta.results.display import MISSING

PUBLISHED = "published"
OURS = "this run"


@dataclass(frozen=True)
class Entry:
    """One place of a table: its text, the number to sort by, its spread over seeds, and the cells it comes from."""

    text: str
    value: float | None = None
    spread: str = ""
    best: bool = False
    role: str = "num"  # "num", "words" or "gap", and what it is of
    tip: str = ""  # what pointing at it says
    mark: str = ""  # a sign after the text
    cells: tuple[Cell, ...] = ()


@dataclass(frozen=True)
class Column:
    """The head of a column: its `role` ("mean", "worst", "gain", "words"), its domain, and the line gains are over."""

    title: str
    role: str = ""
    domain: int | None = None
    base: int | None = None


@dataclass(frozen=True)
class Line:
    """One row of a table; one that belongs to a variant carries its marker and follows the method picker."""

    head: str
    entries: tuple[Entry, ...]
    variant: Variant | None = None
    cells: tuple[Cell, ...] = ()  # that its entries come from, where they do not say so themselves


@dataclass(frozen=True)
class DataTable:
    """A table ready to be rendered; the first column holds the heads of the lines."""

    name: str
    caption: str
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]

    @property
    def spreads(self) -> bool:
        """Whether an entry has a spread over seeds."""
        return any(entry.spread for line in self.lines for entry in line.entries)


def accuracy_table(group: Group) -> DataTable:
    """Methods by domains: seeds gathered, the mean and the worst domain first, what failed or is missing marked."""
    several = len(group.domains) > 1
    gaps = _gaps(group)
    domains = [Column(short_domain(d), domain=i) for i, d in enumerate(group.domains)]
    gains = [Column(f"over {base.name}", "gain", base=base.index) for base in group.baselines]
    columns = [Column("mean", "mean"), Column("worst", "worst"), *gains, *domains] if several else [*domains, *gains]
    lines = []
    for variant in group.variants:
        entries = [_domain_entry(group, variant, domain, gaps) for domain in group.domains]
        over = [_gain_entry(group, variant, base) for base in group.baselines]
        whole = [_mean_entry(group, variant), _worst_entry(group, variant), *over, *entries]
        lines.append(_line(group, variant, whole if several else [*entries, *over]))
    best = [j for j, column in enumerate(columns) if column.role != "gain"]
    what = "Mean IoU" if group.is_segmentation else "Accuracy"
    fewest = min((len(seed_means(group, v.label)) for v in group.variants if group.cells_of(v.label)), default=0)
    most = counted(len(group.seeds), "seed")
    seeds = most if fewest in (0, len(group.seeds)) else f"{fewest} to {most}"
    caption = f"{what} in percent{', gains in points' if gains else ''}; {seeds}; the best as shown in bold"
    return DataTable(f"accuracy {group.title}", caption, (Column("method"), *columns), _mark_best(lines, best))


def notes(group: Group) -> list[str]:
    """What a reader of a plain table must know: unit, number of seeds, and what is missing."""
    pivot = group.table()
    counts = sorted({entry.n for line in pivot.cells for entry in line if entry.n})
    seeds = "no results" if not counts else f"mean over {counted(counts[0], 'seed')}"
    if len(counts) > 1:
        seeds = f"mean over {counts[0]} to {counts[-1]} seeds"
    missing = [
        f"{variant.name} on {safe_line(domain)}"
        for variant in group.variants
        for domain in group.domains
        if group.entry(variant.label, domain).mean is None
    ]
    what = "mean IoU" if group.is_segmentation else "accuracy"
    return [f"{what} in percent, {seeds}", *([f"missing: {', '.join(missing)}"] if missing else [])]


def cost_table(group: Group, published: Published) -> DataTable | None:
    """Accuracy, passes, updates and time of each line; the time also relative to Tent, next to the paper's."""
    if not group.costs:
        return None
    tent = group.variant("tent")
    base = next((c.milliseconds for c in group.costs if tent is not None and c.variant.label == tent.label), None)
    theirs = published_times(group, published) if base else {}
    heads = ["accuracy in %", "updates per batch", "forwards", "backwards", "ms per image"]
    heads += ["time, Tent = 1"] if base else []
    heads += ["published (Table 10)"] if theirs else []
    lines = []
    for c in group.costs:
        ms = c.milliseconds
        entries = [
            replace(_percent(c.accuracy), spread=_spread(group.mean(c.variant.label))),
            *(Entry(f"{number:.4g}", number) for number in (c.updates, c.forwards, c.backwards)),
            _number(ms, "{:.1f}" if (ms or 0.0) >= 10 else "{:.2f}"),
        ]
        entries += [_number(ms / base if ms is not None else None, "{:.2f}")] if base else []
        entries += [_number(theirs.get(c.variant.label), "{:.1f}", "num theirs")] if theirs else []
        lines.append(_line(group, c.variant, entries))
    caption = f"Cost of each method, {group.scope} and seeds; forwards and backwards are passes per batch"
    return DataTable(f"cost {group.title}", caption, _columns("method", *heads), tuple(lines))


def duel_table(group: Group) -> DataTable | None:
    """TRUST at equal updates and at equal time and the best other method there, in numbers."""
    duels = [(f"{counted(d.trust.updates, 'update')} per batch", d) for d in equal_updates(group)]
    duels += [(f"at most {d.trust.milliseconds:.3g} ms per image", d) for d in equal_time(group)]
    if not duels:
        return None
    lines = []
    for at, duel in duels:
        entries = (
            _words(at),
            _percent(duel.trust.accuracy),
            _words(duel.other.variant.name),
            _percent(duel.other.accuracy),
            _gain(duel.difference.gain),
            _words(ahead(duel)),
        )
        cells = [cell for cost in (duel.trust, duel.other) for cell in group.cells_of(cost.variant.label)]
        lines.append(Line(duel.trust.variant.name, entries, duel.trust.variant, tuple(cells)))
    heads = ("at", "accuracy in %", "best other there", "its accuracy in %", "gain in points", "ahead")
    caption = "TRUST and the best other method at equal cost"
    return DataTable(f"equal cost {group.title}", caption, _columns("TRUST", *heads, words=(1, 3, 6)), tuple(lines))


def ahead(duel: Duel) -> str:
    """Who is ahead, as far as the runs tell."""
    if duel.difference.tie:
        return "a tie"
    return (duel.trust if duel.difference.gain > 0 else duel.other).variant.name


def difference_table(group: Group) -> DataTable | None:
    """The best line less each other: over seeds, and over the images that only one of the two has right."""
    if len(group.means()) < 2:
        return None
    best, *others = ranking(group)
    found = [difference(group, best, other) for other in others]
    tested = any(d.images is not None for d in found)
    heads = [f"{best.name} ahead by", "± over seeds", "seeds"]
    heads += [f"only {best.name} right", "only this right", "p"] if tested else []
    lines = [_line(group, d.second, _evidence(d, tested)) for d in found]
    caption = f"{best.name}, the best {group.scope}, against each other method, in points"
    columns = (*_columns("method", *heads), Column("told apart", "words"))
    return DataTable(f"comparison {group.title}", caption, columns, tuple(lines))


def calibration_table(group: Group) -> DataTable | None:
    """ECE, NLL, Brier score and entropy: each the mean over domains and seeds of what the runs recorded."""
    values = ("ece", "nll", "brier", "entropy")
    lines = []
    for variant in group.variants:
        means = [(value, group.mean(variant.label, value).mean) for value in values]
        if any(mean is not None for _, mean in means):
            entries = [Entry(format_value(v, x), x, role="gap" if x is None else "num") for v, x in means]
            lines.append(_line(group, variant, entries))
    if not lines:
        return None
    heads = ("ECE in %", "NLL in nats", "Brier score (0 to 2)", "entropy in nats")
    caption = f"Calibration, {group.scope} and seeds; lower is better, except for the entropy"
    marked = _mark_best(lines, range(3), lowest=True)
    return DataTable(f"calibration {group.title}", caption, _columns("method", *heads), marked)


def paper_table(group: Group, comparison: Comparison) -> DataTable:
    """A published table and this run: means over the domains that both have, and gains over batch statistics."""
    item, widest = comparison.item, max(len(row.pairs) for row in comparison.rows)
    whole = [row for row in comparison.rows if len(row.pairs) == widest]  # means over fewer domains compare with none
    base = next((row.mean for row in whole if row.variant.method == "bn"), None)
    lines = []
    for row in comparison.rows:
        mean = row.mean
        numbers = [_percent(mean.published, "num theirs"), _percent(mean.ours), _gain(mean.difference)]
        if base is not None:
            numbers += [_gain(mean.published - base.published, "num theirs"), _gain(mean.ours - base.ours)]
        gap = Entry(MISSING, role="gap", tip="not every domain is there")
        entries = [_words(row.label), *(numbers if row in whole else [gap] * len(numbers))]
        lines.append(_line(group, row.variant, entries))
    heads = ["paper's name", f"{PUBLISHED} mean", f"{OURS} mean", "difference"]
    heads += [f"{PUBLISHED} gain", f"{OURS} gain"] if base is not None else []
    about = f"{item.place}, {item.dataset or 'data sets'}: {item.about}, in percent; this run: {group.title}."
    about += f" Means are over the {widest} domains that both have." if comparison.left_out else ""
    about += f" {item.note[0].upper()}{item.note[1:]}." if item.note else ""
    return DataTable(f"paper {item.place}", about, _columns("method", *heads, words=(1,)), tuple(lines))


def paper_domains_table(group: Group, comparison: Comparison) -> DataTable:
    """A published table and this run, domain by domain."""
    names = [pair.name for pair in max(comparison.rows, key=lambda row: len(row.pairs)).pairs]
    below = comparison.item.below_source()
    lines = []
    for row in comparison.rows:
        pairs = [{pair.name: pair for pair in row.pairs}.get(name) for name in names]
        published = [_percent(p.published, "num theirs") if p else _GAP for p in pairs]
        if row.variant.method == "trust":
            published = [replace(e, mark=" ▼") if n in below else e for e, n in zip(published, names, strict=True)]
        ours = [_percent(p.ours) if p else _GAP for p in pairs]
        less = [_gain(p.difference) if p else _GAP for p in pairs]
        lines.append(Line(row.variant.name, (_words(PUBLISHED), *published), row.variant))
        lines += [_line(group, row.variant, (_words(w), *e)) for w, e in ((OURS, ours), ("difference", less))]
    columns = _columns("method", "", *(short_domain(name) for name in names), words=(1,))
    caption = "Domain by domain, in percent"
    if any(name in below for name in names):
        caption += "; ▼: the paper's TRUST is below the paper's source"
    return DataTable(f"paper {comparison.item.place} by domain", caption, columns, tuple(lines))


def paper_sweep_table(pair: SweepPair) -> DataTable:
    """A published curve over an option and ours."""
    lines = [
        Line(p.name, (_percent(p.published, "num theirs"), _percent(p.ours), _gain(p.difference))) for p in pair.pairs
    ]
    option = pair.item.columns.replace("_", " ")
    domains = "one domain" if pair.domains == 1 else f"mean of {pair.domains} domains"
    who = f"{pair.method} by {option}, in percent; this run: {safe_line(pair.dataset)}, {domains}"
    note = f"; {pair.item.note}" if pair.item.note else ""
    caption = f"{pair.item.place}, {pair.item.about}: {who}{note}"
    columns = _columns(option, PUBLISHED, OURS, "difference")
    return DataTable(f"paper {pair.item.place} {safe_line(pair.dataset)}", caption, columns, tuple(lines))


_GAP = Entry(MISSING, role="gap")


def _columns(*titles: str, words: Iterable[int] = ()) -> tuple[Column, ...]:
    texts = set(words)
    return tuple(Column(title, "words" if j in texts else "") for j, title in enumerate(titles))


def _line(group: Group, variant: Variant, entries: Sequence[Entry]) -> Line:
    return Line(variant.name, tuple(entries), variant, tuple(group.cells_of(variant.label)))


def _percent(value: float, role: str = "num") -> Entry:
    return Entry(format_percent(value), value, role=role)


def _gain(value: float, role: str = "num gain") -> Entry:
    return Entry(format_gain(value), value, role=role)


def _words(text: str) -> Entry:
    return Entry(text, role="words")


def _number(value: float | None, pattern: str, role: str = "num") -> Entry:
    return _GAP if value is None else Entry(pattern.format(value), value, role=role)


def _evidence(d: Difference, tested: bool) -> list[Entry]:
    half, images = d.seeds.half_width, d.images
    entries = [_gain(d.gain), _GAP if half is None else _percent(half), Entry(str(d.seeds.n), d.seeds.n)]
    if tested:
        counts = [images.first_only, images.second_only] if images else []
        entries += [Entry(str(n), n) for n in counts] or [_GAP, _GAP]
        entries.append(_number(images.p if images else None, "{:.2g}"))
    return [*entries, _words({None: "unknown", True: "yes", False: "no"}[False if d.level else d.told])]


def _mark_best(lines: Sequence[Line], columns: Iterable[int], *, lowest: bool = False) -> tuple[Line, ...]:
    """Mark in each of the columns what is best as shown, where there is more than one to compare."""
    entries = [list(line.entries) for line in lines]
    for j in columns:
        known = [row[j] for row in entries if row[j].value is not None]
        if len(known) > 1:
            best = (min if lowest else max)(known, key=lambda entry: entry.value or 0.0).text
            for row in entries:
                row[j] = replace(row[j], best=row[j].value is not None and row[j].text == best)
    return tuple(replace(line, entries=tuple(row)) for line, row in zip(lines, entries, strict=True))


def _gaps(group: Group) -> Mapping[Place, list[str]]:
    """Why cells are missing, by place: the messages of those that failed, and those still to be run."""
    found: dict[Place, list[str]] = defaultdict(list)
    for failure in group.failures:
        said = f"seed {failure.key.seed} failed: {safe_line(failure.message)}"
        found[failure.label, failure.key.domain].append(said)
    for planned in group.absent:
        found[planned.label, planned.key.domain].append(f"seed {planned.key.seed} is still to be run")
    return found


def _domain_entry(group: Group, variant: Variant, domain: str, gaps: Mapping[Place, list[str]]) -> Entry:
    place = (variant.label, domain)
    where, cells = f"{variant.name} on {domain_name(domain)}", tuple(group.at.get(place, []))
    entry, why = group.entry(*place), gaps.get(place, [])
    if entry.mean is None and any("failed" in reason for reason in why):
        return Entry("failed", role="gap failed", tip=f"{where}: {'; '.join(why)}")
    if entry.mean is None and cells:
        return Entry("NaN", role="gap failed", tip=f"{where} finished, but its accuracy is not a number", cells=cells)
    if entry.mean is None:
        tip = f"{where}: {'still to be run' if why else 'not part of this run'}"
        return Entry(MISSING, role="gap missing", tip=tip)
    said = [f"{where}: {format_percent(entry.mean)}{_around(entry)}"]
    for base in group.baselines:
        theirs = group.entry(base.label, domain).mean
        if theirs is not None and base.label != variant.label:
            said.append(f"{format_gain(entry.mean - theirs)} over {base.name}")
    said += [f"† {len(why)} more failed or missing"] if why else []
    text, mark = format_percent(entry.mean), "†" if why else ""
    return Entry(text, entry.mean, _spread(entry), tip="\n".join(said), mark=mark, cells=cells)


def _mean_entry(group: Group, variant: Variant) -> Entry:
    entry = group.mean(variant.label)
    if entry.mean is None:
        return Entry(MISSING, role="gap mean", tip="not every domain is there")
    text = format_percent(entry.mean)
    tip = f"{variant.name}: {text}{_around(entry)}, {group.scope}"
    return Entry(text, entry.mean, _spread(entry), role="num mean", tip=tip)


def _worst_entry(group: Group, variant: Variant) -> Entry:
    found = [(group.entry(variant.label, domain).mean, domain) for domain in group.domains]
    known = [(mean, domain) for mean, domain in found if mean is not None]
    if len(known) < len(found):
        return Entry(MISSING, role="gap worst", tip="not every domain is there")
    value, domain = min(known, key=lambda pair: pair[0])
    tip = f"{variant.name} is worst on {domain_name(domain)}"
    return Entry(format_percent(value), value, role="num worst", tip=tip)


def _gain_entry(group: Group, variant: Variant, base: Variant) -> Entry:
    mine, theirs = group.mean(variant.label).mean, group.mean(base.label).mean
    gain = None if mine is None or theirs is None else mine - theirs
    return Entry(format_gain(gain), gain, role="gap gain" if gain is None else "num gain")


def _around(entry: Aggregate) -> str:
    if entry.n < 2:
        return ", one seed"
    return f" ± {format_percent(entry.std)} (std), 95 % interval ± {format_percent(entry.half_width)}, {entry.n} seeds"


def _spread(entry: Aggregate) -> str:
    return format_percent(entry.std) if entry.std is not None else ""
