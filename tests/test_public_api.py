"""The public names and the calls that the package promises."""

from __future__ import annotations

import ast
import importlib
import inspect
from importlib import resources
from typing import Any

import pytest

import trust_tta as tt

PROMISED = {
    "Guard", "Method", "ScanOrder", "Stream", "VMamba", "VMambaConfig", "corrupt", "create_method",
    "create_model", "fast", "list_methods", "list_models", "load", "load_checkpoint", "models", "rank_orders",
    "selective_scan",
}  # fmt: skip
ANY: Any = object()


def test_the_public_names_are_exactly_these() -> None:
    assert set(tt.__all__) == PROMISED | {"TrustError", "__version__"}
    assert dir(tt) == sorted(tt.__all__)


@pytest.mark.parametrize("name", sorted(PROMISED))
def test_every_name_is_there_and_documented(name: str) -> None:
    assert inspect.getdoc(getattr(tt, name))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'trust_tta' has no attribute 'adapt'"):
        tt.adapt  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("package", ["", ".data", ".methods", ".models", ".training"])
def test_stubs_list_the_lazy_exports(package: str) -> None:
    module = importlib.import_module(f"trust_tta{package}")
    stub = resources.files(module).joinpath("__init__.pyi").read_text(encoding="utf-8")
    typed = {n.name: f.module for f in ast.parse(stub).body if isinstance(f, ast.ImportFrom) for n in f.names}
    assert sorted(typed) == [name for name in module.__all__ if name != "__version__"]
    for name, home in typed.items():
        assert getattr(module, name) is getattr(importlib.import_module(str(home)), name), name


def test_type_hints_are_shipped() -> None:
    assert resources.files("trust_tta").joinpath("py.typed").is_file()


def test_selective_scan_has_the_promised_signature() -> None:
    parameters = inspect.signature(tt.selective_scan).parameters
    assert [p if d.default is d.empty else (p, d.default) for p, d in parameters.items()] == [
        "u", "delta", "A", "B", "C", ("D", None), ("delta_bias", None), ("delta_softplus", True), ("backend", "auto"),
    ]  # fmt: skip
    assert parameters["delta_bias"].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert parameters["delta_softplus"].kind is parameters["backend"].kind is inspect.Parameter.KEYWORD_ONLY


CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("ScanOrder", ("badc",), {}),
    ("create_model", ("name",), {"num_classes": 10, "checkpoint": "path", "drop_path": 0.1}),
    ("create_model", (), {"checkpoint": "path"}),
    ("load", ("path",), {}),
    ("VMamba", (ANY,), {}),
    ("VMambaConfig.from_official", ({},), {}),
    ("VMamba.forward", (ANY, ANY), {"order": "badc"}),
    ("load_checkpoint", (ANY, "path"), {}),
    ("create_method", ("trust", ANY), {"k": 6, "lr": 1e-4}),
    ("rank_orders", (ANY, []), {}),
    ("corrupt", (ANY, "fog"), {"severity": 5, "seed": 0}),
    ("Stream", (ANY,), {"guard": ANY, "snapshots": "folder"}),
    ("Stream.__call__", (ANY, ANY), {}),
    ("list_models", (), {}),
    ("list_methods", (), {}),
]


@pytest.mark.parametrize(("name", "args", "options"), CALLS, ids=[call[0] for call in CALLS])
def test_promised_calls_fit_the_signatures(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    target: Any = tt
    for part in name.split("."):
        target = getattr(target, part)
    inspect.signature(target).bind(*args, **options)


def test_methods_are_listed_in_the_promised_order() -> None:
    promised = [
        "source", "bn", "tent", "eta", "sar", "shot", "lame", "foa", "trust_naive", "trust", "ensemble", "repetition",
        "augmentation", "tide", "eata", "roid", "cmf", "cotta", "rotta", "deyo", "rdumb", "neo", "t3a",
        "dpcore", "bn_alpha", "bn_ema",
    ]  # fmt: skip
    assert list(tt.list_methods()) == promised


def test_the_scan_order_offers_what_is_promised() -> None:
    assert str(tt.ScanOrder((1, 2, 3, 0)).inverse) == "dabc"
    assert len(tt.ScanOrder.all()) == 24
