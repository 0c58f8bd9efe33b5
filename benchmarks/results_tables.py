"""Write the pages and the CSV of a results configuration from its store.

python benchmarks/results_tables.py configs/camvid_c.toml runs/camvid_c.sqlite
writes docs/results/camvid_c.csv and a page for each setting, as tables/camvid_c_online.md.
With --together there is one page of all settings, which begins with an overview; with --fair, one that chooses the best
setting of each method on the corruptions that are not reported, from labels "METHOD: SETTING".
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from trust_tta.atomic import replacing
from trust_tta.report.formats import plain_table, to_markdown
from trust_tta.report.model import PendingCell, Report, ResultGroup, read_report
from trust_tta.report.summary import summarize
from trust_tta.report.tables import (
    accuracy_table,
    calibration_table,
    cost_table,
    difference_table,
    equal_cost_table,
    notes,
)
from trust_tta.report.text import counted
from trust_tta.results import Cell, Failure, format_gain, format_percent
from trust_tta.results.display import HELD_OUT
from trust_tta.results.export import csv_text, flat_row

RESULTS = Path(__file__).parents[1] / "docs" / "results"
WIDE, END = 30, 20  # domains that are too many for a table, and those of its beginning and end
TRUST, SIX_STEPS = "trust", "trust_naive, 6 steps"
COLUMNS = (
    "dataset", "setting", "label", "method", "domain", "severity", "seed", "batch_size", "limit", "samples",
    "accuracy_before", "accuracy", "clean_accuracy", "nll", "ece", "brier", "entropy", "updates", "skipped_updates",
    "forwards", "backwards", "seconds_median", "seconds_total",
)  # fmt: skip
TITLES = {
    "streams": "Thirteen methods in every kind of stream",
    "targets": "tide on all images",
    "orders": "What six orders buy",
    "tide_parts": "tide part by part",
    "fair": "Baselines in settings of their own",
    "rates": "The baselines at their best rates",
}
MAKING = {
    "cifar10-c": (
        "trust-tta data get cifar10",
        "trust-tta corrupt data/cifar10/test_images.npy data/CIFAR-10-C",
    ),
    "pacs": tuple(
        f"trust-tta train --data pacs --target {domain} --size 96 --set patch_size=4 --recipe recipes/pacs96.toml "
        f"--out runs/pacs_{domain}"
        for domain in ("art_painting", "cartoon", "photo", "sketch")
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, metavar="CONFIG")
    parser.add_argument("store", type=Path, metavar="STORE")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--together", action="store_true", help="one short page for all settings, CONFIG's name.md")
    parser.add_argument("--fair", action="store_true", help="one page of each method's settings, CONFIG's name.md")
    arguments = parser.parse_args(argv)
    report, stem = read_report(arguments.store), arguments.config.stem
    (arguments.out / "tables").mkdir(parents=True, exist_ok=True)
    whole = fair if arguments.fair else combined_page if arguments.together else None
    if whole is not None:
        with replacing(arguments.out / "tables" / f"{stem}.md") as temporary:
            temporary.write_text(whole(report, arguments.config), encoding="utf-8")
    for group in () if whole is not None else report.groups:
        with replacing(arguments.out / "tables" / f"{stem}_{group.setting}.md") as temporary:
            temporary.write_text(page(group, arguments.config), encoding="utf-8")
    write_cells(report, arguments.out / f"{stem}.csv")


def write_cells(report: Report, path: Path) -> None:
    """One row per cell, six digits of each number; `bench --export` has every column, exact."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for cell in report.cells:
            row = {**flat_row(cell), "label": cell.label}
            row = {k: csv_text(v) if isinstance(v, str) else v for k, v in row.items()}
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})


def page(group: ResultGroup, config: Path) -> str:
    found = (
        difference_table(group),
        equal_cost_table(group),
        cost_table(group),
        calibration_table(group),
    )
    tables = [f"{table.caption}.\n\n{to_markdown(table)}" for table in found if table is not None]
    what = group.measure[0].upper() + group.measure[1:]
    sections = (
        f"# {config.stem}, {group.setting}\n\n{commands(config, group)}",
        run_conditions(group),
        "## Summary\n" + " ".join(summarize(group)),
        f"## {what}\n{'; '.join(notes(group))}; ± is the sample standard deviation over the seeds.\n\n"
        + to_markdown(accuracy_table(group)),
        "## Significance, cost and calibration",
        *tables,
        f"## TRUST against six updates in the default order\n{six_updates(group)}",
    )
    return "\n\n".join(section.strip() for section in sections) + "\n"


