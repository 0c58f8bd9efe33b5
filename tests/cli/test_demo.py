"""`trust-tta demo` with the whole shipped network, on a handful of images."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.report.samples import make_cell
from trust_tta.cli.main import main
from trust_tta.report.formats import verdict
from trust_tta.results import Cell, ResultStore

CORRUPTIONS = ("gaussian_noise", "defocus_blur", "snow", "contrast")
METHODS = ("source", "bn", "tent", "tide")


def test_the_demo_ends_with_a_table_a_page_and_a_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--out", str(tmp_path), "--images", "8", "--seeds", "1"]) == 0
    *_, report, last = capsys.readouterr().out.splitlines()
    assert report == f"the report is {tmp_path / 'report.html'}"
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.lstrip().lower().startswith("<!doctype html>")
    assert page.count("data:image/webp;base64,") == 8 * len(CORRUPTIONS)
    assert last.startswith("demo: On sample (online, severity 5")
    assert " demo, LayerNorm: On sample (online, severity 5" in last
    with ResultStore(tmp_path / "results.sqlite", create=False) as store:
        assert {(cell.key.method, cell.key.domain) for cell in store.results()} == {
            (method, corruption) for method in (*METHODS, "trust") for corruption in CORRUPTIONS
        }


@pytest.mark.parametrize(
    "arguments", [["--images", "0"], ["--images", "1"], ["--images", "2001"], ["--seeds", "0"]], ids=" ".join
)
def test_impossible_amounts_are_refused(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert main(["demo", *arguments]) == 2
    assert "give 1 or more seeds and 2 to 2000 images" in capsys.readouterr().err


def cells(accuracies: dict[str, tuple[float, ...]]) -> list[Cell]:
    """Two domains, the second five points easier, and one seed for each accuracy."""
    return [
        make_cell(method, domain, accuracy=accuracy + extra, seed=seed)
        for method, found in accuracies.items()
        for seed, accuracy in enumerate(found)
        for domain, extra in (("fog", -0.025), ("snow", 0.025))
    ]


@pytest.mark.parametrize(
    ("accuracies", "text"),
    [
        ({"bn": (0.6, 0.7, 0.8), "trust": (0.62, 0.721, 0.819)}, ", trust leads with 72.0 % accuracy averaged over 2"),
        ({"bn": (0.7, 0.7, 0.79), "trust": (0.71, 0.71, 0.71)}, ", a tie: bn and trust reach 71.0 to 73.0 % accuracy"),
        ({"bn": (0.7,), "tent": (0.6,)}, ", bn leads with 70.0 % accuracy averaged over 2 domains (one seed, so no"),
        ({"bn": (0.7,)}, ", bn reaches 70.0 % accuracy"),
    ],
    ids=["clear", "one seed decides", "one seed", "alone"],
)
def test_whoever_leads_is_named(accuracies: dict[str, tuple[float, ...]], text: str) -> None:
    assert text in verdict(cells(accuracies))
