"""The command line's frame: exit codes, one-line errors, help that needs no PyTorch."""

from __future__ import annotations

import os
import subprocess
import sys
import types
import warnings
from argparse import ArgumentParser, Namespace
from pathlib import Path

import pytest

from trust_tta import __version__, errors
from trust_tta.cli import main as frame


def make_command(monkeypatch: pytest.MonkeyPatch, error: BaseException | None) -> None:
    """A command `probe` that raises `error`, or does nothing."""

    def run(arguments: Namespace) -> None:
        if error is not None:
            raise error

    def add_arguments(parser: ArgumentParser) -> None:
        parser.add_argument("--count", type=int)

    module = types.ModuleType("trust_tta.cli.probe")
    vars(module).update(EXAMPLES="  trust-tta probe", add_arguments=add_arguments, run=run)
    monkeypatch.setitem(sys.modules, "trust_tta.cli.probe", module)
    monkeypatch.setattr(frame, "COMMANDS", {"probe": "probe"})


CODES: list[tuple[BaseException | None, int, str]] = [
    (None, 0, ""),
    (errors.ConfigError("no such option"), 2, "no such option"),
    (errors.ShapeError("images have\nanother shape"), 2, "images have another shape"),
    (errors.DataError("no data"), 2, "no data"),
    (errors.CheckpointError("no file"), 2, "no file"),
    (errors.BackendError("no GPU"), 1, "no GPU"),
    (errors.DependencyError("no package"), 1, "no package"),
    (errors.StateError("other state"), 1, "other state"),
    (KeyboardInterrupt(), 130, "interrupted; to start over: trust-tta probe"),
    (PermissionError(13, "Permission denied", "out.npy"), 1, "'out.npy': Permission denied"),
    (OSError(28, "No space left on device"), 1, "No space left on device"),
]


@pytest.mark.parametrize(("error", "code", "line"), CODES, ids=lambda v: type(v).__name__)
def test_exit_codes(
    error: BaseException | None,
    code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_command(monkeypatch, error)
    assert frame.main(["probe"]) == code
    assert capsys.readouterr().err == (f"trust-tta: {line}\n" if line else "")


def test_a_warning_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the file and line of ours that Python would name."""

    def warn(arguments: Namespace) -> None:
        warnings.simplefilter("always")
        warnings.warn("few \x1b[1mimages\nin a batch", UserWarning, stacklevel=1)

    make_command(monkeypatch, None)
    monkeypatch.setattr(sys.modules["trust_tta.cli.probe"], "run", warn)
    assert frame.main(["probe"]) == 0
    assert capsys.readouterr().err == "trust-tta: warning: few ?[1mimages in a batch\n"


def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (ZeroDivisionError("defect"), OSError("no file named")):
        make_command(monkeypatch, error)
        with pytest.raises(type(error)):
            frame.main(["probe"])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["prob"], "unknown command 'prob'; did you mean 'probe'?"),
        (["probe", "--count", "many"], "argument --count: invalid int value: 'many'"),
        (["probe", "--coun", "3"], "unknown option '--coun'; did you mean '--count'?"),
        (["probe", "extra"], "unexpected argument 'extra'; remove it"),
    ],
    ids=lambda v: " ".join(v) or "nothing" if isinstance(v, list) else "",
)
def test_misuse_is_one_line_and_2(
    argv: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_command(monkeypatch, None)
    with pytest.raises(SystemExit) as leaving:
        frame.main(argv)
    error = capsys.readouterr().err
    assert leaving.value.code == 2
    assert words in error
    assert error.count("\n") == 1
    assert "--help" in error


@pytest.mark.parametrize("name", frame.COMMANDS)
def test_every_command_has_help_with_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        frame.main([name, "--help"])
    assert leaving.value.code == 0
    text = capsys.readouterr().out
    assert f"trust-tta {name}" in text.split("examples:")[1]
    assert ".db" not in text  # stores end in .sqlite
    assert "\n" not in frame.COMMANDS[name]


def test_help_needs_no_torch() -> None:
    code = "import sys; from trust_tta.cli.main import build_parser; build_parser(); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_the_module_is_the_command() -> None:
    result = subprocess.run([sys.executable, "-m", "trust_tta", "--version"], capture_output=True, text=True)
    assert (result.returncode, result.stdout.strip()) == (0, f"trust-tta {__version__}")


def test_modules_of_the_current_folder_are_found(tmp_path: Path) -> None:
    """The installed command, unlike `python -m`, does not look there by itself."""
    (tmp_path / "mine.py").write_text("class Photos:\n    def __init__(self, root): raise ValueError('mine')\n")
    code = "import sys; sys.path[0] = '/'; sys.argv[0] = 'trust-tta'; from trust_tta.cli.main import main; main()"
    command = [sys.executable, "-c", code, "data", "check", ".", "--dataset", "mine:Photos"]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert "cannot be imported" not in told.stderr
    assert "mine" in told.stderr


def plain_environment() -> dict[str, str]:
    """One in which output is buffered, as it is by default, and kernels are not interpreted, which is slow."""
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONUNBUFFERED", "TRITON_INTERPRET")}


@pytest.mark.skipif(os.name != "posix", reason="pipes close differently elsewhere")
@pytest.mark.parametrize("arguments", [["data", "list"], ["--help"]], ids=" ".join)
def test_a_closed_pipe_gives_no_traceback(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "trust_tta", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=plain_environment())
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    with process.stderr as stream:
        assert stream.read() == b""
    assert process.wait() == 1


def run_on_full_device(*command: str) -> tuple[int, str]:
    """The exit code and what was said, of Python with these arguments and no room for its output."""
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, *command], stdout=full, stderr=subprocess.PIPE, text=True, env=plain_environment()
        )
    return result.returncode, result.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
@pytest.mark.parametrize("arguments", [["data", "list"], ["--help"]], ids=" ".join)
def test_a_full_stdout_is_one_line(arguments: list[str]) -> None:
    assert run_on_full_device("-m", "trust_tta", *arguments) == (1, "trust-tta: No space left on device\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_mistake_is_reported_even_if_stdout_is_full() -> None:
    code = """
import sys
from trust_tta.cli import data, main
from trust_tta.errors import DataError

def run(arguments):
    print("some output")
    raise DataError("no data")

data.run = run
sys.exit(main.main(["data", "list"]))
"""
    assert run_on_full_device("-c", code) == (2, "trust-tta: no data\n")
