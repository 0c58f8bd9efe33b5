"""Write docs/results/choose.md, from which a practitioner can choose a method: python -m benchmarks.choose_page

Reads runs/streams.sqlite, and where they are there runs/rates.sqlite, runs/fair.sqlite and method_costs_h200.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.results_tables import (
    RESULTS,
    clean_afterwards,
    fair_table,
    first_and_last,
    mean,
    passes_per_batch,
    seed_means,
)

from trust_tta.atomic import write_whole
from trust_tta.report.formats import plain_table, to_markdown
from trust_tta.report.model import ResultGroup, read_report
from trust_tta.results import format_gain, format_percent

NAME = "choose.md"
COSTS = RESULTS / "method_costs_h200.json"
TIMED_AS = {"trust, mirrored views": "trust+mirror"}  # labels whose name in the record of costs differs
SMALL = ("gaussian_noise", "glass_blur", "jpeg_compression")  # the corruptions that small batches are shown on
FULL = 3  # seeds
DEFAULTS = ("bn", "tide")  # compared, as they are, with baselines at their best rates

# A stream's data set, setting and batch size, and how a reader would call it.
STREAMS = {
    ("cifar10-c", "online", 128): "15 corruptions, batches of 128, reset at each",
    ("cifar10-c", "continual", 128): "the same, never reset",
    ("cifar10-c", "continual", 32): "256 images of each, batches of 32, never reset",
    ("cifar10-c", "gradual", 50): "each corruption comes and goes, batches of 50",
    ("cifar10-c", "sequence", 64): "100 short domains in a row, never reset",
    ("cifar10-c", "mixed", 128): "all 15 mixed in every batch",
    ("cifar10-c", "online+correlated", 128): "labels in long runs of one class",
    ("cifar10-c", "online", 64): "batches of 64 (three corruptions)",
    ("cifar10-c", "online", 16): "batches of 16 (three corruptions)",
    ("cifar10-c", "online", 4): "batches of 4 (three corruptions)",
    ("cifar10-c", "online", 1): "single images (three corruptions)",
    ("array", "online", 128): "clean images",
    ("pacs", "online", 128): "PACS, networks trained on the other three domains",
}
Streams = Mapping[str, ResultGroup]
Measure = Callable[[ResultGroup, str], float | None]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs"), metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER")
    arguments = parser.parse_args(argv)
    write_whole(arguments.out / NAME, page(arguments.runs))


def page(runs: Path) -> str:
    streams = read_streams(runs / "streams.sqlite")
    methods = labels_of(streams)
    rates = read_streams(runs / "rates.sqlite") if (runs / "rates.sqlite").exists() else {}
    tables = (
        (f"Accuracy\n{ACCURACY} {seeds_note(streams, methods)}", by_stream(streams, methods, accuracy, mark=True)),
        ("The worst domain of each stream\nAccuracy in percent.", by_stream(streams, methods, worst)),
        (f"Calibration\n{CALIBRATION}", by_stream(streams, methods, calibration, best=min)),
        (f"Clean images afterwards\n{AFTERWARDS}", by_stream(streams, methods, clean_afterwards)),
        (f"Batch size\nAccuracy in percent on {', '.join(SMALL)}.", batch_sizes(streams, methods)),
    )
    sections = [
        HEAD.format(streams=len(streams), methods=len(methods)),
        f"## In short\n{advice(streams, methods)}{tuned_advice(rates, streams)}",
        f"{SHORT}\n\n{summary(streams, methods)}",
        *(f"## {head}\n\n{table}" for head, table in tables),
        *long_row(streams),
        *best_rates(rates, streams),
        *fair_rates(runs / "fair.sqlite"),
        FOOT + (COSTS_LINK if COSTS.exists() else "") + ".",
    ]
    return "\n\n".join(section.strip() for section in sections) + "\n"


def read_streams(store: Path) -> dict[str, ResultGroup]:
    """The groups of a store that are among STREAMS, in their order, by what a reader would call them."""
    found = {(g.dataset, g.setting, g.batch_size): g for g in read_report(store).groups}
    return {words: found[key] for key, words in STREAMS.items() if key in found}


def accuracy(group: ResultGroup, label: str) -> float | None:
    """The mean over domains and seeds; None where no seed met every domain."""
    return _mean(seed_means(group, label).values())


def worst(group: ResultGroup, label: str) -> float | None:
    if len(group.domains) < 2 or accuracy(group, label) is None:
        return None
    found = [[c.result.accuracy for c in group.at[label, d]] for d in group.domains if (label, d) in group.at]
    return min(map(mean, found))


def calibration(group: ResultGroup, label: str) -> float | None:
    return _mean(cell.result.ece for cell in group.cells_of(label))


def by_stream(
    streams: Streams,
    methods: Sequence[str],
    measure: Measure,
    *,
    best: Callable[[Sequence[float]], float] = max,
    mark: bool = False,
) -> str:
    """A line for each stream that has the measure; `mark`: a dagger where seeds are missing."""
    lines = []
    for words, group in streams.items():
        found = {m: value for m in methods if (value := measure(group, m)) is not None}
        if found:
            first = best(list(found.values())) if len(found) > 1 else None
            lines.append([words, *(_shown(found.get(m), first) + _dagger(group, m, mark) for m in methods)])
    return to_markdown(plain_table(["", *methods], lines))


def _shown(value: float | None, first: float | None = None) -> str:
    text = format_percent(value)
    return f"**{text}**" if value is not None and first is not None and text == format_percent(first) else text


def _dagger(group: ResultGroup, label: str, mark: bool) -> str:
    return "†" if mark and 0 < len(seed_means(group, label)) < FULL else ""


def seeds_note(streams: Streams, methods: Sequence[str]) -> str:
    fewer = sum(bool(_dagger(group, m, True)) for group in streams.values() for m in methods)
    return f"Means over {FULL} seeds; † fewer." if fewer else f"Means over {FULL} seeds."


def summary(streams: Streams, methods: Sequence[str]) -> str:
    """A line for each method, the best mean first."""
    ms = _milliseconds()
    heads = [
        "", f"mean of {len(streams)} streams", "best in", "least over source", "where", "worst domain",
        "calibration error", "clean afterwards, at worst", "passes per batch", *(["ms per batch"] if ms else []),
    ]  # fmt: skip
    lines, usual = [], streams[next(iter(streams))]
    for method in sorted(methods, key=lambda m: -(_over(streams, m, accuracy) or 0.0)):
        gains = _gains(streams, method)
        where = min(gains, key=lambda words: gains[words]) if gains and method != "source" else None
        wins = sum(_is_best(group, method, methods) for group in streams.values())
        lows = [value for group in streams.values() if (value := worst(group, method)) is not None]
        after = [value for group in streams.values() if (value := clean_afterwards(group, method)) is not None]
        lines.append(
            [
                method,
                format_percent(_over(streams, method, accuracy)),
                str(wins),
                format_gain(gains[where]) if where else "–",
                where or "–",
                format_percent(min(lows, default=None)),
                format_percent(_over(streams, method, calibration)),
                format_percent(min(after, default=None)),
                f"{passes_per_batch(usual, method):.3g}",
                *([ms.get(TIMED_AS.get(method, method), "–")] if ms else []),
            ]
        )
    return to_markdown(plain_table(heads, lines))


def _over(streams: Streams, method: str, measure: Measure) -> float | None:
    """The mean over all streams; None where one is missing."""
    found = [measure(group, method) for group in streams.values()]
    return _mean(value for value in found if value is not None) if None not in found else None


def _gains(streams: Streams, method: str) -> dict[str, float]:
    """Points over the untouched network, by stream."""
    both = {words: (accuracy(group, method), accuracy(group, "source")) for words, group in streams.items()}
    return {words: ours - base for words, (ours, base) in both.items() if ours is not None and base is not None}


def _is_best(group: ResultGroup, method: str, methods: Sequence[str]) -> bool:
    found = {m: format_percent(value) for m in methods if (value := accuracy(group, m)) is not None}
    return method in found and found[method] == max(found.values(), key=float)


def _milliseconds() -> dict[str, str]:
    """Milliseconds per batch by method, of the record of costs."""
    if not COSTS.exists():
        return {}
    rows = json.loads(COSTS.read_text(encoding="utf-8"))["rows"]
    return {row["method"]: f"{row['ms']:.0f}" for row in rows if not row["failed"]}


def advice(streams: Streams, methods: Sequence[str]) -> str:
    """Which method to take, as far as the numbers say it."""
    means = {m: value for m in methods if (value := _over(streams, m, accuracy)) is not None}
    first, second = sorted(means, key=lambda m: -means[m])[:2]
    least = {m: min(_gains(streams, m).values()) for m in means if m != "source"}
    behind = [
        f"{words} ({_first(group, methods)} {format_percent(accuracy(group, _first(group, methods)))}, "
        f"{first} {format_percent(accuracy(group, first))})"
        for words, group in streams.items()
        if not _is_best(group, first, methods)
    ]
    usual = streams[next(iter(streams))]
    quick = max((m for m in means if passes_per_batch(usual, m) <= 1.0), key=lambda m: means[m])
    safe = [m for m, gain in least.items() if gain >= -0.01]
    lines = [
        f"You do not know the stream: `{first}`, {format_percent(means[first])} on average, "
        f"{format_percent(means[first] - means[second])} points ahead of `{second}`. "
        + (f"It is not first in: {'; '.join(behind)}." if behind else "It is first in every stream."),
        f"One forward pass is all you can afford: `{quick}`, {format_percent(means[quick])} on average.",
        "Never more than a point below the untouched network: "
        + (", ".join(f"`{m}` (least: {format_gain(least[m])})" for m in safe) or "none of these")
        + f". The others lose up to {format_percent(-min(least.values()))} points in some stream (the table says it).",
    ]
    return "\n".join(f"- {line}" for line in lines)


def _first(group: ResultGroup, methods: Sequence[str]) -> str:
    return max(methods, key=lambda m: accuracy(group, m) or 0.0)


def batch_sizes(streams: Streams, methods: Sequence[str]) -> str:
    """The same three corruptions at each batch size that resets at each domain."""
    lines = []
    for group in sorted(streams.values(), key=lambda g: g.batch_size):
        if group.setting == "online" and group.dataset == "cifar10-c":
            found = {m: _mean(seed_means(group, m, domains=SMALL).values()) for m in methods}
            first = max(value for value in found.values() if value is not None)
            lines.append([f"{group.batch_size}", *(_shown(found[m], first) for m in methods)])
    return to_markdown(plain_table(["", *methods], lines))


def long_row(streams: Streams) -> list[str]:
    group = next((g for g in streams.values() if g.setting == "sequence"), None)
    if group is None:
        return []
    said = "Corruptions and severities drawn at random, other ones for each seed; nothing is ever reset."
    return [f"## A hundred domains in a row\n{said}\n\n{first_and_last(group)}"]


def labels_of(streams: Streams) -> list[str]:
    return list(dict.fromkeys(variant.label for group in streams.values() for variant in group.variants))


def at_best_rates(rates: Streams, streams: Streams) -> dict[str, dict[str, float | None]]:
    """Accuracy by stream and method, with `bn` and `tide` as they are on the same images."""
    found: dict[str, dict[str, float | None]] = {}
    for words, group in rates.items():
        found[words] = {m: accuracy(group, m) for m in labels_of(rates)}
        for m in DEFAULTS:
            known = seed_means(streams[words], m)
            found[words][m] = _mean(known[seed] for seed in group.seeds if seed in known)
    return found


def costs_at_best_rates(rates: Streams, streams: Streams) -> dict[str, float]:
    """Passes per batch of the same methods."""
    tuned, usual = rates[next(iter(rates))], streams[next(iter(streams))]
    return {m: passes_per_batch(tuned, m) for m in labels_of(rates)} | {m: passes_per_batch(usual, m) for m in DEFAULTS}


def tuned_advice(rates: Streams, streams: Streams) -> str:
    """Who beats `tide` with a rate of its own, and at what cost."""
    if not rates:
        return ""
    table, costs = at_best_rates(rates, streams), costs_at_best_rates(rates, streams)
    ahead: dict[str, list[str]] = {}
    for words, found in table.items():
        for m in labels_of(rates):
            if (found[m] or 0.0) > (found["tide"] or 0.0):
                ahead.setdefault(m, []).append(
                    f"{words}, {format_percent(found[m])} to {format_percent(found['tide'])}"
                )
    said = [f"`{m}` at {costs[m]:.3g} passes per batch ({'; '.join(where)})" for m, where in ahead.items()]
    who = "; ".join(said) or "no baseline"
    return f"\n- Ahead of `tide` with [a rate of its own](#the-baselines-at-their-best-rates): {who}."


def best_rates(rates: Streams, streams: Streams) -> list[str]:
    """The baselines at the rates that are best for them in the first stream."""
    if not rates:
        return []
    lines = []
    for words, found in at_best_rates(rates, streams).items():
        first = max(value for value in found.values() if value is not None)
        lines.append([words, *(_shown(value, first) for value in found.values())])
    lines.append(["passes per batch", *(f"{cost:.3g}" for cost in costs_at_best_rates(rates, streams).values())])
    said = (
        "The tables above have every method with its defaults, at the rate of the TRUST paper. Here are the rates "
        "that are best for each baseline in the first stream, chosen on "
        "[corruptions that are not reported](tables/fair.md); "
        "one seed; `bn` and `tide` with their defaults on the same images. Accuracy in percent."
    )
    table = to_markdown(plain_table(["", *labels_of(rates), *DEFAULTS], lines))
    return [f"## The baselines at their best rates\n{said}\n\n{table}"]


def fair_rates(store: Path) -> list[str]:
    """What each baseline gains from a rate of its own."""
    if not store.exists():
        return []
    group = max(read_report(store).groups, key=lambda g: len(g.cells))
    return [f"## What a rate of their own is worth\n{fair_table(group)}"]


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return mean(found) if found else None


HEAD = """# Which method for which stream

