"""Write the pages and the CSV of a results configuration from its store.

python benchmarks/results_tables.py configs/results/cifar10c.toml runs/cifar10c.sqlite
writes docs/results/cifar10c_online.md, cifar10c_standard.md and cifar10c.csv. Where cifar10c_times.json is beside them,
a list of {"step": ..., "seconds": ..., "processes": ...} that whoever ran the steps took down, with "beside" for what
else the device did meanwhile, the pages show it; steps of one name, as of a run that was resumed, are added up.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from trust_tta.atomic import replacing
from trust_tta.report.tables import layout, notes, to_markdown
from trust_tta.results import Cell, CellKey, ResultStore, Table, split, table
from trust_tta.results.export import flat_row

RESULTS = Path(__file__).parents[1] / "docs" / "results"
TRUST, SIX_STEPS = "trust", "trust_naive, 6 steps"
SEED = 0  # the one that every method has
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


@dataclass(frozen=True)
class Race:
    """The cells of one data set and setting; `missing` are planned and not finished."""

    cells: Sequence[Cell]
    missing: Sequence[CellKey]
    labels: Mapping[str, str]  # by digest

    @cached_property
    def accuracies(self) -> Table:
        return table(self.cells, rows="label")

    @cached_property
    def at(self) -> Mapping[tuple[str, str, int], Cell]:
        """The cells by row, domain and seed."""
        return {(cell.label, cell.key.domain, cell.key.seed): cell for cell in self.cells}

    @property
    def domains(self) -> tuple[str, ...]:
        return self.accuracies.columns

    def on(self, domain: str) -> dict[str, float]:
        """The accuracy of every row with the common seed."""
        found = {row: self.at.get((row, domain, SEED)) for row in self.accuracies.rows}
        return {row: cell.result.accuracy for row, cell in found.items() if cell is not None}

    def means(self, seed: int = SEED) -> dict[str, float]:
        """The mean over domains of every row that has all of them with this seed."""
        rows = [[self.at.get((row, domain, seed)) for domain in self.domains] for row in self.accuracies.rows]
        whole = {row: cells for row, cells in zip(self.accuracies.rows, rows, strict=True) if None not in cells}
        return {row: mean(cell.result.accuracy for cell in cells if cell) for row, cells in whole.items()}

    def a_batch(self, row: str, value: str) -> float:
        cells = [cell for cell in self.cells if cell.label == row]
        batches = sum(-(-cell.result.samples // cell.key.batch_size) for cell in cells)
        return float(sum(getattr(cell.result, value) for cell in cells) / batches)

    def seeds(self, *rows: str) -> list[int]:
        """Those that all of these rows have on every domain."""
        return sorted(s for s in {cell.key.seed for cell in self.cells} if set(rows) <= self.means(s).keys())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, metavar="CONFIG")
    parser.add_argument("store", type=Path, metavar="STORE")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER")
    arguments = parser.parse_args(argv)
    with ResultStore(arguments.store, create=False) as store:
        cells = store.results(course=False)
        missing = [key for state in ("pending", "running", "failed") for key in store.keys(state)]
        labels = store.labels()
    noted = arguments.out / f"{arguments.config.stem}_times.json"
    times = json.loads(noted.read_text(encoding="utf-8")) if noted.exists() else []
    for (dataset, setting), found in split(cells, ("dataset", "setting")).items():
        race = Race(found, [key for key in missing if key.setting == setting], labels)
        write(
            arguments.out / f"{arguments.config.stem}_{setting}.md",
            page(race, arguments.config, dataset, setting, times),
        )
    write_cells(cells, arguments.out / f"{arguments.config.stem}.csv")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_cells(cells: Iterable[Cell], path: Path) -> None:
    """One row per cell, with what decides the numbers and the numbers; `bench --export` has every column."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat_row(cell) for cell in cells)


def page(race: Race, config: Path, dataset: str, setting: str, times: Sequence[Mapping[str, Any]]) -> str:
    sections = (
        f"# {config.stem}, {setting}\n\n{commands(config, dataset, times)}",
        circumstances(race),
        f"## Accuracy\n{'; '.join(notes(race.accuracies))}; ± is the sample standard deviation over the seeds, the "
        f"gain is over bn.\n\n{to_markdown(layout(race.accuracies, baseline='bn', spread=True))}",
        f"## Calibration and cost\n{cost_table(race)}",
        f"## Who is ahead\n{lead(race)}",
        f"## Where TRUST is not first\n{behind(race)}",
        f"## TRUST against six updates in the default order\n{equal_updates(race)}",
        f"## Wall time\n{wall_time(times)}",
    )
    return "\n\n".join(section.strip() for section in sections) + "\n"


