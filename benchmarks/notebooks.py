"""Write the tutorials as notebooks, docs/notebooks/*.ipynb, from their pages.

    python -m benchmarks.notebooks

Text becomes Markdown cells, Python code cells, and each command a cell of its own. The service runs in the background.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
TUTORIALS = sorted((DOCS / "guides").glob("tutorial_*.md"))
INSTALL = """\
import importlib.util

if importlib.util.find_spec("trust_tta") is None:  # as on Colab
    %pip install --quiet 'trust-tta[serve]'
"""
SERVE = """\
import subprocess

service = subprocess.Popen({words})  # in a terminal: {line}
!curl --silent --retry 60 --retry-delay 1 --retry-all-errors localhost:8000/v2/health/ready
"""
_BLOCK = re.compile(r"^(<!-- not run: .+? -->\n)?```(\w+)\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\((?!https?://|#|\.\./)([^)]+)\)")  # to a page of the same folder


def notebook(page: Path) -> str:
    """The JSON of a page's notebook, format 4.5."""
    cells: list[dict[str, object]] = [
        {
            "cell_type": kind,
            "id": f"cell-{number}",
            "metadata": {},
            "source": source.strip("\n").splitlines(keepends=True),
        }
        | ({"execution_count": None, "outputs": []} if kind == "code" else {})
        for number, (kind, source) in enumerate(cells_of(page.read_text(encoding="utf-8")))
    ]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    content = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def cells_of(text: str) -> Iterator[tuple[str, str]]:
    """The kind and the source of each cell."""
    first, end = True, 0
    for block in _BLOCK.finditer(text):
        yield from markdown(text[end : block.start()])
        end = block.end()
        if first:
            yield "code", INSTALL
            first = False
        not_run, language, code = block.groups()
        if not_run or language not in ("python", "sh"):
            yield "markdown", f"```{language}\n{code}```"
        elif language == "python":
            yield "code", code
        else:
            for line in code.replace("\\\n", "").splitlines():
                yield "code", command(" ".join(line.split()))
    yield from markdown(text[end:])
    if "trust-tta serve" in text:
        yield "code", "service.terminate()"


def markdown(text: str) -> Iterator[tuple[str, str]]:
    """A cell whose links lead from the folder of the notebooks; the link to the notebook itself goes."""
    text = re.sub(r"^\[As a notebook\].*\n", "", text, flags=re.MULTILINE)
    if text.strip():
        yield "markdown", _LINK.sub(r"](../guides/\1)", text)


def command(line: str) -> str:
    if line.startswith("trust-tta serve "):
        return SERVE.format(words=json.dumps(shlex.split(line)), line=line)
    return f"!{line}"


if __name__ == "__main__":
    (DOCS / "notebooks").mkdir(exist_ok=True)
    for page in TUTORIALS:
        (DOCS / "notebooks" / f"{page.stem}.ipynb").write_text(notebook(page), encoding="utf-8")
