"""Lazy imports: optional packages, and the public names of our own packages."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
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


def stub_exports(package: str, file: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package that imports its public names on first use.

    The stub next to `file`, the package's `__init__.py`, lists the names and their modules.
    """
    stub = Path(file).with_suffix(".pyi").read_text(encoding="utf-8")
    modules = {name: module for module, name in re.findall(r"^from (\S+) import (\w+) as \2$", stub, re.MULTILINE)}
    public = sorted([*modules, *re.findall(r"^(__version__): str$", stub, re.MULTILINE)])

    def find(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if modules[name] == package:  # a subpackage
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(modules[name]), name)

    return find, lambda: public, public
