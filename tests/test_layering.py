"""The house rules, read from the syntax trees: who may import whom, sizes, prints."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "trust_tta"
FILES = sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi")])

LEAVES = {
    "atomic", "config_io", "errors", "optional", "orders", "plugins", "preprocessing", "progress", "schema",
}  # fmt: skip
ROOMS: dict[str, set[str]] = {
    "ops": set(),
    "data": {"ops"},
    "models": {"ops", "data"},
    "methods": {"ops", "models"},
    "timm": {"models"},
    "live": {"ops", "methods", "models"},
    "export": {"ops", "live", "methods", "models", "data"},
    "serve": {"live", "methods", "models", "data"},
    "results": set(),
    "bench": {"ops", "data", "models", "methods", "results"},
    "report": {"results"},
    "training": {"ops", "data", "models"},
    "distributed": {"data", "models", "methods", "live", "serve", "results", "bench", "training"},
    "cli": {
        "ops", "models", "data", "methods", "live", "export", "serve", "results", "bench", "report", "training",
        "distributed",
    },
    "__main__": {"cli"},
}  # fmt: skip
WITHOUT_TORCH = ("errors", "optional", "orders", "plugins", "progress", "schema", "results", "report")
KERNELS = ("ops/cpu/scan_kernels.py", "ops/cpu/ss2d_kernels.py", "ops/triton/forward.py", "ops/triton/backward.py")


def room(path: Path) -> str:
    """The first name below the package: a room, or a module of its own."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported(nodes: ast.AST) -> Iterator[str]:
    for node in ast.walk(nodes):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            # `from trust_tta import optional` names the module after the import, not before it
            if node.module == "trust_tta":
                yield from (f"trust_tta.{alias.name}" for alias in node.names)
            else:
                yield node.module or ""


def relative(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_a_room_imports_only_the_rooms_below_it(path: Path) -> None:
    own = room(path)
    if own == "__init__":
        return
    allowed = LEAVES | {own} | ROOMS.get(own, set())
    assert own in LEAVES | ROOMS.keys(), f"'{own}' is no room of the table"
    used = {name.split(".")[1] for name in imported(tree(path)) if name.startswith("trust_tta.")} - {"__version__"}
    assert used <= allowed, f"{relative(path)} may not import {sorted(used - allowed)}"


@pytest.mark.parametrize("path", [p for p in FILES if room(p) in WITHOUT_TORCH], ids=relative)
def test_rooms_without_torch(path: Path) -> None:
    assert not [name for name in imported(tree(path)) if name.split(".")[0] == "torch"]


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_functions_are_short(path: Path) -> None:
    limit = 120 if relative(path) in KERNELS else 60
    for node in ast.walk(tree(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= limit, f"{node.name} has {lines} lines"


@pytest.mark.parametrize(("name", "limit"), [("trust", 150), ("tent", 40)])
def test_an_algorithm_of_a_paper_is_one_short_file(name: str, limit: int) -> None:
    assert len((PACKAGE / "methods" / f"{name}.py").read_text().splitlines()) <= limit


@pytest.mark.parametrize("path", [p for p in FILES if room(p) not in ("cli", "__main__")], ids=relative)
def test_nothing_is_printed_outside_the_command_line(path: Path) -> None:
    calls = [n for n in ast.walk(tree(path)) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    assert "print" not in {n.func.id for n in calls if isinstance(n.func, ast.Name)}


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_no_assert_guards_a_user_of_the_library(path: Path) -> None:
    """An assertion vanishes under `python -O` and says nothing to a user; a TrustError does not."""
    assert not [n.lineno for n in ast.walk(tree(path)) if isinstance(n, ast.Assert)]


def test_results_report_and_preprocessing_import_without_torch() -> None:
    present = ["results", "report", "preprocessing"]
    modules = [
        "trust_tta." + ".".join(p.relative_to(PACKAGE).with_suffix("").parts) for p in FILES if room(p) in present
    ]
    names = ", ".join(["trust_tta", *(m.removesuffix(".__init__") for m in modules)])
    code = f"import sys; sys.modules['torch'] = None\nimport {names}\ntrust_tta.ScanOrder('badc'), dir(trust_tta)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_importing_the_package_is_light() -> None:
    heavy = ("torch", "numba", "numpy", "scipy", "PIL", "rich", "pydantic")
    code = f"import sys, trust_tta; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert result.stdout.strip() == "[]"
