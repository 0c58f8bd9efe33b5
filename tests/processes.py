"""Processes that start within a moment: forked from one that has the imports behind it, and nothing else."""

from __future__ import annotations

import os
import runpy
import sys
import warnings
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path

IMPORTS = ["trust_tta.serve.server", "torch._dynamo"]


def forking_context() -> ForkServerContext:
    context = get_context("forkserver")
    context.set_forkserver_preload(IMPORTS)
    return context


def run_script(script: Path, folder: Path, *, timeout: float = 120) -> tuple[int | None, str, str]:
    """Exit code, output and errors of a Python script, run in a folder with warnings as errors."""
    output, errors = script.with_suffix(".out"), script.with_suffix(".err")
    child = forking_context().Process(target=_run_script, args=(script, folder, output, errors))
    child.start()
    child.join(timeout)
    child.kill()
    child.join()
    return child.exitcode, output.read_text(encoding="utf-8"), errors.read_text(encoding="utf-8")


def _run_script(script: Path, folder: Path, output: Path, errors: Path) -> None:
    os.chdir(folder)
    for number, path in ((1, output), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    sys.argv = [str(script)]
    sys.path.insert(0, str(script.parent))
    warnings.simplefilter("error")
    runpy.run_path(str(script), run_name="__main__")
