"""Write the table of experiments in docs/results/paper.md: PYTHONPATH=src python -m benchmarks.paper_page"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from trust_tta.cli.paper import FOLDER, PaperExperiment, place_rank, read_items

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results" / "paper.md"
MARKER = "<!-- made by: python -m benchmarks.paper_page -->\n\n"


def markdown(items: Sequence[PaperExperiment]) -> str:
    """The table of docs/results/paper.md."""
    rows = []
    for item in items:
        needs = item.needs.removeprefix("Needs ").partition("; docs/results/paper.md")[0]
        rows.append((item.place, item.about, f"trust-tta bench {FOLDER}/{item.path.name}", needs))
        for analysis in item.analyses:
            part = f" --dataset {analysis.dataset}" if analysis.dataset else ""
            out = f" --out runs/{item.name}-analyses"
            command = f"trust-tta analyse {analysis.kind} {FOLDER}/{item.path.name}{part}{out}"
            rows.append((analysis.place, analysis.about, command, f"as {item.name}"))
    rows.sort(key=lambda row: place_rank(row[0]))
    lines = ["| place | what | command | data and networks |", "| --- | --- | --- | --- |"]
    lines += [f"| {place} | {about} | `{command}` | {needs} |" for place, about, command, needs in rows]
    return "\n".join(lines) + "\n"


def fill(page: str) -> str:
    """The page with the table after the marker written anew."""
    before, after = page.split(MARKER)
    rest = re.sub(r"\A(\|.*\n)+", "", after)
    return f"{before}{MARKER}{markdown(read_items(ROOT / FOLDER))}{rest}"


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
