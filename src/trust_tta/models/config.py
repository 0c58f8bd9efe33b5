"""The shape of a VMamba, declared once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from trust_tta.errors import ConfigError
from trust_tta.schema import Schema, parse, show

MOST_PARAMETERS = 1_000_000_000  # ten times the largest published network; 4 GB in float32
MOST_STAGES = 16

Depth = Annotated[int, Field(ge=1, le=256)]
Width = Annotated[int, Field(ge=1, le=16_384)]


class VMambaConfig(Schema):
    """Everything that decides the parameters and the function of a VMamba.

    >>> VMambaConfig(depths=(1, 1), dims=(8, 16), num_classes=5).d_state
    1
    """

    depths: Annotated[tuple[Depth, ...], Field(min_length=1, max_length=MOST_STAGES)] = (2, 2, 8, 2)
    dims: Annotated[tuple[Width, ...], Field(min_length=1, max_length=MOST_STAGES)] = (96, 192, 384, 768)
    num_classes: Annotated[int, Field(ge=1, le=1_000_000)] = 1000
    in_channels: Annotated[int, Field(ge=1, le=1024)] = 3
    patch_size: Annotated[int, Field(ge=1, le=64)] = 4
    overlapping_stem: bool = True  # two stride-2 convolutions instead of one patch convolution
    merging_downsample: bool = False  # 2x2 patch merging instead of a stride-2 convolution
    norm: Literal["layer", "batch"] = "layer"
    d_state: Annotated[int, Field(ge=1, le=256)] = 1
    ssm_ratio: Annotated[float, Field(gt=0, le=16, allow_inf_nan=False)] = 1.0
    dt_rank: Annotated[int, Field(ge=1, le=4096)] | None = None  # None: ceil(dim / 16)
    conv_size: Annotated[int, Field(ge=1, le=31)] = 3
    conv_bias: bool = False
    gate: bool = False
    mlp_ratio: Annotated[float, Field(ge=0, le=16, allow_inf_nan=False)] = 4.0  # 0: no MLP
    drop_path: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.2

    @field_validator("conv_size")
    @classmethod
    def _conv_size_is_odd(cls, value: int) -> int:
        if value % 2 == 0:
            raise ValueError(f"{value} is even; give an odd number")
        return value

    @model_validator(mode="after")
    def _fields_fit_together(self) -> VMambaConfig:
        if len(self.depths) != len(self.dims):
            raise ValueError(f"{len(self.depths)} depths and {len(self.dims)} dims; give one of each per stage")
        if self.overlapping_stem and self.patch_size % 2:
            raise ValueError(f"patch_size is {self.patch_size}; an overlapping stem needs an even one")
        if any(self.ssm_ratio * dim < 1 for dim in self.dims):
            raise ValueError(f"ssm_ratio is {self.ssm_ratio:g}; with dims {self.dims} a scan would have no channels")
        if (count := self.rough_size()) > MOST_PARAMETERS:
            raise ValueError(f"about {count:.1e} parameters; at most {MOST_PARAMETERS:.0e} are built, reduce dims")
        return self

    def rough_size(self) -> float:
        """The number of parameters, to a few percent: those of the large matrices."""
        wide = sum(
            depth * (dim**2 * ((3 if self.gate else 2) * self.ssm_ratio + 2 * self.mlp_ratio)
                     + 4 * self.ssm_ratio * dim * (2 * (self.dt_rank or dim // 16 + 1) + 3 * self.d_state))
            for depth, dim in zip(self.depths, self.dims, strict=True)
        )  # fmt: skip
        merge = 4 if self.merging_downsample else 9
        between = sum(merge * a * b for a, b in zip(self.dims, self.dims[1:], strict=False))
        stem = self.dims[0] * (self.in_channels * self.patch_size**2 + 5 * self.dims[0])
        return wide + between + stem + self.dims[-1] * self.num_classes

    def override(self, changes: Mapping[str, Any]) -> Self:
        """A copy with some fields changed; an unknown field is refused with the nearest known one."""
        kind = type(self)
        own = {name: getattr(self, name) for name in kind.model_fields}
        return parse(kind, {**own, **changes}, where=kind.__name__)

    @classmethod
    def from_official(cls, mapping: Mapping[str, Any]) -> VMambaConfig:
        """Translate the keyword names of upstream's VSSM; a value that cannot be honored is refused."""
        return _from_official(mapping)


class UPerNetConfig(VMambaConfig):
    """A VMamba as a backbone, and the two heads that label its pixels; the second is for training alone.

    >>> UPerNetConfig(num_classes=21).channels
    512
    """

    num_classes: Annotated[int, Field(ge=1, le=1_000_000)] = 150
    channels: Width = 512
    auxiliary_channels: Width = 256
    pools: Annotated[tuple[Annotated[int, Field(ge=1, le=64)], ...], Field(min_length=1, max_length=16)] = (1, 2, 3, 6)
    dropout: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.1

    @model_validator(mode="after")
    def _has_several_stages(self) -> Self:
        if len(self.dims) < 2:
            raise ValueError(f"{len(self.dims)} stage; give depths and dims of at least 2")
        return self

    def rough_size(self) -> float:
        wide, stages = self.channels, len(self.dims)
        pooled = wide * (len(self.pools) * self.dims[-1] + 9 * (self.dims[-1] + len(self.pools) * wide))
        pyramid = wide * (sum(self.dims[:-1]) + 9 * (2 * stages - 1) * wide)
        auxiliary = self.auxiliary_channels * (9 * self.dims[-2] + self.num_classes) if stages > 1 else 0
        classes = (wide - self.dims[-1]) * self.num_classes
        return super().rough_size() + pooled + pyramid + auxiliary + classes


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
    depths = values.get("depths", VMambaConfig.defaults()["depths"])
    if isinstance(values.get("dims"), int) and isinstance(depths, list | tuple) and len(depths) <= MOST_STAGES:
        # upstream doubles a single width at every stage
        values["dims"] = tuple(values["dims"] * 2**i for i in range(len(depths)))
    return parse(VMambaConfig, values, where="upstream configuration")


def _translate(key: str, value: Any) -> dict[str, Any]:
    """Our fields for one of upstream's keywords."""
    if key == "imgsize":
        return {}
    if key == "forward_type":
        # v02..v05 differ upstream in kernels and rounding only; v0 is the first, gated network
        if not isinstance(value, str) or not re.fullmatch(r"v0|v0[2-5](_?noz)?", value):
            raise ConfigError(f"forward_type={show(value)} (known: 'v0', 'v05', 'v05_noz' and its older spellings)")
        return {"gate": not value.endswith("noz")}
    if key == "ssm_dt_rank":
        if value != "auto" and type(value) is not int:
            raise ConfigError(f"ssm_dt_rank={show(value)} (supported: 'auto' or an integer)")
        return {"dt_rank": None if value == "auto" else value}
    if key == "norm_layer" and isinstance(value, str):
        value = value.lower()  # as upstream does
    allowed = _CHOICES.get(key, _FIXED.get(key))
    if allowed is not None and value not in list(allowed):
        raise ConfigError(f"{key}={show(value)} (supported: {', '.join(map(repr, allowed))})")
    if key in _RENAMED:
        return {_RENAMED[key]: _CHOICES[key][value] if key in _CHOICES else value}
    if key not in _FIXED:
        raise ConfigError(f"unknown key {show(key)}")
    return {}
