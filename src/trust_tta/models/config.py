"""Configurations of the networks. No PyTorch here: names and fields are checked before it is imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field, field_validator, model_validator

from trust_tta.errors import ConfigError
from trust_tta.schema import Schema, parse, show

MAX_PARAMETERS = 1_000_000_000  # ten times the largest published network; 4 GB in float32
MAX_STAGES = 16

Classes = Annotated[int, Field(ge=1, le=1_000_000)]
Depth = Annotated[int, Field(ge=1, le=256)]
Width = Annotated[int, Field(ge=1, le=16_384)]
States = Annotated[int, Field(ge=1, le=256)]
Ratio = Annotated[float, Field(gt=0, le=16, allow_inf_nan=False)]
DropPath = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Side = Annotated[int, Field(ge=1, le=16_384)]
Stages = Field(min_length=1, max_length=MAX_STAGES)
Direction = Annotated[str, Field(pattern=r"^(h|v|w([2-9]|[1-9][0-9]))(_flip)?$")]
Four: TypeAlias = tuple[Direction, Direction, Direction, Direction]


class NetworkConfig(Schema):
    """Base class of the configurations: fields and checks of all networks."""

    num_classes: Classes = 1000
    in_channels: Annotated[int, Field(ge=1, le=1024)] = 3
    drop_path: DropPath = 0.2

    @model_validator(mode="after")
    def _can_be_built(self) -> Self:
        self.fit_together()
        if (count := self.rough_size()) > MAX_PARAMETERS:
            raise ValueError(f"about {count:.1e} parameters; at most {MAX_PARAMETERS:.0e} are built, reduce dims")
        return self

    def fit_together(self) -> None:
        """Raise a ValueError where fields contradict each other."""

    def stages(self) -> list[tuple[int, int]]:
        """Depth and channels of each stage."""
        own: Any = self
        return list(zip(own.depths, own.dims, strict=True))

    def block_size(self, dim: int) -> float:
        """Parameters of a block, roughly."""
        return 12.0 * dim**2

    def rough_size(self) -> float:
        """Number of parameters within a factor of three, without building the network."""
        stages, patch = self.stages(), getattr(self, "patch_size", 4)
        blocks = sum(depth * self.block_size(dim) for depth, dim in stages)
        return blocks + self.in_channels * patch**2 * stages[0][1] + stages[-1][1] * self.num_classes

    def require_one_per_stage(self, **fields: Sequence[object]) -> None:
        """Raise a ValueError where lists that hold a value for each stage differ in length."""
        if len({len(values) for values in fields.values()}) > 1:
            counts = [f"{len(values)} {name.replace('_of_', ' of ')}" for name, values in fields.items()]
            raise ValueError(f"{', '.join(counts[:-1])} and {counts[-1]}; give one of each per stage")

    def require_divisors(self, heads: Sequence[int], channels: Sequence[int]) -> None:
        """Raise a ValueError where the heads of a stage do not divide its channels."""
        for count, width in zip(heads, channels, strict=True):
            if width % count:
                raise ValueError(f"{count} heads do not divide {width} channels; give heads that do")

    def changes_from(self, other: NetworkConfig) -> dict[str, Any]:
        """The fields, but for the classes, in which this differs from another configuration of its kind."""
        return {name: value for name, value in self if name != "num_classes" and value != getattr(other, name)}

    def override(self, changes: Mapping[str, Any]) -> Self:
        """A copy with some fields changed; an unknown field is refused with the nearest known one."""
        return parse(type(self), {**dict(self), **changes}, where=type(self).__name__)


class VMambaConfig(NetworkConfig):
    """Architecture of a VMamba.

    >>> VMambaConfig(depths=(1, 1), dims=(8, 16), num_classes=5).d_state
    1
    """

    depths: Annotated[tuple[Depth, ...], Stages] = (2, 2, 8, 2)
    dims: Annotated[tuple[Width, ...], Stages] = (96, 192, 384, 768)
    patch_size: Annotated[int, Field(ge=1, le=64)] = 4
    overlapping_stem: bool = True  # two stride-2 convolutions instead of one patch convolution
    merging_downsample: bool = False  # 2x2 patch merging instead of a stride-2 convolution
    norm: Literal["layer", "batch"] = "layer"
    d_state: States = 1
    ssm_ratio: Ratio = 1.0
    dt_rank: Annotated[int, Field(ge=1, le=4096)] | None = None  # None: ceil(dim / 16)
    conv_size: Annotated[int, Field(ge=1, le=31)] = 3
    conv_bias: bool = False
    gate: bool = False
    mlp_ratio: Annotated[float, Field(ge=0, le=16, allow_inf_nan=False)] = 4.0  # 0: no MLP

    @field_validator("conv_size")
    @classmethod
    def _conv_size_is_odd(cls, value: int) -> int:
        if value % 2 == 0:
            raise ValueError(f"{value} is even; give an odd number")
        return value

    def block_size(self, dim: int) -> float:
        steps = 4 * self.ssm_ratio * dim * (2 * (self.dt_rank or dim // 16 + 1) + 3 * self.d_state)
        return steps + dim**2 * ((3 if self.gate else 2) * self.ssm_ratio + 2 * self.mlp_ratio)

    def fit_together(self) -> None:
        self.require_one_per_stage(depths=self.depths, dims=self.dims)
        if self.overlapping_stem and self.patch_size % 2:
            raise ValueError(f"patch_size is {self.patch_size}; an overlapping stem needs an even one")
        if any(self.ssm_ratio * dim < 1 for dim in self.dims):
            raise ValueError(f"ssm_ratio is {self.ssm_ratio:g}; with dims {self.dims} a scan would have no channels")

    @classmethod
    def from_official(cls, mapping: Mapping[str, Any]) -> VMambaConfig:
        """Translate the keyword names of upstream's VSSM; a value that cannot be honored is refused."""
        given = dict(mapping)
        if isinstance(given.get("norm_layer"), str):
            given["norm_layer"] = given["norm_layer"].lower()  # as upstream does
        return parse(VMambaConfig, _translate(given), where="upstream configuration")


