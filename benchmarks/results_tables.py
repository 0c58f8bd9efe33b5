"""Write the pages and the CSV of a results configuration from its store.

python benchmarks/results_tables.py configs/results/cifar10c.toml runs/cifar10c.sqlite
writes docs/results/cifar10c_online.md, cifar10c_standard.md and cifar10c.csv. Where cifar10c_times.json is in the same
folder, a list of {"step": ..., "seconds": ..., "processes": ...} noted by whoever ran the steps, with "meanwhile" for
what else the device did, the pages show it; steps of one name, as of a run that was resumed, are added up.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trust_tta.atomic import replacing
from trust_tta.report.evidence import domain_seeds
from trust_tta.report.formats import plain_table, to_markdown
from trust_tta.report.model import Group, Report, read_report
from trust_tta.report.published import load_published
from trust_tta.report.summary import summarize
from trust_tta.report.tables import accuracy_table, calibration_table, cost_table, difference_table, duel_table, notes
from trust_tta.results import format_gain
from trust_tta.results.export import flat_row

RESULTS = Path(__file__).parents[1] / "docs" / "results"
TRUST, SIX_STEPS = "trust", "trust_naive, 6 steps"
COLUMNS = (
    "dataset", "setting", "label", "method", "options", "domain", "severity", "seed", "batch_size", "samples",
    "accuracy_before", "accuracy", "nll", "ece", "brier", "entropy", "updates", "skipped_updates", "forwards",
    "backwards", "seconds_median", "seconds_total",
)  # fmt: skip
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
    arguments = parser.parse_args(argv)
    report, stem = read_report(arguments.store), arguments.config.stem
    noted = arguments.out / f"{stem}_times.json"
    times = json.loads(noted.read_text(encoding="utf-8")) if noted.exists() else []
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.together:
        with replacing(arguments.out / f"{stem}.md") as temporary:
            temporary.write_text(together(report, arguments.config), encoding="utf-8")
    for group in () if arguments.together else report.groups:
        with replacing(arguments.out / f"{stem}_{group.setting}.md") as temporary:
            temporary.write_text(page(group, arguments.config, times), encoding="utf-8")
    write_cells(report, arguments.out / f"{stem}.csv")


def write_cells(report: Report, path: Path) -> None:
    """One row per cell, with what decides the numbers and the numbers; `bench --export` has every column."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows({**flat_row(cell), "label": cell.label} for cell in report.cells)


def page(group: Group, config: Path, times: Sequence[Mapping[str, Any]]) -> str:
    found = (difference_table(group), duel_table(group), cost_table(group, load_published()), calibration_table(group))
    tables = [f"{table.caption}.\n\n{to_markdown(table)}" for table in found if table is not None]
    sections = (
        f"# {config.stem}, {group.setting}\n\n{commands(config, group, times)}",
        circumstances(group),
        "## In words\n" + " ".join(summarize(group)),
        f"## Accuracy\n{'; '.join(notes(group))}; ± is the sample standard deviation over the seeds.\n\n"
        + to_markdown(accuracy_table(group)),
        "## Who is ahead, at what cost",
        *tables,
        f"## TRUST against six updates in the default order\n{six_updates(group)}",
        f"## Wall time\n{wall_time(times)}",
    )
    return "\n\n".join(section.strip() for section in sections) + "\n"


def together(report: Report, config: Path) -> str:
    """What each setting's accuracy table says, one after the other."""
    sections = [f"# {config.stem}\n\n{commands(config, report.groups[0], (), flag=' --together')}"]
    for group in report.groups:
        title = group.title[0].upper() + group.title[1:]
        sections.append(f"## {title}\n{circumstances(group)}\n\n{to_markdown(accuracy_table(group))}")
    return "\n\n".join(section.strip() for section in sections) + "\n"


def commands(config: Path, group: Group, times: Sequence[Mapping[str, Any]], flag: str = "") -> str:
    processes = max((int(entry["processes"]) for entry in times if entry["step"] == "bench"), default=1)
    lines = [
        *MAKING.get(group.dataset, ()),
        f"trust-tta bench configs/results/{config.name} --processes {processes}",
        f"python benchmarks/results_tables.py configs/results/{config.name} runs/{config.stem}.sqlite{flag}",
    ]
    return "\n".join(["Written by the last of these commands; nothing here is typed.", "```sh", *lines, "```"])


def circumstances(group: Group) -> str:
    cells = group.cells
    samples = sorted({cell.result.samples for cell in cells})
    images = f"{samples[0]:,}" if len(samples) == 1 else f"{samples[0]:,} to {samples[-1]:,}"
    networks = sorted({cell.key.checkpoint[:12] for cell in cells})
    device, dtype, torch, commit = (
        ", ".join(sorted({str(getattr(cell.facts, name)) for cell in cells}))
        for name in ("device", "dtype", "torch", "commit")
    )
    lines = [
        f"{len(group.domains)} domains of {images} images, batches of {group.batch_size}, "
        f"{len(group.variants)} methods, {len(cells)} cells.",
        f"Network (sha256): {', '.join(networks)}. Device: {device}, {dtype}; PyTorch {torch}; commit {commit}.",
    ]
    missing = [*(failure.key for failure in group.failures), *group.absent]
    if missing:
        places = "; ".join(f"{group.label(key)} on {key.domain}, seed {key.seed}" for key in missing)
        lines.append(f"**Not finished: {len(missing)} cells** ({places}).")
    return "\n".join(lines)


def six_updates(group: Group) -> str:
    """TRUST less the default order at as many updates, by domain and seed."""
    both = {d: [domain_seeds(group, label, d) for label in (TRUST, SIX_STEPS)] for d in group.domains}
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


def wall_time(times: Sequence[Mapping[str, Any]]) -> str:
    if not times:
        return "Nobody noted it."
    lines = []
    for step in dict.fromkeys(str(entry["step"]) for entry in times):
        entries = [entry for entry in times if entry["step"] == step]
        processes = sorted({int(entry["processes"]) for entry in entries})
        found = [entry.get("meanwhile", entry.get("beside")) for entry in entries]  # older files say "beside"
        meanwhile = ", ".join(dict.fromkeys(text for text in found if text))
        seconds = sum(entry["seconds"] for entry in entries)
        lines.append([step, f"{seconds:.0f}", ", ".join(map(str, processes)), meanwhile or "–"])
    note = "The cells of a run share the device, so times of single cells in the CSV are not those of a quiet machine."
    return f"{note}\n\n{to_markdown(plain_table(['step', 'seconds', 'processes', 'meanwhile'], lines))}"


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
