"""Write the tables of flags in docs/reference/commands.md from the parsers of the commands.

    PYTHONPATH=src python -m benchmarks.commands_page

A table stands between `<!-- flags: COMMAND -->` and `<!-- end -->`; everything else is written by hand.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

from benchmarks import pages

from trust_tta.bench.config import RunConfig
from trust_tta.cli.main import build_parser
from trust_tta.schema import schema_fields

PAGE = pages.DOCS / "reference" / "commands.md"
SHARED = {  # command: the one that explains the shared flags
    "rank": "bench",
    "finetune": "train",
    "serve": "speed",
    "export": "speed",
}
_TABLE = re.compile(r"(<!-- flags: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill(page: str) -> str:
    """The page with its tables as the commands are now."""
    parsers = subparsers(build_parser())
    return _TABLE.sub(lambda match: f"{match[1]}{table(parsers, match[2])}{match[3]}", page)


def table(parsers: dict[str, argparse.ArgumentParser], command: str) -> str:
    """A Markdown table of the flags of a command and of its actions, after a list of those explained elsewhere."""
    own = list(flags(parsers[command]))
    base = SHARED.get(command)
    known = set(flags(parsers[base])) if base else {flag for flag in own if command == "bench" and is_key(flag[1])}
    where = f"[{base}](#{base})" if base else "the keys of a [configuration](protocol.md#configurations)"
    shared = ", ".join(f"`{usage.split()[0].rstrip(',')}`" for usage, text in own if (usage, text) in known)
    rows = [(f"`{usage}`", text) for usage, text in own if (usage, text) not in known]
    listed = f"\nAs {where}: {shared}.\n" if known else ""
    return f"{listed}\n{pages.table(['flag', 'what it does'], rows)}\n\n"


def is_key(text: str) -> bool:
    """Whether a flag sets a key of a configuration, by their shared description."""
    return text.startswith(tuple(description.replace("`", "'") for _, _, description in schema_fields(RunConfig)))


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
