"""`trust-tta demo` with the whole shipped network, on a handful of images."""

from __future__ import annotations

from pathlib import Path

import pytest

from trust_tta.bench.demo import CORRUPTIONS, METHODS
from trust_tta.cli.main import main
from trust_tta.cli.printing import verdict
from trust_tta.results import Aggregate, ResultStore, Table


def test_the_demo_ends_with_a_table_a_page_and_a_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--out", str(tmp_path), "--images", "4", "--seeds", "1"]) == 0
    *_, report, last = capsys.readouterr().out.splitlines()
    assert report == f"the report is {tmp_path / 'report.html'}"
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.lstrip().lower().startswith("<!doctype html>")
    assert page.count("data:image/webp;base64,") == 4 * len(CORRUPTIONS)
    assert " leads with " in last
    with ResultStore(tmp_path / "results.sqlite", create=False) as store:
        assert {(cell.key.method, cell.key.domain) for cell in store.results()} == {
            (method, corruption) for method in METHODS for corruption in CORRUPTIONS
        }


@pytest.mark.parametrize("arguments", [["--images", "1"], ["--images", "2001"], ["--seeds", "0"]], ids=" ".join)
def test_impossible_amounts_are_refused(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert main(["demo", *arguments]) == 2
    assert "give 1 or more seeds and 2 to 2000 images" in capsys.readouterr().err


def accuracies(means: dict[str, tuple[float, float | None]]) -> Table:
    entries = tuple(Aggregate(mean, std, n=3) for mean, std in means.values())
    return Table("accuracy", tuple(means), ("fog",), tuple((entry,) for entry in entries), entries)


@pytest.mark.parametrize(
    ("means", "text"),
    [
        ({"bn": (0.7, 0.01), "trust": (0.75, 0.02)}, "trust leads with 75.0 % mean accuracy, +5.0 over bn."),
        (
            {"bn": (0.74, 0.03), "trust": (0.73, 0.01)},
            "bn leads with 74.0 % mean accuracy, +1.0 over trust; that is not more than the spread over seeds (3.0).",
        ),
        ({"bn": (0.7, None), "tent": (0.6, None)}, "bn leads with 70.0 % mean accuracy, +10.0 over tent."),
        ({"bn": (0.7, None)}, "Fewer than two methods have complete results; there is no one to lead."),
    ],
    ids=["clear", "within the spread", "one seed", "alone"],
)
def test_whoever_leads_is_named(means: dict[str, tuple[float, float | None]], text: str) -> None:
    assert verdict(accuracies(means)) == text
