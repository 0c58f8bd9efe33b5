"""The shape of a VMamba as one frozen record."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from trust_tta.errors import ConfigError

NORMS = ("layer", "batch")


@dataclass(frozen=True)
class VMambaConfig:
    """Everything that decides the parameters and the function of a VMamba."""

    depths: tuple[int, ...] = (2, 2, 8, 2)
    dims: tuple[int, ...] = (96, 192, 384, 768)
    num_classes: int = 1000
    in_channels: int = 3
    patch_size: int = 4
    overlapping_stem: bool = True  # two stride-2 convolutions instead of one patch convolution
    merging_downsample: bool = False  # 2x2 patch merging instead of a stride-2 convolution
    norm: Literal["layer", "batch"] = "layer"
    d_state: int = 1
    ssm_ratio: float = 1.0
    dt_rank: int | None = None  # None: ceil(dim / 16)
    conv_size: int = 3
    conv_bias: bool = False
    gate: bool = False
    mlp_ratio: float = 4.0  # 0: no MLP
    drop_path: float = 0.2

    def __post_init__(self) -> None:
        for name in ("depths", "dims"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        problems = _type_problems(self) or _problems(self)
        if problems:
            raise ConfigError("VMambaConfig: " + "; ".join(problems))

    def override(self, changes: Mapping[str, Any]) -> VMambaConfig:
        """A copy with some fields changed; an unknown field is refused with the valid ones."""
        known = [f.name for f in fields(self)]
        unknown = sorted(set(changes) - set(known))
        if unknown:
            raise ConfigError(f"VMambaConfig has no field {', '.join(unknown)}; its fields are {', '.join(known)}")
        return replace(self, **changes)

    @classmethod
    def from_official(cls, mapping: Mapping[str, Any]) -> VMambaConfig:
        """Translate the keyword names of upstream's VSSM; a value we cannot honour is refused."""
        return _from_official(mapping)


def _type_problems(config: VMambaConfig) -> list[str]:
    """Each field must be of the kind of its default; a whole number also does for a number."""
    problems = []
    for field in fields(config):
        value, default = getattr(config, field.name), field.default
        kind, fits = "a text", isinstance(value, str)
        if isinstance(default, tuple):
            kind, fits = "whole numbers", isinstance(value, tuple) and all(type(v) is int for v in value)
        elif isinstance(default, bool):
            kind, fits = "true or false", isinstance(value, bool)
        elif isinstance(default, int) or default is None:
            kind, fits = "a whole number", type(value) is int or value is default is None
        elif isinstance(default, float):
            kind, fits = "a number", type(value) in (int, float)
        if not fits:
            problems.append(f"{field.name} must be {kind}, not {value!r}")
    return problems


def _problems(config: VMambaConfig) -> list[str]:
    checks = {
        "depths and dims must have the same, non-zero length": 0 < len(config.depths) == len(config.dims),
        "depths must be at least 1": all(d >= 1 for d in config.depths),
        "dims must be positive": all(d >= 1 for d in config.dims),
        "num_classes, in_channels and d_state must be at least 1": min(
            config.num_classes, config.in_channels, config.d_state
        )
        >= 1,
        f"norm must be one of {', '.join(NORMS)}, not {config.norm!r}": config.norm in NORMS,
        "patch_size must be even for an overlapping stem": not config.overlapping_stem or config.patch_size % 2 == 0,
        "patch_size must be at least 1": config.patch_size >= 1,
        "conv_size must be odd": config.conv_size % 2 == 1,
        "dt_rank must be at least 1": config.dt_rank is None or config.dt_rank >= 1,
        "ssm_ratio must be positive and mlp_ratio not negative": config.ssm_ratio > 0 and config.mlp_ratio >= 0,
        "drop_path must be in [0, 1)": 0 <= config.drop_path < 1,
    }
    return [message for message, holds in checks.items() if not holds]


# Upstream keywords whose published values change nothing here; any other value is refused.
_FIXED: dict[str, tuple[object, ...]] = {
    "ssm_act_layer": ("silu",),
    "ssm_drop_rate": (0, 0.0),
    "ssm_init": ("v0",),
    "mlp_act_layer": ("gelu",),
    "mlp_drop_rate": (0, 0.0),
    "gmlp": (False,),
    "patch_norm": (True,),
    "use_checkpoint": (False, True),
    "posembed": (False,),
}
_CHOICES: dict[str, dict[Any, Any]] = {
    "norm_layer": {"ln": "layer", "ln2d": "layer", "bn": "batch"},
    "downsample_version": {"v1": True, "v3": False},
    "patchembed_version": {"v1": False, "v2": True},
}
_RENAMED = {
    "depths": "depths",
    "dims": "dims",
    "num_classes": "num_classes",
    "in_chans": "in_channels",
    "patch_size": "patch_size",
    "drop_path_rate": "drop_path",
    "ssm_d_state": "d_state",
    "ssm_ratio": "ssm_ratio",
    "ssm_conv": "conv_size",
    "ssm_conv_bias": "conv_bias",
    "mlp_ratio": "mlp_ratio",
    "norm_layer": "norm",
    "downsample_version": "merging_downsample",
    "patchembed_version": "overlapping_stem",
}


def _from_official(mapping: Mapping[str, Any]) -> VMambaConfig:
    values: dict[str, Any] = {}
    problems: list[str] = []
    for key, value in mapping.items():
        try:
            values |= _translate(key, value)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("upstream configuration not supported: " + "; ".join(problems))
    if isinstance(values.get("dims"), int):  # upstream doubles a single width at every stage
        depths = values.get("depths", VMambaConfig.depths)
        values["dims"] = tuple(values["dims"] * 2**i for i in range(len(depths)))
    return VMambaConfig(**values)


def _translate(key: str, value: Any) -> dict[str, Any]:
    """Our fields for one of upstream's keywords."""
    if key == "imgsize":
        return {}
    if key == "forward_type":
        # v02..v05 differ upstream in kernels and rounding only; v0 is the first, gated network
        if not re.fullmatch(r"v0|v0[2-5](_?noz)?", str(value)):
            raise ConfigError(f"forward_type={value!r} (known: 'v0', 'v05', 'v05_noz' and its older spellings)")
        return {"gate": not str(value).endswith("noz")}
    if key == "ssm_dt_rank":
        if value != "auto" and type(value) is not int:
            raise ConfigError(f"ssm_dt_rank={value!r} (supported: 'auto' or a whole number)")
        return {"dt_rank": None if value == "auto" else value}
    if key == "norm_layer":
        value = str(value).lower()  # as upstream does
    allowed = _CHOICES.get(key, _FIXED.get(key))
    if allowed is not None and value not in list(allowed):
        raise ConfigError(f"{key}={value!r} (supported: {', '.join(map(repr, allowed))})")
    if key in _RENAMED:
        return {_RENAMED[key]: _CHOICES[key][value] if key in _CHOICES else value}
    if key not in _FIXED:
        raise ConfigError(f"unknown key {key!r}")
    return {}
