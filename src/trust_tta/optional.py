"""Imports that wait until they are needed: optional packages, and the names that a package of ours offers."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pkgutil
from collections.abc import Callable
from types import ModuleType

from trust_tta.errors import DependencyError, reason_of


def available(package: str) -> bool:
    """Whether `package` can be found, without importing it."""
    return importlib.util.find_spec(package) is not None


def require(package: str, *, extra: str) -> ModuleType:
    """Import and return `package`, or say which extra of trust-tta installs it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise DependencyError(
            f"the package '{package}' is not installed; install it with: pip install 'trust-tta[{extra}]'"
        ) from error
    except Exception as error:  # such as libraries that do not fit each other
        raise DependencyError(
            f"the package '{package}' is installed and cannot be imported: {type(error).__name__} ({reason_of(error)})"
        ) from error


def version_of(package: str) -> str | None:
    """The version of an installed package; None where it is not installed, or does not say."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def offer(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of `package`, so that nobody waits for PyTorch who does not need it.

    The names are those that its stub, `__init__.pyi`, imports for editors and mypy; each is imported on first use.
    """
    stub = ast.parse(pkgutil.get_data(package, "__init__.pyi") or b"")
    lines = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: str(node.module) for node in lines for alias in node.names}

    def find(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    return find, lambda: sorted(homes), sorted(homes)
