"""Records and pages of the benchmarks: their folders, Markdown tables, and marked blocks of text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from trust_tta.atomic import write_whole

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RESULTS, GUIDES = DOCS / "results", DOCS / "guides"


def read_record(path: Path | str) -> Any:
    """The JSON of a record, relative to docs/results."""
    return json.loads((RESULTS / path).read_text(encoding="utf-8"))


def write_record(path: Path, record: object) -> None:
    write_whole(path, json.dumps(record, indent=1) + "\n")


def table(head: Sequence[str], rows: Iterable[Sequence[object]], *, align: str = "---") -> str:
    """A Markdown table; `align` is that of all columns but the first."""
    lines = [head, ["---", *[align] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def fill(page: Path, begin: str, end: str, content: str) -> None:
    """Replace the text between two marks of a page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    write_whole(page, f"{before}{begin}{content}{end}{rest.partition(end)[2]}")
