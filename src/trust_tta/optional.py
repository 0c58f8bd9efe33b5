"""Optional packages: imported where they are used, with an error that says how to get them."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from trust_tta.errors import DependencyError


def available(package: str) -> bool:
    """Whether `package` can be found, without importing it."""
    return importlib.util.find_spec(package) is not None


def require(package: str, *, extra: str) -> ModuleType:
    """Import and return `package`, or say which extra of trust-tta brings it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise DependencyError(
            f"the package '{package}' is not installed; install it with: pip install 'trust-tta[{extra}]'"
        ) from error
