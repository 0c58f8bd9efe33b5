"""Reading an experiment from TOML, from flags or from both; every mistake is told at once."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trust_tta.bench.config import (
    ARRAY,
    CLEAN,
    DTYPES,
    SAMPLE,
    SOURCE_STATISTICS,
    DataConfig,
    MethodConfig,
    ModelConfig,
    RunConfig,
    StreamPlan,
)
from trust_tta.bench.fields import Fields
from trust_tta.bench.scales import PARTS, change, full_scale, pick_parts, small_scale
from trust_tta.data.corruptions.table import ALL_CORRUPTIONS, CORRUPTIONS, SEVERITIES
from trust_tta.data.specs import find_domain, find_spec
from trust_tta.data.streams import parse_setting
from trust_tta.errors import ConfigError
from trust_tta.methods.registry import check_options, create_method, method_options
from trust_tta.models.config import VMambaConfig
from trust_tta.models.variants import VARIANTS
from trust_tta.models.vmamba import VMamba
from trust_tta.preprocessing import Preprocessing, find_preset
from trust_tta.results.codec import canonical_json
from trust_tta.schema import parse


def read_config(path: Path | None, changes: Mapping[str, Any] | None = None, *, small: bool = False) -> RunConfig:
    """The only experiment of a TOML file (None: of `changes` alone), with the `changes` of the command line."""
    parts = read_parts(path, changes, small=small)
    if len(parts) > 1:
        names = ", ".join(part.data.dataset for part in parts)
        raise ConfigError(f"{path} has {len(parts)} parts ({names}); choose one with --dataset")
    return parts[0]


def read_parts(
    path: Path | None, changes: Mapping[str, Any] | None = None, *, small: bool = False
) -> tuple[RunConfig, ...]:
    """The experiments of a TOML file, one for each of its parts, or the one of its small scale.

    Of several parts, a data set among the `changes` picks its own. The small scale is checked even if not chosen.
    """
    content, changes = {} if path is None else _load(path), changes or {}
    mistakes: list[str] = []
    name, origin = ("experiment", "the command line") if path is None else (path.stem, str(path))
    little = small_scale(content, name=name, mistakes=mistakes)
    chosen = full_scale(content, mistakes)
    if small:
        if little is None and not mistakes:
            raise ConfigError(f"{origin} has no section [small]; leave out --small, or write one")
        chosen = [little] if little is not None else []
    elif PARTS in content and "dataset" in changes.get("data", {}):
        chosen = pick_parts(chosen, changes["data"]["dataset"])
    configs = tuple(_parse(tables.where, change(tables.content, changes), name, mistakes) for tables in chosen)
    if little is not None and not small:
        _parse(little.where, little.content, name, mistakes)
    _refuse(mistakes, origin)
    return configs


def parse_config(content: Mapping[str, Any], *, name: str, origin: str) -> RunConfig:
    """The experiment that nested tables describe; all mistakes in one ConfigError."""
    mistakes: list[str] = []
    config = _parse("", content, name, mistakes)
    _refuse(mistakes, origin)
    return config


def _load(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the configuration '{path}' cannot be read ({error.strerror}); give a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration '{path}' is not TOML: {error}") from error


def _refuse(mistakes: list[str], origin: str) -> None:
    if mistakes:
        count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
        raise ConfigError(f"{origin} has {count}: {'; '.join(mistakes)}")


def _parse(where: str, content: Mapping[str, Any], name: str, mistakes: list[str]) -> RunConfig:
    """One experiment; its mistakes are noted behind `where` it is, those of a section shared by several only once."""
    found: list[str] = []
    top = Fields(content, found)
    experiment = top.text("experiment", name)
    config = RunConfig(
        experiment=experiment,
        model=_model(top.table("model")),
        data=_data(top.table("data")),
        stream=_stream(top.table("stream")),
        methods=_methods(top),
        device=top.text("device", "auto"),
        dtype=top.choice("dtype", "float32", DTYPES),
        store=top.text("store", f"runs/{experiment}.sqlite"),
        clean_after=top.flag("clean_after", False),
        keep_samples=top.whole("keep_samples", 0),
        confusion=top.flag("confusion", False),
    )
    _check_together(config, found)
    top.close()
    told = {mistake.split("]: ", 1)[-1] if mistake.startswith(PARTS) else mistake for mistake in mistakes}
    mistakes += [f"{where}{mistake}" for mistake in found if mistake not in told]
    return config


def _check_together(config: RunConfig, mistakes: list[str]) -> None:
    """What no field shows by itself."""
    setting = parse_setting(config.stream.setting)
    if "{domain}" in config.model.checkpoint and setting.reset == "never":
        mistakes.append("model.checkpoint: one network for each {domain} needs a reset at each; use the setting online")
    graded = config.data.corrupts or find_spec(config.data.dataset).has_severities
    if setting.gradual and not graded:
        mistakes.append(f"stream.setting: {config.data.dataset} has no severities, so it has no gradual stream")


def _model(table: Fields) -> ModelConfig:
    name = table.optional_text("name")
    if name is not None and name not in VARIANTS:
        table.complain("name", f"{name!r} is no model; the models are {', '.join(sorted(VARIANTS))}")
    overrides = table.mapping("overrides")
    unknown = sorted(overrides.keys() - set(VMambaConfig.model_fields))
    if unknown:
        table.complain("overrides", f"VMambaConfig has no {', '.join(unknown)}")
    checkpoint = table.optional_text("checkpoint")
    if checkpoint is None:
        table.complain("checkpoint", "is missing; give a .pth or .safetensors file or a known name")
    config = ModelConfig(
        checkpoint=checkpoint or "",
        name=name,
        num_classes=table.optional_whole("num_classes"),
        overrides=overrides,
        preprocessing=_preprocessing(table),
    )
    table.close()
    return config


def _preprocessing(table: Fields) -> Preprocessing | None:
    """A preset by name, or a table of the fields of Preprocessing."""
    given = table.content.get("preprocessing")
    if not isinstance(given, Mapping):
        preset = table.optional_text("preprocessing")
        return None if preset is None else table.try_to("preprocessing", lambda: find_preset(preset), None)
    inner = table.table("preprocessing")
    default = Preprocessing()
    size, resize = inner.whole("size", default.size, least=1), inner.optional_whole("resize")
    crop = inner.flag("crop", resize is not None)
    mean, std = inner.numbers("mean", default.mean), inner.numbers("std", default.std)
    interpolation = inner.text("interpolation", default.interpolation)
    inner.close()
    values = dict(size=size, resize=resize, crop=crop, mean=mean, std=std, interpolation=interpolation)
    return table.try_to("preprocessing", lambda: parse(Preprocessing, values), None)


def _data(table: Fields) -> DataConfig:
    given = table.optional_text("dataset")
    name: str | None = given
    if given is None:
        table.complain("dataset", f"is missing; give {SAMPLE}, {ARRAY} or the name of a data set")
    elif given not in (SAMPLE, ARRAY):
        name = table.try_to("dataset", lambda: find_spec(given).name, None)
    config = DataConfig(
        dataset=name or SAMPLE,
        root=table.text("root", "data"),
        images=table.optional_text("images"),
        labels=table.optional_text("labels"),
        domains=_domains(table, name) if name else table.texts("domains"),
        severity=table.choice("severity", 5, SEVERITIES),
        limit=table.optional_whole("limit"),
        class_mask=table.flag("class_mask", True),
    )
    if (config.dataset == ARRAY) != (config.images is not None and config.labels is not None):
        table.complain("images", f"the data set '{ARRAY}', and no other, has the files images and labels")
    table.close()
    return config


def _domains(table: Fields, dataset: str) -> tuple[str, ...] | None:
    """The domains under their own names."""
    given = table.texts("domains")
    if given is None:
        return CORRUPTIONS if dataset in (SAMPLE, ARRAY) else None
    if dataset in (SAMPLE, ARRAY):
        for name in given:
            if name not in (CLEAN, *ALL_CORRUPTIONS):
                table.complain("domains", f"{name!r} is not one of {', '.join((CLEAN, *ALL_CORRUPTIONS))}")
        return given
    spec = find_spec(dataset)
    if not spec.domains:
        return given
    return tuple(table.try_to("domains", lambda n=name: find_domain(spec, n).name, name) for name in given)  # type: ignore[misc]


def _stream(table: Fields) -> StreamPlan:
    setting = table.text("setting", "online")
    config = StreamPlan(
        setting=table.try_to("setting", lambda: parse_setting(setting).name, "online"),
        batch_sizes=table.wholes("batch_size", 128, least=1),
        seeds=table.wholes("seeds", 0),
        shuffle=table.flag("shuffle", True),
        drop_last=table.flag("drop_last", False),
        gamma=table.number("gamma", 0.1),
    )
    table.close()
    return config


def _methods(top: Fields) -> tuple[MethodConfig, ...]:
    """The methods, each a name or a table; `options` are given to all that have them."""
    top.known += ["methods"]
    given, shared = top.content.get("methods", []), top.mapping("options")
    listed = given if isinstance(given, list) else [given]
    methods = [_method(top, number, entry, shared) for number, entry in enumerate(listed, start=1)]
    found = tuple(method for method in methods if method is not None)
    if not listed:
        top.complain("methods", "is missing; name at least one method")
    unused = sorted(shared.keys() - {option for method in found for option in method_options(method.name)})
    if unused and len(found) == len(listed):
        top.complain("options", f"no listed method has an option {', '.join(unused)}")
    seen = [canonical_json([m.name, m.all_options()]) for m in found]
    for place, method in enumerate(found):
        if seen[place] in seen[:place]:
            top.complain("methods", f"'{method.name}' is there twice with the same options; give it once")
    return found


def _method(top: Fields, number: int, entry: Any, shared: Mapping[str, Any]) -> MethodConfig | None:
    values = {"name": entry} if isinstance(entry, str) else entry
    if not isinstance(values, Mapping) or not isinstance(values.get("name"), str):
        top.complain(f"methods[{number}]", f"{entry!r} is not a name or a table with a name")
        return None
    options = {name: value for name, value in values.items() if name not in ("name", "label")}
    name = values["name"]
    try:
        valid = method_options(name)
    except ConfigError as error:
        top.complain(f"methods[{number}]", str(error))
        return None
    options = {**{option: value for option, value in shared.items() if option in valid}, **options}
    try:
        check_options(name, options)
        if SOURCE_STATISTICS not in valid:
            create_method(name, _toy_network(), **options)
    except ConfigError as error:
        top.complain(f"methods[{number}]", str(error))
        return None
    return MethodConfig(name=name, label=str(values.get("label", "")), options=options)


def _toy_network() -> VMamba:
    """To try options on: a value that is refused must not be found out in the middle of a run."""
    with torch.random.fork_rng(devices=[]):
        return VMamba(VMambaConfig(depths=(1, 1), dims=(4, 8), num_classes=2, norm="batch"))
