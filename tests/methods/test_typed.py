"""The methods as editors and mypy see them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.methods.typed_stub import STUB, render

GOOD = """
from torch import nn
import trust_tta as tt
from trust_tta.methods import Tent

def use(model: nn.Module) -> None:
    method: Tent = tt.create_method("tent", model, lr=1e-3, statistics="stream", entropy="come")
    rate: float = method.options.lr
    orders = tt.create_method("trust", model, orders=["badc", (0, 1, 2, 3)], mode="split").orders
    other: tt.Method = tt.create_method("her.package:Name", model)
    own: Tent = tt.create_method(Tent, model, lr=2)
    stream = tt.Stream(own, guard=tt.Guard(budget=0.1))
    print(rate, orders, other, own, stream)
"""
BAD = {
    'tt.create_method("tent", model, learning_rate=1)': "call-overload",
    'tt.create_method("tent", model, statistics="batches")': "call-overload",
    'tt.create_method("source", model, lr=1e-3)': "call-overload",
    'tt.create_method("tent", model).options.rho': "attr-defined",
    "tt.Guard(budgets=0.1)": "call-arg",
}


def test_the_stub_is_what_the_declarations_give() -> None:
    assert STUB.read_text() == render(), "run `make typed`"


@pytest.mark.slow
def test_options_are_checked_by_mypy(tmp_path: Path) -> None:
    """As users call it: without the configuration of this repository, and so without pydantic's plugin."""
    lines = "\n".join(f"    {call}" for call in BAD)
    (tmp_path / "use.py").write_text(f"{GOOD}\ndef misuse(model: nn.Module) -> None:\n{lines}\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "use.py"]
    paths = {**os.environ, "MYPYPATH": str(STUB.parents[2])}
    found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False, env=paths).stdout
    errors = [line for line in found.splitlines() if line.startswith("use.py") and ": error:" in line]
    assert len(errors) == len(BAD), found
    for line, code in zip(errors, BAD.values(), strict=True):
        assert code in line