def combined_page(report: Report, config: Path) -> str:
    """An overview of all settings, then what each one's accuracy table says."""
    sections = [f"# {TITLES.get(config.stem, config.stem)}", overview(report)]
    for group in report.groups:
        title = group.title[0].upper() + group.title[1:]
        table = many_domains(group) if len(group.domains) > WIDE else to_markdown(accuracy_table(group))
        sections.append(f"## {title}\n{run_conditions(group)}\n\n{table}")
    sections.append(f"## How it was made\n{commands(config, _widest(report), flag=' --together')}")
    return "\n\n".join(section.strip() for section in sections) + "\n"


def many_domains(group: ResultGroup) -> str:
    """What is shown of domains that are too many for a table."""
    return by_severity(group) if "gradual" in group.setting else first_and_last(group)


def _widest(report: Report) -> ResultGroup:
    """The group whose data are enough for all: that of most domains."""
    return max(report.groups, key=lambda group: len(group.domains))


def overview(report: Report) -> str:
    """A table for each measure: methods by settings."""
    tables = [
        f"## Overview\n{len(report.groups)} settings, each the mean over its domains and seeds; worst: of its domains."
    ]
    for title, measure in MEASURES.items():
        columns = [{v.label: text for v in g.variants if (text := measure(g, v.label))} for g in report.groups]
        kept = [(short_title(g), column) for g, column in zip(report.groups, columns, strict=True) if column]
        labels = dict.fromkeys(label for g in report.groups for label in (v.label for v in g.variants))
        lines = [[label, *(column.get(label, "–") for _, column in kept)] for label in labels]
        if kept:
            tables.append(f"### {title}\n{to_markdown(plain_table(['', *(title for title, _ in kept)], lines))}")
    return "\n\n".join(table.strip() for table in tables)


def short_title(group: ResultGroup) -> str:
    parts = [group.setting, f"batch {group.batch_size}", *([f"{group.limit} images"] if group.limit else [])]
    return ", ".join(
        [*parts, *([] if group.dataset == "cifar10-c" else [group.dataset]), *filter(None, [group.distinction])]
    )


def _accuracy(group: ResultGroup, label: str) -> str:
    found = list(seed_means(group, label).values())
    spread = f" ± {100 * statistics.stdev(found):.1f}" if len(found) > 1 else ""
    return format_percent(mean(found)) + spread if found else ""


def seed_means(group: ResultGroup, label: str, *, domains: Sequence[str] = ()) -> dict[int, float]:
    """The mean accuracy over the domains (default: all) of each seed that met them all."""
    found = {seed: _row(group, label, seed, domains or _met(group, seed)) for seed in group.seeds}
    return {seed: mean([cell.result.accuracy for cell in row]) for seed, row in found.items() if row}


def _met(group: ResultGroup, seed: int) -> Sequence[str]:
    """The domains of a seed's stream: where they are drawn, every seed has its own."""
    if "sequence" not in group.setting:
        return group.domains
    return sorted({cell.key.domain for cell in group.cells if cell.key.seed == seed})


def _row(group: ResultGroup, label: str, seed: int, domains: Sequence[str]) -> list[Cell]:
    """The cells of a line in the order of the domains; none where one is missing."""
    found = [cell for d in domains for cell in group.at.get((label, d), []) if cell.key.seed == seed]
    return found if len(found) == len(domains) else []


def passes_per_batch(group: ResultGroup, label: str) -> float:
    """Backward passes count twice."""
    cells = group.cells_of(label)
    return sum(c.result.forwards + 2 * c.result.backwards for c in cells) / sum(c.batches for c in cells)


def _worst(group: ResultGroup, label: str) -> str:
    found = [group.entry(label, domain).mean for domain in group.domains]
    known = [mean for mean in found if mean is not None]
    return format_percent(min(known)) if len(known) == len(found) > 1 else ""


