"""The page from which a practitioner chooses a method: means of whole seeds, in words and tables."""

from __future__ import annotations

from pathlib import Path

from benchmarks.choose_page import main

from tests.report.samples import make_cell
from trust_tta.results import Cell, ResultStore

DOMAINS = ("gaussian_noise", "glass_blur", "jpeg_compression")


def page_of(folder: Path, cells: list[Cell], *, rates: list[Cell] | None = None) -> str:
    for name, held in (("streams", cells), ("rates", rates)):
        if held is not None:
            with ResultStore(folder / f"{name}.sqlite") as store:
                store.plan([cell.key for cell in held], labels={cell.key: cell.label for cell in held})
                for cell in held:
                    store.finish(cell.key, cell.result, cell.provenance)
    main(["--runs", str(folder), "--out", str(folder)])
    return (folder / "choose.md").read_text(encoding="utf-8")


def stream(method: str, accuracy: float, *, setting: str = "online", batch: int = 128, seeds: int = 3) -> list[Cell]:
    """A cell for each domain and seed; clean images are forgotten from domain to domain."""
    work = (0, 1, 1.0) if method in ("source", "bn") else (1, 3, 4.0)
    return [
        make_cell(
            method, domain, accuracy=accuracy + seed / 100, seed=seed, setting=setting, batch_size=batch,
            clean=0.9 - place / 10, work=work, fingerprint=f"{domain} {seed} {setting} {batch}",
        )
        for place, domain in enumerate(DOMAINS)
        for seed in range(seeds)
    ]  # fmt: skip


def section(page: str, title: str) -> str:
    return next(part for part in page.split("\n## ") if part.startswith(title))


def test_every_stream_has_a_line_and_its_best_is_bold(tmp_path: Path) -> None:
    cells = [*stream("source", 0.5), *stream("bn", 0.6), *stream("tide", 0.8)]
    cells += [*stream("source", 0.4, batch=4), *stream("bn", 0.1, batch=4), *stream("tide", 0.7, batch=4, seeds=1)]
    page = page_of(tmp_path, cells)
    accuracy = section(page, "Accuracy")
    assert "| 15 corruptions, batches of 128, reset at each | 51.0 | 61.0 | **81.0** |" in accuracy
    assert "| batches of 4 (three corruptions) | 41.0 | 11.0 | **70.0**† |" in accuracy  # a dagger: one seed
    assert "| 4 | 41.0 | 11.0 | **70.0** |\n| 128 | 51.0 | 61.0 | **81.0** |" in section(page, "Batch size")
    short = section(page, "In short")
    assert "You do not know the stream: `tide`, 75.5 on average" in short
    assert "One forward pass is all you can afford: `source`, 46.0 on average." in short
    assert "| bn | 36.0 | 0 | -30.0 | batches of 4 (three corruptions) |" in short


def test_a_baseline_that_is_ahead_with_a_rate_of_its_own_is_named(tmp_path: Path) -> None:
    cells = [*stream("source", 0.5), *stream("bn", 0.6), *stream("tide", 0.8)]
    cells += [*stream("source", 0.4, batch=4), *stream("bn", 0.1, batch=4), *stream("tide", 0.7, batch=4)]
    rates = [*stream("cotta", 0.85, seeds=1), *stream("cotta", 0.6, batch=4, seeds=1), *stream("shot", 0.79, seeds=1)]
    page = page_of(tmp_path, cells, rates=rates)
    ahead = next(line for line in section(page, "In short").splitlines() if "rate of its own" in line)
    assert ahead.endswith(
        ": `cotta` at 4 passes per batch (15 corruptions, batches of 128, reset at each, 85.0 to 80.0)."
    )
    table = section(page, "The baselines at their best rates")  # tide on the same seed
    assert "| 15 corruptions, batches of 128, reset at each | 79.0 | **85.0** | 60.0 | 80.0 |" in table


def test_a_seed_that_met_some_domains_does_not_count(tmp_path: Path) -> None:
    cells = [*stream("source", 0.5), *stream("bn", 0.6), *stream("tide", 0.8)]
    cells = [cell for cell in cells if not (cell.key.method == "tide" and cell.key.seed == 2)] + [
        cell for cell in cells if cell.key.method == "tide" and cell.key.seed == 2 and cell.key.domain == DOMAINS[0]
    ]
    assert "| 51.0 | 61.0 | **80.5**† |" in section(page_of(tmp_path, cells), "Accuracy")


def test_clean_images_count_after_the_last_domain_where_nothing_resets(tmp_path: Path) -> None:
    cells = [cell for m in ("source", "bn", "tide") for cell in [*stream(m, 0.5), *stream(m, 0.5, setting="continual")]]
    found = section(page_of(tmp_path, cells), "Clean images afterwards")
    assert "| 15 corruptions, batches of 128, reset at each | **80.0** |" in found  # the mean of 90, 80 and 70
    assert "| the same, never reset | **70.0** |" in found


def test_every_seed_of_a_drawn_row_has_domains_of_its_own(tmp_path: Path) -> None:
    cells = [*stream("source", 0.5), *stream("bn", 0.6), *stream("tide", 0.8)]
    for method, start in (("source", 0.3), ("bn", 0.4), ("tide", 0.5)):
        for seed in (0, 1):
            for i in range(100):
                domain = f"{i:03d}-{'fog' if seed else 'snow'}/{1 + i % 5}"
                accuracy = start + (i >= 80) * 0.1 * (method == "tide") + seed * 0.2
                cells.append(make_cell(method, domain, accuracy=accuracy, seed=seed, setting="sequence", batch_size=64))
    found = section(page_of(tmp_path, cells), "A hundred domains in a row")
    assert "| tide | 62.0 ± 14.1 | 60.0 | 70.0 | +10.0 | +20.0 |" in found
