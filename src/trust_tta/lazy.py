"""Names that a package offers and loads on first use, so that nobody waits for PyTorch who does not need it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping


def offer(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of `package`; `modules`: the names in each of its modules, with spaces."""
    homes = {name: module for module, names in modules.items() for name in names.split()}

    def find(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    return find, lambda: sorted(homes), sorted(homes)
