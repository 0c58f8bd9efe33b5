"""The page beside the paper: published numbers and this run's in columns of their own, and the difference."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from trust_tta.report import markup, series
from trust_tta.report.charts import Look
from trust_tta.report.compare import ComparedRow, Comparison, SweepPair, compare, compare_sweeps
from trust_tta.report.groups import Group
from trust_tta.report.markup import Entry, Line, Runs
from trust_tta.report.palette import display_name, domain_name
from trust_tta.report.published import Published
from trust_tta.report.tables import SHORT_LABELS
from trust_tta.results import format_gain, format_percent

PUBLISHED = "published"
OURS = "this run"
_GAP = Entry("–", None, "not every domain is there", "gap")


def comparisons(group: Group, published: Published, runs: Runs) -> str:
    """Every published table that this group has a counterpart of."""
    found = compare(group, published)
    parts = [_comparison(group, comparison, runs) for comparison in found]
    note = (
        f"“{PUBLISHED}” is what the paper prints, for {published.network} on its own data; “{OURS}” is the network and "
        "data of this report. They are different experiments: compare the gains rather than the levels."
    )
    return markup.section("Beside the paper", *parts, _sources(published) if parts else "", note=note)


def sweep_comparisons(groups: Sequence[Group], published: Published) -> str:
    """Published curves over an option beside ours."""
    parts = [_sweep(pair) for pair in compare_sweeps(groups, published)]
    return markup.section("Curves beside the paper", f'<div class="grid free">{"".join(parts)}</div>' if parts else "")


def _comparison(group: Group, comparison: Comparison, runs: Runs) -> str:
    item, look = comparison.item, series.looks(group)
    widest = max(len(row.pairs) for row in comparison.rows)
    whole = [row for row in comparison.rows if len(row.pairs) == widest]  # means over fewer domains compare with none
    theirs = next((row.mean for row in whole if row.row.method == "bn"), None)
    lines = []
    for row in comparison.rows:
        entries = [Entry(row.label, None, "", "words"), *(_numbers(row) if row in whole else [_GAP] * 3)]
        if theirs is not None and row not in whole:
            entries += [_GAP] * 2
        elif theirs is not None:
            gains = row.mean.published - theirs.published, row.mean.ours - theirs.ours
            entries += [_gain(gains[0], "theirs"), _gain(gains[1], "ours")]
        lines.append(Line(row.row.label, tuple(entries), look[row.row.label], runs.get(row.row.label, ())))
    header = ["method", "paper's name", f"{PUBLISHED} mean", f"{OURS} mean", "difference"]
    header += [f"{PUBLISHED} gain", f"{OURS} gain"] if theirs is not None else []
    about = f"{item.place}, {item.dataset or 'data sets'}: {item.about}, in percent; this run: {group.title}."
    if comparison.left_out:
        about += f" Means are over the {widest} domains that both have."
    table = markup.data_table(f"beside {item.place}", about, header, lines)
    details = _by_domain(comparison, look, runs) if item.columns == "domain" else ""
    return f'<div class="beside">{table}{details}</div>'


def _by_domain(comparison: Comparison, look: dict[str, Look], runs: Runs) -> str:
    names = [pair.name for pair in max(comparison.rows, key=lambda row: len(row.pairs)).pairs]
    lines = []
    for row in comparison.rows:
        pairs = {pair.name: pair for pair in row.pairs}
        its_look = look[row.row.label]
        for what in (PUBLISHED, OURS, "difference"):
            entries = [Entry(what, None, "", "words")]
            for name in names:
                pair = pairs.get(name)
                if pair is None:
                    entries.append(Entry("–", None, "", "gap"))
                elif what == "difference":
                    entries.append(_gain(pair.difference, "gain"))
                else:
                    value = pair.published if what == PUBLISHED else pair.ours
                    entries.append(
                        Entry(format_percent(value), value, "", "num theirs" if what == PUBLISHED else "num ours")
                    )
            its_runs = () if what == PUBLISHED else runs.get(row.row.label, ())
            lines.append(Line(row.row.label, tuple(entries), its_look, its_runs))
    header = ["method", "", *(SHORT_LABELS.get(name, domain_name(name)) for name in names)]
    table = markup.data_table(
        f"beside {comparison.item.place} by domain", "Domain by domain, in percent", header, lines
    )
    return f"<details><summary>domain by domain</summary>{table}</details>"


def _sweep(pair: SweepPair) -> str:
    lines = [
        Line(
            p.name,
            (
                Entry(format_percent(p.published), p.published, "", "num theirs"),
                Entry(format_percent(p.ours), p.ours, "", "num ours"),
                _gain(p.difference, "gain"),
            ),
        )
        for p in pair.pairs
    ]
    option = pair.option.replace("_", " ")
    domains = "one domain" if pair.domains == 1 else f"mean of {pair.domains} domains"
    who = f"{display_name(pair.method)} by {option}, in percent"
    caption = f"{pair.item.place}, {pair.item.about}: {who}; this run: {pair.dataset}, {domains}"
    header = [option, PUBLISHED, OURS, "difference"]
    return markup.data_table(f"beside {pair.item.place} {pair.dataset}", caption, header, lines)


def _numbers(row: ComparedRow) -> list[Entry]:
    mean = row.mean
    return [
        Entry(format_percent(mean.published), mean.published, "", "num theirs"),
        Entry(format_percent(mean.ours), mean.ours, "", "num ours"),
        _gain(mean.difference, "gain"),
    ]


def _gain(value: float, role: str) -> Entry:
    return Entry(format_gain(value), value, "", f"num {role}")


def _sources(published: Published) -> str:
    """Where the published numbers come from."""
    return f'<p class="note">Published numbers: {escape(published.paper)}.</p>'
