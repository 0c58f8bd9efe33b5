"""The README keeps its shape; its blocks and links are tested with those of the other documents in tests/docs."""

from __future__ import annotations

import re

from tests.docs.pages import PYTHON, ROOT, SHELLS, blocks
from trust_tta.cli.main import COMMANDS

README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")


def test_readme_is_short() -> None:
    assert len(TEXT.splitlines()) < 150


def test_readme_has_python_and_commands() -> None:
    (python,) = blocks(README, PYTHON)
    assert len(python.code.strip().splitlines()) <= 12
    assert not python.marker
    assert [command for block in blocks(README, *SHELLS) for command in block.commands]


def test_readme_lists_every_command() -> None:
    assert re.findall(r"^\| `trust-tta (\w+)` \|", TEXT, re.MULTILINE) == list(COMMANDS)


def test_readme_has_one_results_block() -> None:
    assert re.search(r"^<!-- results -->\n(.*\n)*<!-- /results -->$", TEXT, re.MULTILINE)
    assert TEXT.count("<!-- results -->") == TEXT.count("<!-- /results -->") == 1


def test_readme_shows_the_report() -> None:
    assert "](docs/assets/report.png)" in TEXT
