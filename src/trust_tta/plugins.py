"""Methods, networks and data sets from outside the package.

A name is a built-in one, an installed entry point of the group, "package.module:Name", or a name in a known library:
"timm:NAME" for networks, "hf:NAME" for data sets.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, Literal, TypeAlias

from trust_tta.errors import ConfigError, TrustError, reason_of
from trust_tta.schema import did_you_mean, show

Group: TypeAlias = Literal["trust_tta.methods", "trust_tta.models", "trust_tta.datasets"]

# Functions that take a name in a library and return the object.
_LIBRARIES = {
    ("trust_tta.models", "timm"): "trust_tta.timm:network",
    ("trust_tta.datasets", "hf"): "trust_tta.data.hub:dataset",
}

_KINDS: dict[str, str] = {
    "trust_tta.methods": "method",
    "trust_tta.models": "network",
    "trust_tta.datasets": "data set",
}


def resolve(name: str, known: Mapping[str, Any], *, group: Group) -> Any:
    """The object called `name`: a value of `known`, an entry point of `group`, or an attribute of a module."""
    if not isinstance(name, str) or not name:
        raise ConfigError(f"the name of a {_KINDS[group]} is {show(name)}; give a string")
    if name in known:
        return known[name]
    library, colon, inner = name.partition(":")
    if colon and inner and (group, library) in _LIBRARIES:
        return _import(_LIBRARIES[group, library], kind=_KINDS[group])(inner)
    if colon:
        return _import(name, kind=_KINDS[group])
    for entry in entry_points(group=group):
        if entry.name == name:
            return _import(entry.value, kind=_KINDS[group])
    names = [*known, *installed(group)]
    raise ConfigError(f"unknown {_KINDS[group]} {show(name)}; {did_you_mean(name, names)} (or 'package.module:Name')")


def installed(group: Group) -> list[str]:
    """The names that installed packages add to `group`."""
    return sorted({entry.name for entry in entry_points(group=group)})


def _import(path: str, *, kind: str) -> Any:
    module, _, attribute = path.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
        raise ConfigError(
            f"the {kind} {show(path)} is not 'package.module:Name'; give the module, a colon and the name"
        )
    try:
        target: Any = importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"the {kind} '{path}' cannot be imported ({error}); is '{module}' installed or in PYTHONPATH?"
        ) from error
    except TrustError:
        raise
    except Exception as error:  # whatever the module does when it is imported
        raise ConfigError(
            f"the {kind} '{path}' cannot be imported: '{module}' raises {type(error).__name__} ({reason_of(error)})"
        ) from error
    for step in attribute.split("."):
        if not hasattr(target, step):
            names = [n for n in vars(target) if not n.startswith("_")]
            raise ConfigError(
                f"module '{module}' has no '{attribute}' for the {kind} '{path}'; {did_you_mean(step, names)}"
            )
        target = getattr(target, step)
    return target
