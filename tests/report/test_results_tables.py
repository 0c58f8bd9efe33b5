"""The pages of docs/results that a store is turned into: the report's own tables and sentences."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

from benchmarks.results_tables import main

from tests.report.samples import make_cell
from trust_tta.report.formats import to_markdown
from trust_tta.report.model import read_report
from trust_tta.report.summary import summarize
from trust_tta.report.tables import accuracy_table
from trust_tta.results import Cell, ResultStore

CONFIG = Path("configs/results/cifar10c.toml")  # read for its name alone
DOMAINS = ("fog", "snow", "contrast")
METHODS = {  # by label: the name, the options, and how many seeds
    "source": ("source", {}, 1),
    "tent": ("tent", {}, 3),
    "sar": ("sar", {}, 1),
    "lame": ("lame", {}, 1),
    "foa": ("foa", {}, 1),
    "trust_naive, 6 steps": ("trust_naive", {"steps": 6}, 3),
    "trust, parallel split": ("trust", {"mode": "split"}, 1),
    "repetition": ("repetition", {}, 1),
    "augmentation": ("augmentation", {}, 1),
    "trust": ("trust", {}, 3),
}
Accuracy = Callable[[str, str, int], float]


def cells_of(setting: str, accuracy: Accuracy) -> list[Cell]:
    """A cell for every method, its accuracy by label, domain and seed."""
    return [
        make_cell(
            name,
            domain,
            seed=seed,
            accuracy=accuracy(label, domain, seed),
            options=json.dumps(options),
            setting=setting,
            experiment="cifar10c",
            fingerprint=f"{domain} {seed}",
            work=(6 if label in ("trust", "trust_naive, 6 steps", "repetition") else 1, 3, 4.0),
            label=label,
        )
        for label, (name, options, seeds) in METHODS.items()
        for domain in DOMAINS
        for seed in range(seeds)
    ]


def pages(folder: Path, cells: list[Cell], *flags: str, absent: int = 0) -> dict[str, str]:
    """The page for these cells, the last `absent` of them only planned."""
    with ResultStore(folder / "store.sqlite") as store:
        store.plan([cell.key for cell in cells], labels={cell.key: cell.label for cell in cells})
        for cell in cells[: len(cells) - absent]:
            store.finish(cell.key, cell.result, cell.provenance)
    main([str(CONFIG), str(folder / "store.sqlite"), "--out", str(folder / "out"), *flags])
    return {path.name: path.read_text(encoding="utf-8") for path in (folder / "out").rglob("*.*")}


def trust_wins_but_on_snow(label: str, domain: str, seed: int) -> float:
    if label == "trust":
        return 0.75 if domain == "snow" else 0.8 + seed / 100
    if label == "trust_naive, 6 steps":
        return 0.77 if domain == "snow" else 0.785
    return 0.76 if label == "sar" else 0.6


def test_the_page_says_what_the_report_says(tmp_path: Path) -> None:
    cells = cells_of("online", trust_wins_but_on_snow)
    found = pages(tmp_path, cells)
    assert set(found) == {"cifar10c_online.md", "cifar10c.csv"}
    page = found["cifar10c_online.md"]
    group = read_report(tmp_path / "store.sqlite").groups[0]
    assert " ".join(summarize(group)) in page
    assert to_markdown(accuracy_table(group)) in page
    assert "Of 9 pairs of domain and seed TRUST is ahead in 6, behind in 3 and level in 0; +1.0 on average." in page
    assert "| contrast | +1.5 | +2.5 | +3.5 | +2.5 |" in page
    assert "| **mean** | +0.3 | +1.0 | +1.7 | +1.0 |" in page
    assert "Not finished" not in page
    rows = list(csv.DictReader(found["cifar10c.csv"].splitlines()))
    assert len(rows) == len(cells) == 3 * (10 + 2 * 3)
    assert {float(row["accuracy"]) for row in rows if row["method"] == "sar"} == {0.76}
    assert {row["label"] for row in rows} >= {"trust", "trust_naive, 6 steps", "trust, parallel split"}


def test_results_page_names_the_best_method_and_missing_runs(tmp_path: Path) -> None:
    order = {"foa": 0.9, "augmentation": 0.8, "trust": 0.7}
    cells = cells_of("standard", lambda label, domain, seed: order.get(label, 0.5))
    page = pages(tmp_path, cells, absent=2)["cifar10c_standard.md"]
    assert "foa leads with 90.0 % accuracy" in page
    assert "TRUST does not win here: trust is 20.0 points behind foa." in page
    assert "**Not finished: 2 cells** (trust on contrast, seed 1; trust on contrast, seed 2)." in page


def test_methods_without_all_domains_have_no_mean(tmp_path: Path) -> None:
    cells = cells_of("online", trust_wins_but_on_snow)
    lame = [cell for cell in cells if cell.key.method == "lame" and cell.key.domain == "fog"]
    page = pages(tmp_path, [cell for cell in cells if cell not in lame])["cifar10c_online.md"]
    assert "No mean, because some domains are missing: lame" in page


def test_one_page_begins_with_an_overview_of_all_settings(tmp_path: Path) -> None:
    cells = [make_cell("tide", d, accuracy=0.8, seed=s, clean=0.9) for d in DOMAINS for s in (0, 1)]
    cells += [make_cell("bn", d, accuracy=0.7 if d == "fog" else 0.6, seed=s) for d in DOMAINS for s in (0, 1)]
    row = [f"{i:03d}-fog/{1 + i % 5}" for i in range(40)]
    for i, domain in enumerate(row):
        cells.append(make_cell("tide", domain, accuracy=0.5 + i / 100, setting="sequence", batch_size=64))
        cells.append(make_cell("bn", domain, accuracy=0.5, setting="sequence", batch_size=64))
    page = pages(tmp_path, cells, "--together")["cifar10c.md"]
    accuracy, worst, *_ = page.split("### ")[1:]
    assert "| tide | 80.0 ± 0.0 | 69.5 |" in accuracy
    assert "| bn | 63.3 ± 0.0 | 50.0 |" in accuracy
    assert "| bn | 60.0 | 50.0 |" in worst
    assert "| tide | 90.0 |" in page.split("### Accuracy in percent on clean images afterwards")[1]
    assert "| tide | 69.5 | 59.5 | 79.5 | +9.5 | +29.5 |" in page  # the first and the last twenty of the row


def test_the_best_of_a_sweep_is_chosen_where_it_is_not_reported(tmp_path: Path) -> None:
    reached = {"TRUST paper": (0.6, 0.5), "own paper": (0.7, 0.6), "lr 0.01": (0.4, 0.9), "lr 0.1": (0.9, 0.2)}
    cells = [make_cell("bn", d, accuracy=0.5, label="bn") for d in ("fog", "spatter")]
    for i, (setting, (fog, spatter)) in enumerate(reached.items()):
        for domain, accuracy in (("fog", fog), ("spatter", spatter)):
            options = json.dumps({"lr": i})
            cells.append(make_cell("tent", domain, accuracy=accuracy, options=options, label=f"tent: {setting}"))
    page = pages(tmp_path, cells, "--fair")["cifar10c.md"]
    assert "| tent | 60.0 | 70.0 | 40.0 | lr 0.01 |" in page
    assert "| bn | – | 50.0 | 50.0 | – |" in page
    assert "the best is chosen on spatter" in page
