"""Every Python block of the documents runs, and every command line in them parses."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from trust_tta.cli.main import build_parser

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(path: Path, *languages: str) -> list[str]:
    return [code for language, code in BLOCK.findall(path.read_text()) if language in languages]


def commands(path: Path) -> list[str]:
    text = "\n".join(blocks(path, "sh", "bash", "console")).replace("\\\n", " ")
    return re.findall(r"^\s*(?:\$ )?(?:\w+=\S+ )*(trust-tta\b.*)$", text, re.MULTILINE)


@pytest.mark.parametrize("path", [p for p in DOCUMENTS if blocks(p, "python")], ids=lambda p: p.name)
def test_python_blocks_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of one document run in turn and share their names, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for number, code in enumerate(blocks(path, "python"), 1):
        exec(compile(code, f"{path.name}, block {number}", "exec"), namespace)


def test_the_readme_has_python_and_commands() -> None:
    assert blocks(ROOT / "README.md", "python")
    assert commands(ROOT / "README.md")


@pytest.mark.parametrize("path", [p for p in DOCUMENTS if commands(p)], ids=lambda p: p.name)
def test_command_lines_parse(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused = [line for line in commands(path) if exit_code(shlex.split(line, comments=True)[1:])]
    assert refused == [], capsys.readouterr().err


def exit_code(argv: list[str]) -> object:
    """What parsing leaves with: 0, also for --help and --version."""
    try:
        build_parser().parse_args(argv)
    except SystemExit as leaving:
        return leaving.code
    return 0


def test_links_between_documents_lead_somewhere() -> None:
    for path in DOCUMENTS:
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"
