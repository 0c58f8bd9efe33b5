"""The documents and the code blocks in them.

A comment in the line before a block says what is special about it: `<!-- run -->` runs a block of commands, and
`<!-- not run: why -->` only compiles a block of Python.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]

PYTHON, SHELLS, OTHERS = "python", ("sh", "bash", "console"), ("toml", "text")
_FENCE = re.compile(r"^( *)(```+|~~~+)(.*)$")
_MARKER = re.compile(r"^<!-- (run|not run: .+) -->$")
_VARIABLES = re.compile(r"^(?:[A-Z_]+=\S+ )+")


@dataclass(frozen=True)
class Block:
    """One fenced block: `line` is that of its first line of code, counted from 1; `marker` what stands before it."""

    page: Path
    line: int
    language: str
    code: str
    marker: str

    def __str__(self) -> str:
        return f"{self.page.name}, line {self.line}"

    @property
    def lines(self) -> list[str]:
        """The commands of a block, without prompts and variables; `console` shows output, too."""
        lines = [line.strip() for line in self.code.replace("\\\n", " ").splitlines()]
        if self.language == "console":
            lines = [line for line in lines if line.startswith("$ ")]
        typed = (_VARIABLES.sub("", line.removeprefix("$ ")) for line in lines)
        return [line for line in typed if line and not line.startswith("#")]

    @property
    def commands(self) -> list[str]:
        """Those of the lines that call `trust-tta`."""
        return [line for line in self.lines if line.split()[0] == "trust-tta"]


def blocks(page: Path, *languages: str) -> list[Block]:
    """The blocks of a page in these languages, or all of them; a block that does not end is an error."""
    found: list[Block] = []
    start: re.Match[str] | None = None
    first, marker, code = 0, "", [""]
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = _FENCE.match(line)
        if start is None and fence:
            start, first, code = fence, number + 1, []
        elif start is not None and fence and line.strip() == start[2]:
            found.append(Block(page, first, start[3].strip(), "\n".join(code) + "\n", marker))
            start, marker = None, ""
        elif start is not None:
            code.append(line.removeprefix(start[1]))
        elif line.strip():
            marked = _MARKER.match(line.strip())
            marker = marked[1] if marked else ""
    if start is not None:
        raise ValueError(f"{page.name}: the block that begins in line {first - 1} does not end")
    return [block for block in found if not languages or block.language in languages]


def table_rows(text: str) -> list[list[str]]:
    """The cells of the body of the first Markdown table in `text`."""
    lines = [line.strip() for line in text.splitlines()]
    start = next(i for i, line in enumerate(lines) if re.fullmatch(r"\|[ :|-]+\|", line))
    rows = []
    for line in lines[start + 1 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def sections(page: Path, level: int = 2) -> dict[str, str]:
    """The text below each heading of this level, by heading; a heading in code is none."""
    text = page.read_text(encoding="utf-8")
    parts = re.split(rf"^{'#' * level} (.+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))
