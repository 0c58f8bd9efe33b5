"""The command `trust-tta`: the parser, the exit codes, and one line for every mistake.

Exit codes: 0 done; 1 failed (the machine could not do it); 2 misused (the command line, or something that it
names, cannot be used); 130 interrupted. Only an error of trust-tta itself shows a traceback.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import NoReturn, Protocol, cast

from trust_tta._version import __version__
from trust_tta.errors import CheckpointError, ConfigError, DataError, ShapeError, TrustError

# To add a command: write trust_tta/cli/<name>.py with the four members of `Command`, and name it here.
COMMANDS = (
    "demo", "bench", "rank", "analyse", "paper", "corrupt", "data", "train", "finetune", "report", "speed", "doctor",
)  # fmt: skip

MISUSES = (CheckpointError, ConfigError, DataError, ShapeError)


class Command(Protocol):
    """What a command's module offers; it imports nothing heavy before `run`, so that --help is instant."""

    HELP: str
    EXAMPLES: str

    def add_arguments(self, parser: ArgumentParser, /) -> None: ...

    def run(self, arguments: Namespace, /) -> None: ...


class Parser(ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see: {self.prog} --help\n")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        sys.stdout.flush()  # help that cannot be written fails like any other output
        super().exit(status, message)


def load_command(name: str) -> Command:
    return cast(Command, importlib.import_module(f"trust_tta.cli.{name}"))


def build_parser() -> Parser:
    parser = Parser(
        prog="trust-tta",
        description="Test-time adaptation of vision state-space models: VMamba, TRUST and its baselines.",
        epilog="exit codes: 0 done, 1 failed, 2 misused, 130 interrupted",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"trust-tta {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        command = load_command(name)
        subparser = commands.add_parser(
            name,
            help=command.HELP,
            description=command.HELP,
            epilog=f"examples:\n{command.EXAMPLES}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add_arguments(subparser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; argparse itself leaves with 0 or 2."""
    try:
        arguments = build_parser().parse_args(argv)
        load_command(arguments.command).run(arguments)
        sys.stdout.flush()
    except TrustError as error:
        return _fail(str(error), 2 if isinstance(error, MISUSES) else 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:  # the reader went away, as with `| head`
        _give_up_output()
        return 1
    except OSError as error:
        if error.errno is None:  # not of the system: a defect
            raise
        return _fail(f"'{error.filename}': {error.strerror}" if error.filename else str(error.strerror), 1)
    return 0


def _fail(message: str, code: int) -> int:
    _give_up_output()
    print("trust-tta:", " ".join(message.split()), file=sys.stderr)
    return code


def _give_up_output() -> None:
    """Write what is left of the output; what cannot be written must not raise again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