def clean_afterwards(group: ResultGroup, label: str) -> float | None:
    """The mean accuracy on clean images after each domain, or after the last one where nothing resets."""
    cells = group.cells_of(label)
    if not group.resets:
        last = {seed: _met(group, seed)[-1] for seed in group.seeds}
        cells = [cell for cell in cells if cell.key.domain == last[cell.key.seed]]
    found = [cell.result.clean_accuracy for cell in cells if cell.result.clean_accuracy is not None]
    return mean(found) if found else None


def _clean(group: ResultGroup, label: str) -> str:
    found = clean_afterwards(group, label)
    return "" if found is None else format_percent(found)


def _calibration(group: ResultGroup, label: str) -> str:
    values = [cell.result.ece for cell in group.cells_of(label)]
    return format_percent(mean(values)) if values else ""


def _cost(group: ResultGroup, label: str) -> str:
    cost = next((c for c in group.costs if c.variant.label == label), None)
    if cost is None:
        return ""
    ms = f", {cost.milliseconds:.3g} ms" if cost.milliseconds is not None else ""
    return f"{cost.forwards + 2 * cost.backwards:.3g}{ms}"


MEASURES: dict[str, Callable[[ResultGroup, str], str]] = {
    "Accuracy in percent": _accuracy,
    "Worst domain, accuracy in percent": _worst,
    "Calibration: expected calibration error in percent": _calibration,
    "Accuracy in percent on clean images afterwards": _clean,
    "Cost: passes per batch, backward ones twice, and time per image": _cost,
}


def first_and_last(group: ResultGroup) -> str:
    """Of a long row of domains: the mean, and whether its end is as good as its beginning.

    The domains at both ends differ in kind, and bn, which forgets nothing, is what to compare with.
    """
    lines = []
    for label in (variant.label for variant in group.variants):
        seeds = list(seed_means(group, label))
        ends, base = _ends(group, label, seeds), _ends(group, "bn", seeds)
        over = [None if a is None or b is None else a - b for a, b in zip(ends, base, strict=True)]
        lines.append([label, _accuracy(group, label) or "–", *map(format_percent, ends), *map(format_gain, over)])
    heads = ["", "mean", f"first {END} domains", f"last {END}", f"over bn, first {END}", f"last {END}"]
    return to_markdown(plain_table(heads, lines))


def _ends(group: ResultGroup, label: str, seeds: Sequence[int]) -> list[float | None]:
    """The mean accuracy on the first and on the last domains of each seed's own row."""
    rows = [_row(group, label, seed, _met(group, seed)) for seed in seeds]
    ends = [[c.result.accuracy for row in rows for c in row[at]] for at in (slice(END), slice(-END, None))]
    return [mean(found) if found else None for found in ends]


def by_severity(group: ResultGroup) -> str:
    """Of a gradual stream: the mean over corruptions at each severity, rising and falling."""
    steps = list(dict.fromkeys(domain.partition("/")[2] for domain in group.domains))
    lines = []
    for label in (variant.label for variant in group.variants):
        found = [over(group, label, [d for d in group.domains if d.partition("/")[2] == step]) for step in steps]
        lines.append([label, _accuracy(group, label) or "–", *map(format_percent, found)])
    return to_markdown(plain_table(["", "mean", *(step.replace("-", " ") for step in steps)], lines))


def fair(report: Report, config: Path) -> str:
    """Each method as in the TRUST paper, as in its own paper, and at the best of the sweep on held-out corruptions."""
    sections = [f"# {TITLES.get(config.stem, config.stem)}"]
    sections += [f"## {group.title}\n{run_conditions(group)}\n\n{fair_table(group)}" for group in report.groups]
    sections.append(f"## How it was made\n{commands(config, report.groups[0], flag=' --fair')}")
    return "\n\n".join(section.strip() for section in sections) + "\n"


def fair_table(group: ResultGroup) -> str:
    reported, other = ([d for d in group.domains if (d in HELD_OUT) == held] for held in (False, True))
    lines = []
    for method in dict.fromkeys(variant.label.partition(":")[0] for variant in group.variants):
        labels = {v.label.partition(": ")[2]: v.label for v in group.variants if v.label.partition(":")[0] == method}
        chosen = max(labels.values(), key=lambda label: over(group, label, other) or 0.0)
        shown = [labels.get("TRUST paper"), labels.get("own paper", labels.get("")), chosen]
        numbers = [format_percent(over(group, label, reported) if label else None) for label in shown]
        lines.append([method, *numbers, chosen.partition(": ")[2] or "–", f"{passes_per_batch(group, chosen):.3g}"])
    heads = ["", "TRUST paper's setting", "its own paper's", "best of the sweep", "which is", "passes per batch"]
    parts = counted(len(reported), "corruption"), counted(len(group.seeds), "seed")
    said = f"Accuracy in percent, mean over {' and '.join(parts)}; the best is chosen on {', '.join(other)}."
    return f"{said}\n\n{to_markdown(plain_table(heads, lines))}"


