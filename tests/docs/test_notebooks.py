"""The notebooks are those of the tutorials, valid, and run from the first cell to the last."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from benchmarks.notebooks import TUTORIALS, notebook

from tests.docs.pages import DOCS, blocks
from tests.docs.test_tutorials import free_port

nbformat = pytest.importorskip("nbformat", reason="needs the extra 'dev'")
NOTEBOOKS = [DOCS / "notebooks" / f"{page.stem}.ipynb" for page in TUTORIALS]
PAIRS = list(zip(TUTORIALS, NOTEBOOKS, strict=True))


@pytest.mark.parametrize(("page", "path"), PAIRS, ids=[p.stem for p in TUTORIALS])
def test_a_notebook_is_that_of_its_page(page: Path, path: Path) -> None:
    """Run `python -m benchmarks.notebooks` after a tutorial has changed."""
    assert path.read_text(encoding="utf-8") == notebook(page)
    nbformat.validate(nbformat.read(path, as_version=4))


@pytest.mark.parametrize(("page", "path"), PAIRS, ids=[p.stem for p in TUTORIALS])
def test_a_notebook_has_all_code_of_its_page(page: Path, path: Path) -> None:
    code = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code")
    for block in blocks(page, "python", "sh"):
        written = [block.code.strip()] if block.language == "python" else [" ".join(w.split()) for w in block.lines]
        assert all(part in code for part in written) != bool(block.marker), str(block)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Jupyter's kernel; a command that fails would not stop it, so each is followed by a check."""
    from nbclient import NotebookClient

    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    content = nbformat.read(path, as_version=4)
    port, cells = free_port(), []
    for cell in content.cells:
        cell.source = cell.source.replace("8000", port)
        cells.append(cell)
        if cell.cell_type == "code" and "\n!" in f"\n{cell.source}":
            cells.append(nbformat.v4.new_code_cell("assert _exit_code == 0"))
    content.cells = cells
    NotebookClient(content, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(output.get("text", "") for cell in content.cells for output in cell.get("outputs", ()))
    assert '"adapted":true' in printed
    assert list(tmp_path.glob("runs/*.html"))