class UPerNetConfig(VMambaConfig):
    """A VMamba backbone and two segmentation heads; the auxiliary one is for training alone.

    >>> UPerNetConfig(num_classes=21).channels
    512
    """

    num_classes: Classes = 150
    channels: Width = 512
    auxiliary_channels: Width = 256
    pools: Annotated[tuple[Annotated[int, Field(ge=1, le=64)], ...], Field(min_length=1, max_length=16)] = (1, 2, 3, 6)
    dropout: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.1

    def fit_together(self) -> None:
        super().fit_together()
        if len(self.dims) < 2:
            raise ValueError(f"{len(self.dims)} stage; give depths and dims of at least 2")

    def rough_size(self) -> float:
        convolutions = 2 * len(self.dims) + len(self.pools)
        return super().rough_size() + 9 * convolutions * self.channels**2


class VimConfig(NetworkConfig):
    """Architecture of a Vim."""

    image_size: tuple[Side, Side] = (224, 224)  # height and width, for which there are position embeddings
    patch_size: Annotated[int, Field(ge=1, le=64)] = 16
    stride: Annotated[int, Field(ge=1, le=64)] = 16  # smaller than the patch size: patches overlap
    dim: Width = 192
    depth: Depth = 24
    d_state: States = 16
    halve: bool = True  # the mean of the two directions instead of their sum
    drop_path: DropPath = 0.1

    @property
    def class_token(self) -> bool:
        return True

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        height, width = ((side - self.patch_size) // self.stride + 1 for side in self.image_size)
        return height, width

    def stages(self) -> list[tuple[int, int]]:
        return [(self.depth, self.dim)]

    def fit_together(self) -> None:
        if min(self.image_size) < self.patch_size:
            raise ValueError(f"image_size is {self.image_size}, smaller than a patch of {self.patch_size}")


class LocalVimConfig(VimConfig):
    """Architecture of a LocalVim: a Vim and the scans of its layers.

    `directions`: four for each layer, as in LocalVMambaConfig.
    """

    depth: Depth = 20
    rotary: bool = True  # the residual is turned by its position before every layer
    middle_token: bool = False  # classify a token in the middle; else the mean of all tokens
    directions: tuple[Four, ...] = ()

    @property
    def class_token(self) -> bool:
        return self.middle_token

    def fit_together(self) -> None:
        super().fit_together()
        if len(self.directions) != self.depth:
            raise ValueError(f"{len(self.directions)} directions and {self.depth} layers; give four for each layer")
        if self.rotary and (self.middle_token or self.dim % 4):
            raise ValueError("rotary=True needs a dim divisible by 4 and no class token")


class GroupMambaConfig(NetworkConfig):
    """Architecture of a GroupMamba."""

    stem_dim: Width = 32
    dims: Annotated[tuple[Width, ...], Stages] = (64, 128, 348, 448)
    depths: Annotated[tuple[Depth, ...], Stages] = (3, 4, 9, 3)
    mlp_ratios: Annotated[tuple[Ratio, ...], Stages] = (8, 8, 4, 4)
    two_heads: bool = True  # the second was trained by distillation; predictions are their mean

    def fit_together(self) -> None:
        self.require_one_per_stage(dims=self.dims, depths=self.depths, mlp_ratios=self.mlp_ratios)
        if any(dim % 4 or dim < 16 for dim in self.dims):
            raise ValueError(
                f"dims are {self.dims}; give multiples of 4, from 16 on: there are four groups of channels"
            )


class VanillaConfig(VMambaConfig):
    """Defaults of the first VMamba, on which some networks build."""

    overlapping_stem: bool = False
    merging_downsample: bool = True
    d_state: States = 16
    ssm_ratio: Ratio = 2.0
    conv_bias: bool = True
    gate: bool = True
    mlp_ratio: Annotated[float, Field(ge=0, le=16, allow_inf_nan=False)] = 0.0


class LocalVMambaConfig(VanillaConfig):
    """Architecture of a LocalVMamba: a VMamba and the scans of its blocks.

    `directions`: four for each block, from "h" (rows), "v" (columns), "wK" (windows of KxK) and their "_flip".
    """

    directions: tuple[Four, ...] = ()

    def fit_together(self) -> None:
        super().fit_together()
        if len(self.directions) != sum(self.depths):
            raise ValueError(
                f"{len(self.directions)} directions and {sum(self.depths)} blocks; give four for each block"
            )
        if any(self.ssm_ratio * dim < 8 for dim in self.dims):
            raise ValueError(
                f"ssm_ratio is {self.ssm_ratio:g}; with dims {self.dims} an attention would have no channels"
            )


class MSVMambaConfig(VMambaConfig):
    """Architecture of an MSVMamba or MSVMambav3.

    `first_generation`: the norm comes before the directions are summed, and the small map is upsampled bilinearly.
    """

    first_generation: bool = False
    depths: Annotated[tuple[Depth, ...], Stages] = (2, 2, 9, 2)
    conv_bias: bool = True
    mlp_ratio: Annotated[float, Field(ge=0, le=0)] = 0.0  # there is an FFN with a convolution instead
    ffn_ratio: Ratio = 4.0

    def block_size(self, dim: int) -> float:
        return super().block_size(dim) + 2 * self.ffn_ratio * dim**2


class EfficientVMambaConfig(VanillaConfig):
    """Architecture of an EfficientVMamba: the first two stages scan, the others convolve."""

    depths: Annotated[tuple[Depth, ...], Stages] = (2, 2, 4, 2)
    dims: Annotated[tuple[Width, ...], Stages] = (48, 96, 192, 384)
    mlp_ratio: Annotated[float, Field(ge=0, le=0)] = 0.0
    drop_path: DropPath = 0.1

    def fit_together(self) -> None:
        super().fit_together()
        if any(dim < 8 for dim in self.dims):
            raise ValueError(f"dims are {self.dims}; an attention over the channels needs at least 8")


class SpatialMambaConfig(NetworkConfig):
    """Architecture of a Spatial-Mamba."""

    depths: Annotated[tuple[Depth, ...], Stages] = (2, 4, 8, 4)
    dims: Annotated[tuple[Width, ...], Stages] = (64, 128, 256, 512)
    mlp_ratio: Ratio = 4.0

    def fit_together(self) -> None:
        self.require_one_per_stage(depths=self.depths, dims=self.dims)
        if any(after != 2 * before for before, after in zip(self.dims, self.dims[1:], strict=False)):
            raise ValueError(f"dims are {self.dims}; each stage doubles the one before it")
        if self.dims[0] % 2:
            raise ValueError(f"dims are {self.dims}; the stem halves the first: give an even one")


class VSSDConfig(SpatialMambaConfig):
    """Architecture of a VSSD."""

    depths: Annotated[tuple[Depth, ...], Stages] = (2, 4, 8, 4)
    heads: Annotated[tuple[Annotated[int, Field(ge=1, le=256)], ...], Stages] = (2, 4, 8, 16)
    attention: Annotated[tuple[bool, ...], Stages] = (False, False, False, True)
    d_state: States = 64
    positive_decay: bool = True

    def fit_together(self) -> None:
        super().fit_together()
        self.require_one_per_stage(dims=self.dims, heads=self.heads, values_of_attention=self.attention)
        widths = [dim if attends else 2 * dim for dim, attends in zip(self.dims, self.attention, strict=True)]
        self.require_divisors(self.heads, widths)


class MambaVisionConfig(NetworkConfig):
    """Architecture of a MambaVision.

    The first two stages are convolutional; the others have windows of `windows` tokens a side.
    """

    dim: Width = 80  # of the first stage; each stage doubles it
    stem_dim: Width = 32
    depths: Annotated[tuple[Depth, ...], Stages] = (1, 3, 8, 4)
    windows: Annotated[tuple[Annotated[int, Field(ge=1, le=256)], ...], Stages] = (8, 8, 14, 7)
    heads: Annotated[tuple[Annotated[int, Field(ge=1, le=256)], ...], Stages] = (2, 4, 8, 16)
    mlp_ratio: Ratio = 4.0
    layer_scale: Annotated[float, Field(allow_inf_nan=False)] | None = None  # initial value; None: no scale
    layer_scale_conv: Annotated[float, Field(allow_inf_nan=False)] | None = None

    def stages(self) -> list[tuple[int, int]]:
        return [(depth, self.dim * 2**i) for i, depth in enumerate(self.depths)]

    def fit_together(self) -> None:
        self.require_one_per_stage(depths=self.depths, windows=self.windows, heads=self.heads)
        if self.dim % 2:
            raise ValueError(f"dim is {self.dim}; a mixer scans half of its channels: give an even one")
        self.require_divisors(self.heads[2:], [dim for _, dim in self.stages()][2:])


# Keywords of upstream's VSSM: our field for each, our values where they differ, and keywords that no field stands for,
# with the values that are accepted.
_ANYTHING = None
_VMAMBA = {
    **{name: name for name in ("depths", "dims", "num_classes", "patch_size", "ssm_ratio", "mlp_ratio")},
    "in_chans": "in_channels",
    "drop_path_rate": "drop_path",
    "ssm_d_state": "d_state",
    "ssm_dt_rank": "dt_rank",
    "ssm_conv": "conv_size",
    "ssm_conv_bias": "conv_bias",
    "norm_layer": "norm",
    "downsample_version": "merging_downsample",
    "patchembed_version": "overlapping_stem",
    "forward_type": "gate",
}
_VMAMBA_VALUES: dict[str, dict[Any, Any]] = {
    "norm_layer": {"ln": "layer", "ln2d": "layer", "bn": "batch"},
    "downsample_version": {"v1": True, "v3": False},
    "patchembed_version": {"v1": False, "v2": True},
    # v02 to v05 differ upstream in kernels and rounding only; v0 is the first, gated network.
    "forward_type": {"v0": True} | {f"v0{i}{z}": not z for i in "2345" for z in ("", "noz", "_noz")},
}
_VMAMBA_FIXED: dict[str, tuple[object, ...] | None] = {
    "imgsize": _ANYTHING,
    "ssm_act_layer": ("silu",),
    "ssm_drop_rate": (0, 0.0),
    "ssm_init": ("v0",),
    "mlp_act_layer": ("gelu",),
    "mlp_drop_rate": (0, 0.0),
    "gmlp": (False,),
    "patch_norm": (True,),
    "use_checkpoint": _ANYTHING,
    "posembed": (False,),
}


def _translate(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Our fields for upstream's keywords; every keyword that cannot be honored is named in one error."""
    found, problems = {}, []
    for key, value in mapping.items():
        allowed = list(_VMAMBA_VALUES[key]) if key in _VMAMBA_VALUES else _VMAMBA_FIXED.get(key)
        if key not in _VMAMBA and key not in _VMAMBA_FIXED:
            problems.append(f"unknown key {show(key)}")
        elif allowed is not None and value not in allowed:
            problems.append(f"{key}={show(value)} (supported: {', '.join(map(repr, allowed))})")
        elif key == "ssm_dt_rank" and value != "auto" and type(value) is not int:
            problems.append(f"{key}={show(value)} (supported: 'auto' or an integer)")
        elif key in _VMAMBA:
            found[_VMAMBA[key]] = _VMAMBA_VALUES[key][value] if key in _VMAMBA_VALUES else value
    if problems:
        raise ConfigError("upstream configuration not supported: " + "; ".join(problems))
    if found.get("dt_rank") == "auto":
        found["dt_rank"] = None
    depths = found.setdefault("depths", VMambaConfig.defaults()["depths"])
    if isinstance(found.get("dims"), int) and isinstance(depths, list | tuple) and len(depths) <= MAX_STAGES:
        found["dims"] = tuple(found["dims"] * 2**i for i in range(len(depths)))  # upstream doubles a single width
    return found
