"""The pages of results are those that their generators write from the records in docs/results."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks import (
    choose_page,
    cluster_kills,
    cluster_speed,
    export,
    method_costs,
    networks_page,
    performance_page,
    results_page,
    results_tables,
    serve_load,
)

from tests.docs.pages import DOCS, ROOT, table_rows
from tests.report.samples import make_cell
from trust_tta.results import ResultStore

RESULTS = DOCS / "results"
COSTS = RESULTS / "method_costs_h200.json"
PAGES: dict[Path, Callable[[], str]] = {
    RESULTS / "choose.md": lambda: choose_page.page(RESULTS / "worlds.csv", COSTS),
    RESULTS / "README.md": results_page.page,
    RESULTS / "tables" / "method_costs.md": lambda: method_costs.page(record_of(COSTS.name)),
    DOCS / "develop" / "performance.md": performance_page.page,
    **{RESULTS / "tables" / f"{name}.md": page for name, page in results_tables.PAGES.items()},
}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(DOCS)))
def test_a_page_is_what_its_generator_writes(path: Path) -> None:
    """Run the command that the page names after a record has changed."""
    assert path.read_text(encoding="utf-8") == PAGES[path]()


def test_the_readme_has_the_results_of_the_records() -> None:
    """Run `python -m benchmarks.results_page` after a record has changed."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{results_page.BEGIN}\n{results_page.short()}\n{results_page.END}" in readme


def record_of(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def rows(cells: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


GUIDES = DOCS / "guides"
TABLES: list[tuple[Path, Callable[[], str]]] = [
    (GUIDES / "export.md", lambda: export.page(record_of("export.json"))),
    (GUIDES / "production.md", lambda: serve_load.table(record_of("serve_load.json"))),
    (GUIDES / "networks.md", lambda: networks_page.measured_table(record_of("networks.json"))),
    (GUIDES / "networks.md", lambda: networks_page.published_table(vmamba=False)),
    (GUIDES / "checkpoints.md", lambda: networks_page.published_table(vmamba=True)),
    (GUIDES / "distributed.md", lambda: rows(cluster_kills.kills_table(record_of("cluster_kills.json")))),
    (GUIDES / "distributed.md", lambda: rows(cluster_speed.workers_table(record_of("cluster_speed.json")))),
]


@pytest.mark.parametrize(("path", "table"), TABLES, ids=[f"{path.stem}-{i}" for i, (path, _) in enumerate(TABLES)])
def test_a_guide_has_the_table_of_its_generator(path: Path, table: Callable[[], str]) -> None:
    """Run the command that the page names after a record has changed; most take `--page`."""
    assert table() in path.read_text(encoding="utf-8")


def test_every_record_is_listed_and_every_listed_record_exists() -> None:
    listed = {name for row in results_page.RECORDS for name in re.findall(r"`([\w.]+)`", row[0])}
    assert listed == {path.name for path in RESULTS.iterdir() if path.suffix in (".csv", ".json")}


def test_gains_of_choose_are_those_of_worlds() -> None:
    """Two programs compute them from the same cells."""
    gains = choose_page.gains_of(choose_page.read_worlds(RESULTS / "worlds.csv")[0])
    worlds = {row[0].strip("`"): row for row in table_rows((RESULTS / "worlds.md").read_text(encoding="utf-8"))}
    for name, found in gains.items():
        _, mean, least, below = worlds[name]
        assert float(mean) == pytest.approx(100 * found.mean, abs=0.06), name
        assert float(least.split()[0]) == pytest.approx(100 * found.least[0], abs=0.06), name
        assert below == f"{found.losses} of {len(found.by_place)}", name


def test_choose_recommends_what_the_numbers_say(tmp_path: Path) -> None:
    cells = {"source": (50, 60), "bn": (60, 40), "tent": (70, 50), "neo": (55, 61)}
    lines = [
        f"shipped_nano / {stream},{method},fog,0,{size},64,{pair[i] / 100}"
        for i, (stream, size) in enumerate((("online", 128), ("batch1", 1)))
        for method, pair in cells.items()
    ]
    worlds = tmp_path / "worlds.csv"
    worlds.write_text("\n".join(["experiment,method,domain,seed,batch_size,samples,accuracy", *lines]) + "\n")
    costs = [{"method": m, "forwards": 1, "backwards": int(m == "tent"), "ms": 9.0, "failed": ""} for m in cells]
    (tmp_path / "costs.json").write_text(json.dumps({"rows": costs}))
    page = choose_page.page(worlds, tmp_path / "costs.json")
    assert "`tent`, +5.0 on average (`neo`: +3.0), ahead of the other methods in 1 of 2, below the source in 1" in page
    assert "no update:** `bn` -5.0 (at worst -20.0), `neo` +3.0 (at worst +1.0)." in page
    assert "one at a time:** `bn`, `tent` lose to the source there" in page
    assert "| reset at each corruption | **+20.0** | +5.0 | +10.0 |" in page  # tent, neo, bn


def test_seeds_that_miss_a_domain_do_not_count() -> None:
    def row(label: str, domain: str, seed: int, accuracy: float) -> results_tables.Row:
        return results_tables.Row(("cifar10-c", "online", 128), "", label, domain, seed, accuracy, 8, 24)

    rows = [row("bn", "fog", 0, 0.6), row("bn", "snow", 0, 0.8), row("bn", "fog", 1, 0.9)]
    assert results_tables.seed_means(rows) == {0: pytest.approx(0.7)}
    assert results_tables.accuracy(rows) == "70.0"
    assert results_tables.passes_per_batch(rows) == "3"


def test_leads_pair_the_same_domain_and_seed() -> None:
    def row(label: str, domain: str, accuracy: float) -> results_tables.Row:
        return results_tables.Row(("pacs", "online", 128), "", label, domain, 0, accuracy, 8, 24)

    six = results_tables.SIX_STEPS
    rows = [row("trust", "photo", 0.5), row(six, "photo", 0.4), row("trust", "sketch", 0.3), row(six, "sketch", 0.6)]
    assert results_tables.leads(rows) == [pytest.approx(0.1), pytest.approx(-0.3)]
    assert results_tables.lead(rows) == "-10.00 points; ahead in 1, behind in 1 of 2 pairs of domain and seed"


def test_a_store_becomes_the_csv_that_pages_are_made_of(tmp_path: Path) -> None:
    cells = [make_cell("bn", domain, accuracy=0.5, label="bn") for domain in ("fog", "snow")]
    with ResultStore(tmp_path / "store.sqlite") as store:
        store.plan([cell.key for cell in cells], labels={cell.key: cell.label for cell in cells})
        for cell in cells:
            store.finish(cell.key, cell.result, cell.provenance)
    rows = list(csv.DictReader(results_tables.cells_of(tmp_path / "store.sqlite").splitlines()))
    assert {row["domain"] for row in rows} == {"fog", "snow"}
    assert {(row["label"], row["accuracy"]) for row in rows} == {("bn", "0.5")}
    assert set(rows[0]) == set(results_tables.COLUMNS)