def commands(config: Path, dataset: str, times: Sequence[Mapping[str, Any]]) -> str:
    processes = max((int(entry["processes"]) for entry in times if entry["step"] == "bench"), default=1)
    stem = config.stem
    lines = [
        *MAKING.get(dataset, ()),
        f"trust-tta bench configs/results/{config.name} --processes {processes}",
        f"python benchmarks/results_tables.py configs/results/{config.name} runs/{stem}.sqlite",
    ]
    return "\n".join(["Written by the last of these commands; nothing here is typed.", "```sh", *lines, "```"])


def circumstances(race: Race) -> str:
    cells = race.cells
    samples = sorted({cell.result.samples for cell in cells})
    images = f"{samples[0]:,}" if len(samples) == 1 else f"{samples[0]:,} to {samples[-1]:,}"
    networks = sorted({cell.key.checkpoint[:12] for cell in cells})
    facts = [cell.facts for cell in cells]
    made = [
        ", ".join(sorted({str(getattr(f, name)) for f in facts})) for name in ("device", "dtype", "torch", "commit")
    ]
    lines = [
        f"{len(race.domains)} domains of {images} images, batches of {cells[0].key.batch_size}, "
        f"{len(race.accuracies.rows)} methods, {len(cells)} cells.",
        f"Network (sha256): {', '.join(networks)}. Device: {made[0]}, {made[1]}; PyTorch {made[2]}; commit {made[3]}.",
    ]
    if race.missing:
        lines.append(f"**Not finished: {len(race.missing)} cells** ({unfinished(race)}).")
    return "\n".join(lines)


def unfinished(race: Race) -> str:
    """What is missing, by method and seed."""
    domains: dict[tuple[str, int], list[str]] = {}
    for key in race.missing:
        domains.setdefault((race.labels[key.digest], key.seed), []).append(key.domain)
    return "; ".join(
        f"{row} with seed {seed} on {'all' if len(names) == len(race.domains) else ', '.join(sorted(names))}"
        for (row, seed), names in sorted(domains.items())
    )


def cost_table(race: Race) -> str:
    rows = [["", "before the update", "after", "NLL", "ECE", "updates a batch", "forwards", "backwards"]]
    values = {name: table(race.cells, rows="label", value=name) for name in ("accuracy_before", "nll", "ece")}
    for place, row in enumerate(race.accuracies.rows):
        before, nll, ece = (values[name].means[place].mean for name in ("accuracy_before", "nll", "ece"))
        counts = [f"{race.a_batch(row, name):.2f}" for name in ("updates", "forwards", "backwards")]
        after = race.accuracies.means[place].mean
        rows.append([row, percent(before), percent(after), "–" if nll is None else f"{nll:.3f}", percent(ece), *counts])
    return "Means over domains and seeds, accuracy and ECE in percent.\n\n" + markdown(rows)


def lead(race: Race) -> str:
    """Who leads with the seed that all have, and where TRUST stands, in all modes."""
    means = race.means()
    first = leaders(means)
    rest = sorted((row for row in means if row not in first), key=lambda row: -means[row])
    if not rest:
        return "Fewer than two methods have every domain, or all are level; nobody leads."
    best = means[first[0]]
    lines = [
        f"With seed {SEED}, which all methods have, **{' and '.join(first)}** {'lead' if first[1:] else 'leads'} with "
        f"{percent(best)} %, {points(best - means[rest[0]])} over {rest[0]}.",
        "",
    ]
    for row in (row for row in (*first, *rest) if row.startswith(TRUST) and not row.startswith("trust_naive")):
        place = 1 + sum(other > means[row] for other in means.values())
        where = (
            "leads" if place == 1 else f"is number {place} of {len(means)}, {points(means[row] - best)} to the first"
        )
        wins = sum(row in leaders(race.on(domain)) for domain in race.domains)
        lines.append(f"- {row} {where}; it is first, alone or level, in {wins} of {len(race.domains)} domains.")
    for seed in race.seeds(TRUST, SIX_STEPS):
        found = race.means(seed)
        if seed != SEED:
            top = leaders(found)
            told = f"{' and '.join(top)} {'lead' if top[1:] else 'leads'} with {percent(found[top[0]])} %"
            lines.append(f"- With seed {seed}, of {len(found)} methods, {told}.")
    partial = [row for row in race.accuracies.rows if row not in means]
    if partial:
        lines.append(f"- Without every domain with seed {SEED}, and so without a place: {', '.join(partial)}.")
    return "\n".join(lines)