{methods} methods in {streams} kinds of stream: the shipped `vmamba_nano` on CIFAR-10-C as `trust-tta corrupt` makes it
([not the published images](README.md#corrupted-images)) at severity 5 (where corruptions come and go, and in the row of
100 domains: 1 to 5), 1,000 images of each corruption, 100 to 256 of each short domain, 256 to 1,600 in small batches;
clean images; and PACS. Every method has one set of options for all streams, its
defaults. Written by `python -m benchmarks.choose_page` from the stores of `trust-tta bench` on `streams.toml`,
`rates.toml` and `fair.toml` in `configs/results`; nothing here is typed. The runs
are of an earlier version of `tide`; [worlds](worlds.md) are of this one."""

ACCURACY = "In percent; the best of each stream is bold."
CALIBRATION = "Expected calibration error in percent: how far confidence is from accuracy; less is better."
AFTERWARDS = """Accuracy in percent on clean images once the stream is over, or after each domain where it resets;
`source` is the untouched network."""

SHORT = """Accuracies and calibration error in percent. Least over source: the smallest gain over the untouched network
in any stream, in points. Worst domain: of all streams. Passes per batch: in the first stream, backward ones twice; ms
per batch of 128 on VMamba-T at 224 pixels in bf16, alone on an H200."""

FOOT = """## More
[Every domain of every stream](tables/streams.md), [all 10,000 images](tables/targets.md),
[`tide` part by part](tables/tide_parts.md),
[what six orders buy](tables/orders.md), [segmentation](tables/camvid_c_online.md),
[another network](tables/cifar10c_groupmamba_online.md)"""
COSTS_LINK = ", [what a batch costs](tables/method_costs.md)"


if __name__ == "__main__":
    main()
