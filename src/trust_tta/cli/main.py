"""The command `trust-tta`: its parser and exit codes.

0 done; 1 failed (the machine could not do it); 2 misused (the command line, or something that it names, cannot be
used); 130 interrupted. Only a defect of trust-tta itself shows a traceback.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import signal
import sys
import threading
import warnings
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import NoReturn

from trust_tta import __version__
from trust_tta.errors import CheckpointError, ConfigError, DataError, ShapeError, TrustError
from trust_tta.report.text import safe_line

# To add a command: write trust_tta/cli/<name>.py, see `load_command`, and describe it here in one line.
COMMANDS = {
    "demo": "see it work: the shipped VMambas on shipped images, four corruptions, five methods, tables and a report",
    "bench": "run methods on the domains of a data set, resumable, into a results store",
    "rank": "rank the 24 scan orders by entropy on given data, by default on 256 images per domain",
    "paper": "list the tables and figures of the TRUST paper, or run them and write a report of each",
    "corrupt": "corrupt an array into the layout of CIFAR-10-C, or an image folder into that of ImageNet-C",
    "data": "list, fetch and check data sets",
    "train": "train a network; if run again, it continues after the last complete epoch",
    "finetune": "train only the classifier on a frozen backbone, whose features are computed once",
    "report": "make tables, figures and one self-contained HTML page from a results store",
    "speed": "time forward, Tent, each mode of TRUST and the scan against the reference, in one run",
    "serve": "serve a network that adapts on what it sees, over HTTP, with a guard and a live page",
    "export": "write a network, adapted or not, as ONNX, a PyTorch export or safetensors, and compare it with PyTorch",
    "doctor": "say what this machine can run, and check every usable scan backend",
}

MISUSES = (CheckpointError, ConfigError, DataError, ShapeError)


class Parser(ArgumentParser):
    """An argument parser whose errors are one line, with the nearest right name."""

    def error(self, message: str) -> NoReturn:
        end = " See" if message.endswith("?") else "; see"
        self.exit(2, f"{self.prog}: {safe_line(message)}{end}: {self.prog} --help\n")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        sys.stdout.flush()  # help that cannot be written fails like any other output
        super().exit(status, message)

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        """Report an unknown flag together with the nearest known one."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            from trust_tta.schema import did_you_mean

            flag = unknown[0].partition("=")[0]
            if flag.startswith("-"):
                self.error(f"unknown option {flag!r}; {did_you_mean(flag, self._option_string_actions)}")
            self.error(f"unexpected argument {flag!r}; remove it")
        return found, unknown

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is not None and value not in action.choices:
            from trust_tta.schema import did_you_mean

            name = "/".join(action.option_strings) or action.dest
            raise argparse.ArgumentError(None, f"unknown {name} {value!r}; {did_you_mean(value, action.choices)}")


def load_command(name: str) -> ModuleType:
    """The module of a command, with `EXAMPLES`, `add_arguments(parser)` and `run(arguments)`.

    `KEPT`, if there is one, says what remains of an interrupted run. Heavy imports belong into `run`.
    """
    return importlib.import_module(f"trust_tta.cli.{name}")


def build_parser(commands: Iterable[str] = tuple(COMMANDS)) -> Parser:
    """The parser of all commands, with the flags of those in `commands` alone, to save imports."""
    parser = Parser(
        prog="trust-tta",
        description="Test-time adaptation of vision state-space models: VMamba, TRUST and its baselines.",
        epilog="exit codes: 0 done, 1 failed, 2 misused, 130 interrupted",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"trust-tta {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, text in COMMANDS.items():
        command = load_command(name) if name in commands else None
        subparser = subparsers.add_parser(
            name,
            help=text,
            description=text,
            epilog=f"examples:\n{command.EXAMPLES}" if command else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if command:
            command.add_arguments(subparser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; argparse itself leaves with 0 or 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        sys.path.append(os.getcwd())  # where users keep modules of their own; installed ones come first
    try:
        with warnings.catch_warnings(), _sigterm_as_interrupt():
            # One line, without the source location that Python would add.
            warnings.showwarning = lambda message, *_: print(
                "trust-tta: warning:", safe_line(" ".join(str(message).split())), file=sys.stderr
            )
            arguments = build_parser(words[:1]).parse_args(words)
            load_command(arguments.command).run(arguments)
            sys.stdout.flush()
    except TrustError as error:
        return _fail(str(error), 2 if isinstance(error, MISUSES) else 1)
    except KeyboardInterrupt:
        kept = getattr(load_command(words[0]), "KEPT", "") if words and words[0] in COMMANDS else ""
        start = f"{kept}; to continue" if kept else "to start over"
        return _fail(f"interrupted; {start}: {shlex.join(['trust-tta', *words])}", 130)
    except BrokenPipeError:  # as with `| head`
        _flush_output()
        return 1
    except OSError as error:
        if error.errno is None:  # not from the system: a defect
            raise
        return _fail(f"'{error.filename}': {error.strerror}" if error.filename else str(error.strerror), 1)
    return 0


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM, so that commands clean up as after Ctrl-C."""

    def interrupt(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one must not disturb the cleanup
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # only there may handlers be set
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _fail(message: str, code: int) -> int:
    _flush_output()
    print("trust-tta:", safe_line(" ".join(message.split())), file=sys.stderr)
    return code


def _flush_output() -> None:
    """Flush stdout; drop what cannot be written, which would raise again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
