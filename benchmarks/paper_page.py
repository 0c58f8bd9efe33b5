"""Write the table of experiments in docs/results/paper.md: PYTHONPATH=src python -m benchmarks.paper_page"""

from __future__ import annotations

import re
from collections.abc import Sequence

from benchmarks.pages import RESULTS, ROOT, table

from trust_tta.cli.paper import FOLDER, RANKED, PaperExperiment, place_rank, read_items

PAGE = RESULTS / "paper.md"
MARKER = "<!-- made by: python -m benchmarks.paper_page -->\n\n"
ANALYSES = (  # figures of table1's networks that are not benchmarks: place, content, kind, data set
    ("Figure 2", "loss on the plane through three adapted networks and their mean", "surface", "imagenet-c"),
    ("Figure 9", "peak memory of the parallel mode by the number of orders", "memory", "imagenet-c"),
    ("Figures 12 and 13", "norms of adapted weights and biases over orders", "norms", "cifar10-c"),
)


def markdown(items: Sequence[PaperExperiment]) -> str:
    """The table of docs/results/paper.md."""
    rows = []
    for item in items:
        needs = item.needs.removeprefix("Needs ").partition("; docs/results/paper.md")[0]
        rows.append((item.place, item.about, f"`trust-tta bench {FOLDER}/{item.path.name}`", needs))
        if item.name in RANKED:
            command = f"`trust-tta rank {FOLDER}/{item.path.name} --json runs/{item.name}-orders`"
            rows.append((*RANKED[item.name], command, f"as {item.name}"))
    for place, about, kind, dataset in ANALYSES:
        options = f"{kind} {FOLDER}/table1.toml --dataset {dataset} --out runs/orders"
        rows.append((place, about, f"`python -m benchmarks.order_analysis {options}`", "as table1"))
    rows.sort(key=lambda row: place_rank(row[0]))
    return table(["place", "what", "command", "data and networks"], rows) + "\n"


def fill(page: str) -> str:
    """The page with the table after the marker written anew."""
    before, after = page.split(MARKER)
    rest = re.sub(r"\A(\|.*\n)+", "", after)
    return f"{before}{MARKER}{markdown(read_items(ROOT / FOLDER))}{rest}"


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