def behind(race: Race) -> str:
    rows = [["domain", "TRUST", "first", "its accuracy", "TRUST less first"]]
    for domain in race.domains:
        found = race.on(domain)
        first = leaders(found)
        if TRUST in found and TRUST not in first:
            best = found[first[0]]
            rows.append([domain, percent(found[TRUST]), ", ".join(first), percent(best), points(found[TRUST] - best)])
    if len(rows) == 1:
        return f"Nowhere with seed {SEED}."
    return f"In {len(rows) - 1} of {len(race.domains)} domains with seed {SEED}, in points.\n\n" + markdown(rows)


def equal_updates(race: Race) -> str:
    """TRUST less the default order at as many updates, by domain and seed; then the others that make as many."""
    seeds = race.seeds(TRUST, SIX_STEPS)
    if not seeds:
        return "Not both have every domain."
    gaps = {(d, s): race.at[TRUST, d, s].result.accuracy - race.at[SIX_STEPS, d, s].result.accuracy
            for d in race.domains for s in seeds}  # fmt: skip
    ahead, after = sum(gap > 0 for gap in gaps.values()), sum(gap < 0 for gap in gaps.values())
    whole = [mean(gaps[d, s] for d in race.domains) for s in seeds]
    lines = [
        f"TRUST less `{SIX_STEPS}` in points. Of {len(gaps)} pairs of domain and seed TRUST is ahead in {ahead}, "
        f"behind in {after} and level in {len(gaps) - ahead - after}. Mean over all: {points(mean(whole))}; by seed: "
        f"{', '.join(map(points, whole))}.",
        "",
    ]
    rows = [["domain", *(f"seed {seed}" for seed in seeds), "mean"]]
    for domain in race.domains:
        row = [gaps[domain, seed] for seed in seeds]
        rows.append([domain, *map(points, row), points(mean(row))])
    rows.append(["**mean**", *map(points, whole), points(mean(whole))])
    means, updates = race.means(), race.a_batch(TRUST, "updates")
    alike = [
        r for r in means if r not in (TRUST, SIX_STEPS) and abs(race.a_batch(r, "updates") - updates) < 0.02 * updates
    ]
    others = ", ".join(f"{row} {points(means[TRUST] - means[row])}" for row in alike)
    told = (
        f"\n\nTRUST less the others that make {updates:.0f} updates a batch, seed {SEED}: {others}." if others else ""
    )
    return "\n".join(lines) + "\n" + markdown(rows).rstrip() + told


def wall_time(times: Sequence[Mapping[str, Any]]) -> str:
    if not times:
        return "Nobody took it down."
    steps = dict.fromkeys(str(entry["step"]) for entry in times)
    rows = [["step", "seconds", "processes", "beside"]]
    for step in steps:
        entries = [entry for entry in times if entry["step"] == step]
        processes = sorted({int(entry["processes"]) for entry in entries})
        beside = dict.fromkeys(entry["beside"] for entry in entries if "beside" in entry)
        seconds = sum(entry["seconds"] for entry in entries)
        rows.append([step, f"{seconds:.0f}", ", ".join(map(str, processes)), ", ".join(beside) or "–"])
    note = "The cells of a run share the device, so times of single cells in the CSV are not those of a quiet machine."
    return f"{note}\n\n{markdown(rows)}"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(rows[0]) - 1)]
    return "".join(f"| {' | '.join(row)} |\n" for row in (rows[0], rule, *rows[1:]))


def leaders(found: Mapping[str, float]) -> list[str]:
    """The rows with the highest accuracy."""
    return [row for row, accuracy in found.items() if accuracy == max(found.values())]


def mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.2f}"


def points(gap: float) -> str:
    return f"{100 * gap:+.2f}" if abs(gap) >= 5e-5 else "0.00"


if __name__ == "__main__":
    main()
