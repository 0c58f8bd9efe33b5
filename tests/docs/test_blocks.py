"""Every block of the documents is run or parsed; none is passed over in silence."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, OTHERS, PAGES, PYTHON, ROOT, SHELLS, Block, blocks
from tests.processes import run_script
from trust_tta.cli.main import build_parser

WITH_PYTHON = [page for page in PAGES if blocks(page, PYTHON)]
WITH_SHELLS = [page for page in PAGES if blocks(page, *SHELLS)]
WITH_COMMANDS = [page for page in PAGES if any(block.commands for block in blocks(page, *SHELLS))]
WITH_RUNS = [page for page in PAGES if any(block.marker == "run" for block in blocks(page, *SHELLS))]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_has_a_checked_language(page: Path) -> None:
    for block in blocks(page):
        assert block.language in (PYTHON, *SHELLS, *OTHERS), f"{block}: say what it is (text, if nothing else)"
        if block.marker == "run":
            assert block.language in SHELLS, f"{block}: Python runs without being asked"
        elif block.marker:
            assert block.language == PYTHON, f"{block}: commands run only where they are marked"


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name)
def test_python_runs(page: Path, tmp_path: Path) -> None:
    """The blocks of one page share one process and run in turn; lines keep their numbers in the traceback."""
    lines = [""] * len(page.read_text(encoding="utf-8").splitlines())
    for block in blocks(page, PYTHON):
        compile(block.code, str(block), "exec")
        if not block.marker:
            code = block.code.splitlines()
            lines[block.line - 1 : block.line - 1 + len(code)] = code
    script = tmp_path / f"{page.stem}.py"
    script.write_text("\n".join(lines) + "\n", encoding="utf-8")
    work = tmp_path / "work"
    work.mkdir()
    status, output, errors = run_script(script, work)
    assert status == 0, f"{name(page)}\n{errors}"
    for said in re.findall(r"print\(error\)  # (.+)", "\n".join(lines)):
        for part in said.split("..."):
            assert part.strip() in output, f"{name(page)}: the error is not what it says"


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name)
def test_commands_parse(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is taken by the parser of the program itself, so no flag is named that does not exist."""
    for block in blocks(page, *SHELLS):
        for line in block.commands:
            refused = exit_code(shlex.split(line, comments=True)[1:])
            assert not refused, f"{block}: {line}\n{capsys.readouterr().err}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_in_the_text_parse(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that are written with flags; a bare name may lack what the command needs."""
    for line in re.findall(r"`trust-tta ([a-z]+ [^`]*--[^`]*)`", page.read_text(encoding="utf-8")):
        assert not exit_code(shlex.split(line)), f"{name(page)}: {line}\n{capsys.readouterr().err}"


def exit_code(argv: list[str]) -> object:
    """The exit status of parsing: 0, also for --help and --version."""
    try:
        build_parser().parse_args(argv)
    except SystemExit as leaving:
        return leaving.code
    return 0


@pytest.mark.parametrize("page", WITH_SHELLS, ids=name)
def test_files_named_in_shell_blocks_exist(page: Path) -> None:
    """Targets of make, extras of pip and scripts of Python exist; curl asks our service; nothing else is called."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for block in blocks(page, *SHELLS):
        for line in block.lines:
            program, *words = shlex.split(line, comments=True)
            assert program in ("trust-tta", "make", "pip", "python", "curl"), f"{block}: {line}"
            if program == "curl":
                assert "localhost:8000/" in line, f"{block}: {line}"  # the service of these pages
            if program == "make":
                assert set(words) <= targets, f"{block}: {line}"
            elif program == "python" and words[0] != "-m":
                assert (ROOT / words[0]).is_file(), f"{block}: {line}"
            for named in re.findall(r"\[([\w,]+)\]", line) if program == "pip" else []:
                assert set(named.split(",")) <= extras.keys(), f"{block}: {line}"


@pytest.mark.parametrize("page", WITH_RUNS, ids=name)
def test_marked_commands_run(page: Path, tmp_path: Path) -> None:
    for block in blocks(page, *SHELLS):
        if block.marker == "run":
            assert block.commands == block.lines, f"{block}: only trust-tta is run"
            run_commands(block, tmp_path)


def run_commands(block: Block, folder: Path) -> None:
    for line in block.commands:
        argv = shlex.split(line, comments=True)[1:]
        done = subprocess.run(
            [sys.executable, "-m", "trust_tta", *argv],
            cwd=folder,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{block}: {line}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("block", [b for page in PAGES for b in blocks(page, "toml")], ids=str)
def test_toml_parses(block: Block) -> None:
    assert tomllib.loads(block.code)


def test_protocol_page_has_configurations(tmp_path: Path) -> None:
    from trust_tta.bench.parsing import read_parts

    whole, parted, _ = blocks(DOCS / "reference" / "protocol.md", "toml")  # the last is of things from outside
    path = tmp_path / "mine.toml"
    path.write_text(whole.code, encoding="utf-8")
    assert read_parts(path, {})[0].experiment == "mine"
    path.write_text(parted.code, encoding="utf-8")
    parts = read_parts(path, {}, small=False)
    assert [(part.data.dataset, part.store) for part in parts] == [
        ("cifar10-c", "runs/mine.sqlite"),
        ("cifar100-c", "runs/mine.sqlite"),
    ]
    (small,) = read_parts(path, {}, small=True)
    assert (small.experiment, small.store, small.data.limit) == ("mine-small", "runs/mine-small.sqlite", 96)


def test_blocks_are_found_wherever_they_stand(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "- item\n\n  <!-- not run: no data -->\n  ```python\n  a = 1\n  ```\n"
        "```console\n$ A=1 trust-tta x \\\n  y\nz\n```\n"
    )
    python, shell = blocks(page)
    assert (python.language, python.line, python.code, python.marker) == ("python", 5, "a = 1\n", "not run: no data")
    assert (shell.commands, shell.marker) == (["trust-tta x    y"], "")
    page.write_text("```python\na = 1\n")
    with pytest.raises(ValueError, match="does not end"):
        blocks(page)