def over(group: ResultGroup, label: str, domains: Sequence[str]) -> float | None:
    """Mean accuracy over domains; None where one is missing."""
    found = [group.entry(label, domain).mean for domain in domains]
    return None if not found or None in found else mean([m for m in found if m is not None])


def commands(config: Path, group: ResultGroup, flag: str = "") -> str:
    graded = any(name in group.setting.split("+") for name in ("gradual", "sequence"))
    severities = " --severities 1,2,3,4,5" if graded else ""
    making = [f"{line}{severities}" if " corrupt " in line else line for line in MAKING.get(group.dataset, ())]
    lines = [
        *making,
        f"trust-tta bench {config.as_posix()} --processes 1",
        f"python benchmarks/results_tables.py {config.as_posix()} runs/{config.stem}.sqlite{flag}",
    ]
    return "\n".join(["Written by the last of these commands; nothing here is typed.", "```sh", *lines, "```"])


def run_conditions(group: ResultGroup) -> str:
    cells = group.cells
    samples = sorted({cell.result.samples for cell in cells})
    images = f"{samples[0]:,}" if len(samples) == 1 else f"{samples[0]:,} to {samples[-1]:,}"
    networks = sorted({cell.key.checkpoint[:12] for cell in cells})
    device, dtype, torch = (
        ", ".join(sorted({str(getattr(cell.provenance, name)) for cell in cells}))
        for name in ("device", "dtype", "torch")
    )
    commit = ", ".join(sorted({short_commit(str(cell.provenance.commit)) for cell in cells}))
    lines = [
        f"{counted(len(group.domains), 'domain')} of {images} images, batches of {group.batch_size}, "
        f"{len(group.variants)} methods, {len(cells)} cells.",
        f"Network (sha256): {', '.join(networks)}. Device: {device}, {dtype}; PyTorch {torch}; commit {commit}.",
    ]
    missing: list[Failure | PendingCell] = [*group.failures, *group.pending]
    if missing:
        places = "; ".join(f"{item.label} on {item.key.domain}, seed {item.key.seed}" for item in missing)
        lines.append(f"**Not finished: {len(missing)} cells** ({places}).")
    return "\n".join(lines)


def short_commit(commit: str) -> str:
    """Twelve digits, and whether the files differed from it."""
    digits, mark, rest = commit.partition("-")
    return f"{digits[:12]}{mark}{rest}"


def six_updates(group: ResultGroup) -> str:
    """TRUST less the default order at as many updates, by domain and seed."""
    both = {d: [group.seeds_of(label, d) for label in (TRUST, SIX_STEPS)] for d in group.domains}
    seeds = sorted(set.intersection(*(set(found) for pair in both.values() for found in pair)))
    if not seeds:
        return "Not both have every domain."
    gaps = {d: [ours[s] - six[s] for s in seeds] for d, (ours, six) in both.items()}
    every = [gap for line in gaps.values() for gap in line]
    ahead, behind = sum(gap > 0 for gap in every), sum(gap < 0 for gap in every)
    means = [mean([line[i] for line in gaps.values()]) for i in range(len(seeds))]
    lines = [[d, *map(format_gain, [*line, mean(line)])] for d, line in gaps.items()]
    lines.append(["**mean**", *map(format_gain, [*means, mean(means)])])
    said = (
        f"TRUST less `{SIX_STEPS}` in points. Of {len(every)} pairs of domain and seed TRUST is ahead in {ahead}, "
        f"behind in {behind} and level in {len(every) - ahead - behind}; {format_gain(mean(means))} on average."
    )
    return f"{said}\n\n{to_markdown(plain_table(['', *(f'seed {s}' for s in seeds), 'mean'], lines))}"


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
