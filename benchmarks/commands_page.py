"""Write the tables of flags in docs/reference/commands.md from the parsers of the commands.

    PYTHONPATH=src python -m benchmarks.commands_page

A table stands between `<!-- flags: COMMAND -->` and `<!-- end -->`; everything else is written by hand.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from trust_tta.cli.main import build_parser

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "commands.md"
_TABLE = re.compile(r"(<!-- flags: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill(page: str) -> str:
    """The page with its tables as the commands are now."""
    parsers = subparsers(build_parser())
    return _TABLE.sub(lambda match: f"{match[1]}{table(parsers[match[2]])}{match[3]}", page)


def table(parser: argparse.ArgumentParser) -> str:
    """A Markdown table of the flags of a command and, where it has any, of its actions."""
    rows = "".join(f"| `{usage}` | {text} |\n" for usage, text in flags(parser))
    return f"\n| flag | what it does |\n| --- | --- |\n{rows}\n"


def flags(parser: argparse.ArgumentParser, prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, inner in subparsers(parser).items():
        yield from flags(inner, f"{name} ")
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction | argparse._HelpAction):
            continue
        value = "" if action.nargs == 0 else f" {action.metavar or '|'.join(map(str, action.choices or ()))}".rstrip()
        name = ", ".join(action.option_strings) + value if action.option_strings else value.strip()
        yield f"{prefix}{name}".replace("|", r"\|"), (action.help or "").replace("%%", "%").replace("|", r"\|")


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found[0].choices) if found else {}


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
