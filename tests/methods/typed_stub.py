"""Writes `methods/typed.pyi`, which tells editors and mypy the options of every method: `make typed`."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import trust_tta
from trust_tta.methods.base import MethodOptions
from trust_tta.methods.registry import METHODS, find_method

STUB = Path(trust_tta.__file__).parent / "methods" / "typed.pyi"
HEADER = '''"""`create_method` with the options of every method. Written by `make typed`: do not edit."""

from collections.abc import Sequence
from typing import Any, Literal, TypedDict, TypeVar, Unpack, overload

from torch import nn

'''
# Options that take more than what they are stored as.
WIDER = {
    "orders": "Sequence[OrderLike | tuple[OrderLike, float]] | None",
    "evaluate_order": "OrderLike",
    "source_statistics": "SourceStatistics | None",
    "fisher": "FisherWeights | None",
}
FALLBACK = """@overload
def create_method(name: type[_M], model: nn.Module, **options: Any) -> _M: ...
@overload
def create_method(name: str, model: nn.Module) -> Method: ...
"""


def render() -> str:
    methods = {name: find_method(name) for name in METHODS}
    classes: dict[str, type[MethodOptions]] = {}
    for method in methods.values():
        chain = [c for c in method.Options.__mro__ if issubclass(c, MethodOptions)]
        classes |= {c.__name__: c for c in reversed(chain)}
    imports = {(m.__module__, m.__name__) for m in methods.values()}
    imports |= {("trust_tta.methods.base", "Method"), ("trust_tta.methods.source_data", "SourceStatistics")}
    imports |= {("trust_tta.methods.source_data", "FisherWeights"), ("trust_tta.orders", "OrderLike")}
    lines = [HEADER + "".join(_imports(imports)), '_M = TypeVar("_M", bound=Method)\n']
    lines += [_keywords(c) for c in classes.values()]
    lines.append("\n")
    for name, method in methods.items():
        options = f"**options: Unpack[{_name(method.Options)}]"
        arguments = f'name: Literal["{name}"], model: nn.Module, {options}'
        definition = f"def create_method({arguments}) -> {method.__name__}: ..."
        if len(definition) > 120:
            definition = f"def create_method(\n    {arguments}\n) -> {method.__name__}: ..."
        lines.append(f"@overload\n{definition}\n")
    return "".join([*lines, FALLBACK])


def _imports(pairs: set[tuple[str, str]]) -> Iterator[str]:
    for module in sorted({module for module, _ in pairs}):
        yield f"from {module} import {', '.join(sorted(name for home, name in pairs if home == module))}\n"
    yield "\n"


def _name(options: type[MethodOptions]) -> str:
    return f"_{options.__name__.removesuffix('Options')}Keywords"


def _keywords(options: type[MethodOptions]) -> str:
    """A TypedDict with what the class adds to, or changes in, its base."""
    base = next((c for c in options.__mro__[1:] if issubclass(c, MethodOptions)), None)
    inherited = base.model_fields if base else {}
    own = [n for n, f in options.model_fields.items() if n not in inherited or f.annotation != inherited[n].annotation]
    parent = f"{_name(base)}" if base else "TypedDict"
    body = "".join(f"    {n}: {WIDER.get(n) or _type(options.model_fields[n].annotation)}\n" for n in own)
    return f"\nclass {_name(options)}({parent}, total=False):" + (f"\n{body}" if body else " ...\n")


def _type(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _type(get_args(annotation)[0])
    if origin is Literal:
        return f"Literal[{', '.join(map(_quoted, get_args(annotation)))}]"
    if origin in (Union, types.UnionType):
        return " | ".join(map(_type, get_args(annotation)))
    return "None" if annotation is type(None) else str(annotation.__name__)


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


if __name__ == "__main__":
    STUB.write_text(render())
