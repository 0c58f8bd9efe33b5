"""The names a user can type, known without loading PyTorch, so that a wrong one is answered at once."""

from __future__ import annotations

import ast
import re
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from trust_tta.config_io import read_toml
from trust_tta.errors import CheckpointError, ConfigError

CORRUPTED = ("sample", "array")  # data sets that are corrupted as they are read


def methods() -> list[str]:
    from trust_tta.methods.registry import list_methods

    return list_methods()


def options(method: str) -> list[str]:
    """The options of a built-in method, as the type stub lists them; none if they are unknown."""
    tree = ast.parse(resources.files("trust_tta.methods").joinpath("typed.pyi").read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    keywords = {
        str(ast.literal_eval(node.args.args[0].annotation.slice)): ast.unparse(node.args.kwarg.annotation.slice)
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and isinstance(node.args.args[0].annotation, ast.Subscript)
        and isinstance(node.args.args[0].annotation.slice, ast.Constant)
        and node.args.kwarg is not None
        and isinstance(node.args.kwarg.annotation, ast.Subscript)
    }
    found, pending = list[str](), [keywords.get(method, "")]
    while pending and (node := classes.get(pending.pop())):
        found += [
            field.target.id
            for field in node.body
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        ]
        pending += [ast.unparse(base) for base in node.bases]
    return found


def check_options(given: Iterable[tuple[str, str, Any]]) -> None:
    """Check the methods and options of --option."""
    for method, name, _ in given:
        check("--option", method, methods())
        if known := options(method):
            check(f"--option {method}:", name, known)


def models() -> list[str]:
    from trust_tta.models.variants import VARIANTS
    from trust_tta.plugins import installed

    return [*sorted(VARIANTS), *installed("trust_tta.models")]


def datasets() -> list[str]:
    from trust_tta.data.specs import DATASETS
    from trust_tta.plugins import installed

    return [*(spec.name for spec in DATASETS), *installed("trust_tta.datasets")]


def domains(dataset: str) -> list[str]:
    """The domains of a data set; none if its folders decide."""
    from trust_tta.data.classes import fold_name
    from trust_tta.data.specs import DATASETS

    if dataset in CORRUPTED:
        return ["clean", *corruptions()]
    specs = [spec for spec in DATASETS if fold_name(spec.name) == fold_name(dataset) and spec.domains]
    found = [name for spec in specs for domain in spec.domains for name in (domain.name, *domain.folders)]
    corrupted = ["clean", *corruptions()] if any(spec.layout == "pixels" for spec in specs) else []
    return [*found, *corrupted]


def corruptions() -> list[str]:
    from trust_tta.data.corruptions.table import ALL_CORRUPTIONS

    return list(ALL_CORRUPTIONS)


def check(flag: str, name: object, known: Iterable[str]) -> None:
    """Refuse a name that is neither known, in any case, nor "package.module:Name", and suggest the nearest."""
    from trust_tta.schema import did_you_mean, show

    choices = list(known)
    if not isinstance(name, str) or (":" not in name and _fold(name) not in map(_fold, choices)):
        raise ConfigError(f"{flag} {show(name)} is unknown; {did_you_mean(name, choices)}")


def check_each(flag: str, given: Iterable[object] | None, known: Iterable[str]) -> None:
    choices = list(known)
    for name in given or ():
        check(flag, name, choices)


def check_flags(arguments: Namespace) -> None:
    """Check the flags that several commands have: the checkpoint, the network and the device."""
    from trust_tta.schema import show

    given = {name: value for name, value in vars(arguments).items() if value is not None}
    if "checkpoint" in given:
        check_checkpoint("--checkpoint", given["checkpoint"])
    for name in given.keys() & {"model", "variant"}:
        check(f"--{name}", given[name], models())
    if "device" in given and not re.fullmatch(r"auto|cpu|cuda(:\d+)?", given["device"]):
        raise ConfigError(f"--device {show(given['device'])} is unknown; give auto, cpu, cuda or cuda:1")


def check_checkpoint(flag: str, source: str) -> None:
    """Refuse what is neither a file nor a known name; names that depend on the domain are checked later."""
    from trust_tta.models.pretrained import PRETRAINED
    from trust_tta.schema import did_you_mean

    if "{domain}" in source or source.startswith("hf:") or source in PRETRAINED or Path(source).exists():
        return
    path = Path(source).suffix or "/" in source
    hint = "give a .pth or .safetensors file or a known name" if path else did_you_mean(source, PRETRAINED)
    raise CheckpointError(f"{flag} {source}: there is no such checkpoint; {hint}")


def check_setting(flag: str, setting: str) -> None:
    from trust_tta.data.streams import parse_setting

    try:
        parse_setting(setting)
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from None


def check_run(arguments: Namespace) -> None:
    """Check the names in the configuration and in the flags, and flags that exclude each other."""
    config = _glance(arguments.config)
    _check_file(config, str(arguments.config))
    check_flags(arguments)
    if arguments.dataset is not None:
        check("--dataset", arguments.dataset, [*CORRUPTED, *datasets()])
        if arguments.dataset != "array" and (arguments.images or arguments.labels):
            raise ConfigError(f"--images and --labels go with --dataset array, not with --dataset {arguments.dataset}")
    dataset = arguments.dataset or _table(config, "data").get("dataset")
    if isinstance(dataset, str) and (known := domains(dataset)):
        check_each("--domains", arguments.domains, known)
    if arguments.setting is not None:
        check_setting("--setting", arguments.setting)


def _glance(path: str | None) -> dict[str, Any]:
    """A configuration as it is written; other mistakes are reported when it is parsed."""
    if path is None:
        return {}
    if not Path(path).is_file():
        raise ConfigError(f"there is no configuration '{path}'; give a TOML file{_nearest(Path(path))}")
    try:
        return read_toml(path)
    except ConfigError:
        return {}


def _check_file(config: Mapping[str, Any], path: str) -> None:
    """Report all wrong names of a configuration, its parts and its small scale in one line."""
    parts = config.get("parts")
    tables = [config, *(parts if isinstance(parts, list) else ()), config.get("small")]
    found = [mistake for table in tables if isinstance(table, Mapping) for mistake in _wrong_names(table)]
    if found:
        raise ConfigError(f"{path}: {'; '.join(dict.fromkeys(found))}")


def _wrong_names(config: Mapping[str, Any]) -> Iterator[str]:
    listed = config.get("methods")
    for entry in listed if isinstance(listed, list) else ():
        table = entry if isinstance(entry, Mapping) else {"name": entry}
        method = table.get("name")
        if isinstance(method, str):
            yield from _problems(check, "method", method, methods())
            if known := options(method):
                named = [option for option in table if option not in ("name", "label", "options")]
                yield from _problems(check_each, f"{method}:", named, known)
    if isinstance(name := _table(config, "model").get("name"), str):
        yield from _problems(check, "model", name, models())
    if isinstance(dataset := _table(config, "data").get("dataset"), str):
        yield from _problems(check, "data set", dataset, [*CORRUPTED, *datasets()])
    if isinstance(setting := _table(config, "stream").get("setting"), str):
        yield from _problems(check_setting, "stream.setting", setting)


def _problems(test: Callable[..., None], *given: object) -> Iterator[str]:
    try:
        test(*given)
    except ConfigError as error:
        yield str(error)


def _table(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = config.get(name)
    return table if isinstance(table, Mapping) else {}


def _nearest(path: Path) -> str:
    """The file in the same folder with the nearest name, as a question."""
    from difflib import get_close_matches

    siblings = [file.name for file in path.parent.glob("*.toml")] if path.parent.is_dir() else []
    close = get_close_matches(path.name, siblings, n=1)
    return f"; did you mean '{path.with_name(close[0])}'?" if close else ""


def _fold(name: str) -> str:
    return name.lower().replace("_", "-").replace(" ", "-")
