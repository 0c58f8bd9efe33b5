"""Upstream's keyword names of the networks other than VMamba, as the golden files state them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trust_tta.models import config as configs
from trust_tta.models.config import _ANYTHING, _VMAMBA, _VMAMBA_FIXED, _VMAMBA_VALUES, NetworkConfig, VMambaConfig
from trust_tta.schema import parse

# Of each network: its keywords and our fields for them; keywords whose values change nothing here.
_VIM = {
    "img_size": "image_size",
    "patch_size": "patch_size",
    "stride": "stride",
    "embed_dim": "dim",
    "depth": "depth",
    "d_state": "d_state",
    "channels": "in_channels",
    "num_classes": "num_classes",
    "drop_path_rate": "drop_path",
    "if_divide_out": "halve",
}
_VIM_FIXED: dict[str, tuple[object, ...] | None] = {
    "norm_epsilon": (1e-5,),
    "rms_norm": (True,),
    "residual_in_fp32": (True,),
    "fused_add_norm": _ANYTHING,
    "final_pool_type": _ANYTHING,  # the class token is what is classified
    "if_abs_pos_embed": (True,),
    "if_rope": (False,),
    "if_rope_residual": (False,),
    "bimamba_type": ("v2",),
    "if_cls_token": (True,),
    "use_middle_cls_token": (True,),
    "if_devide_out": _ANYTHING,  # a misspelling that upstream ignores
}
_LOCALVIM = {key: name for key, name in _VIM.items() if key not in ("stride", "if_divide_out")} | {
    "directions": "directions",
    "if_rope": "rotary",
    "if_cls_token": "middle_token",
}
_LOCALVIM_FIXED = {key: allowed for key, allowed in _VIM_FIXED.items() if key not in _LOCALVIM} | {
    "if_rope_residual": _ANYTHING,  # as if_rope
    "use_middle_cls_token": _ANYTHING,
}
_GROUPMAMBA = {
    "in_chans": "in_channels",
    "num_classes": "num_classes",
    "stem_hidden_dim": "stem_dim",
    "embed_dims": "dims",
    "mlp_ratios": "mlp_ratios",
    "depths": "depths",
    "drop_path_rate": "drop_path",
    "distillation": "two_heads",
}
_GROUPMAMBA_FIXED: dict[str, tuple[object, ...] | None] = {"num_stages": _ANYTHING, "norm_layer": _ANYTHING}
_LOCALVMAMBA = {key: name for key, name in _VMAMBA.items() if key not in (*_VMAMBA_VALUES, "mlp_ratio")} | {
    "directions": "directions",
}
_LOCALVMAMBA_FIXED: dict[str, tuple[object, ...] | None] = {
    "d_state": _ANYTHING,  # upstream ignores it
    "ssm_act_layer": ("silu",),
    "ssm_drop_rate": (0, 0.0),
    "ssm_simple_init": _ANYTHING,
    "patch_norm": (True,),
    "norm_layer": ("LN",),
    "use_checkpoint": _ANYTHING,
}
_MSVMAMBA = {key: name for key, name in _VMAMBA.items() if key != "mlp_ratio"} | {"conv_ffn_ratio": "ffn_ratio"}
_MSVMAMBA_VALUES: dict[str, dict[Any, Any]] = {
    **_VMAMBA_VALUES,
    "norm_layer": {"ln": "layer", "ln2d": "layer"},
    "forward_type": {"v2": True, "vms": True, "vms_noz": False},
}
_MSVMAMBA_FIXED: dict[str, tuple[object, ...] | None] = {
    **{key: allowed for key, allowed in _VMAMBA_FIXED.items() if key != "imgsize"},
    "imgsize": _ANYTHING,
    "mlp_ratio": _ANYTHING,  # the FFN with a convolution takes its place
    "ssm_rank_ratio": _ANYTHING,
    "ssm_simple_init": _ANYTHING,
    "sscore_type": ("multiscale_4scan_12",),
    "add_conv": (True,),
    "add_se": (True,),
    "convFFN": (True,),
    "convffn": (True,),
    "sep_norm": (False,),
    "pre_norm": (False,),
    "ms_stage": ([0, 1, 2, 3],),
    "ms_split": ([1, 3],),
    "ffn_dropout": (0, 0.0),
    "axis_stage": ([],),
    "num_heads": _ANYTHING,
    "full_res_index": (1,),
}
_EFFICIENT = {
    "depths": "depths",
    "dims": "dims",
    "num_classes": "num_classes",
    "in_chans": "in_channels",
    "patch_size": "patch_size",
    "drop_path_rate": "drop_path",
    "ssm_ratio": "ssm_ratio",
}
_EFFICIENT_FIXED: dict[str, tuple[object, ...] | None] = {
    "d_state": _ANYTHING,  # upstream ignores it, the rank of the steps and the size of windows
    "dt_rank": _ANYTHING,
    "window_size": _ANYTHING,
    "attn_drop_rate": (0, 0.0),
    "drop_rate": (0, 0.0),
    "mlp_ratio": (0, 0.0),
    "patch_norm": (True,),
    "downsample_version": ("v1",),
    "step_size": (2,),
}
_SPATIALMAMBA = {
    "in_chans": "in_channels",
    "num_classes": "num_classes",
    "depths": "depths",
    "dims": "dims",
    "mlp_ratio": "mlp_ratio",
    "drop_path_rate": "drop_path",
}
_SPATIALMAMBA_FIXED: dict[str, tuple[object, ...] | None] = {
    "img_size": _ANYTHING,
    "patch_size": (4,),
    "d_state": (1,),
    "dt_init": _ANYTHING,
    "drop_rate": (0, 0.0),
}
_VSSD = {key: name for key, name in _SPATIALMAMBA.items() if key != "dims"} | {
    "embed_dim": "dims",
    "num_heads": "heads",
    "attn_types": "attention",
    "d_state": "d_state",
    "ssd_positve_dA": "positive_decay",
}
_VSSD_FIXED: dict[str, tuple[object, ...] | None] = {
    "img_size": _ANYTHING,
    "patch_size": (4,),
    "drop_rate": (0, 0.0),
    "simple_downsample": (False,),
    "simple_patch_embed": (False,),
    "ssd_expansion": (2,),
    "ssd_ngroups": (1,),
    "ssd_chunk_size": _ANYTHING,
    "linear_attn_duality": (True,),
    "lepe": (False,),
    "bidirection": (False,),
}
_MAMBAVISION = {
    "dim": "dim",
    "in_dim": "stem_dim",
    "depths": "depths",
    "window_size": "windows",
    "num_heads": "heads",
    "mlp_ratio": "mlp_ratio",
    "drop_path_rate": "drop_path",
    "in_chans": "in_channels",
    "num_classes": "num_classes",
    "layer_scale": "layer_scale",
    "layer_scale_conv": "layer_scale_conv",
}
_MAMBAVISION_FIXED: dict[str, tuple[object, ...] | None] = {
    "resolution": _ANYTHING,  # upstream ignores it
    "qkv_bias": (True,),
    "qk_scale": (None,),
    "drop_rate": (0, 0.0),
    "attn_drop_rate": (0, 0.0),
}

FAMILIES: dict[str, tuple[Mapping[str, str], Mapping[str, Any], Mapping[str, Mapping[Any, Any]]]] = {
    "VimConfig": (_VIM, _VIM_FIXED, {}),
    "LocalVimConfig": (_LOCALVIM, _LOCALVIM_FIXED, {}),
    "GroupMambaConfig": (_GROUPMAMBA, _GROUPMAMBA_FIXED, {}),
    "LocalVMambaConfig": (_LOCALVMAMBA, _LOCALVMAMBA_FIXED, {}),
    "MSVMambaConfig": (_MSVMAMBA, _MSVMAMBA_FIXED, _MSVMAMBA_VALUES),
    "EfficientVMambaConfig": (_EFFICIENT, _EFFICIENT_FIXED, {}),
    "SpatialMambaConfig": (_SPATIALMAMBA, _SPATIALMAMBA_FIXED, {}),
    "VSSDConfig": (_VSSD, _VSSD_FIXED, {}),
    "MambaVisionConfig": (_MAMBAVISION, _MAMBAVISION_FIXED, {}),
}


def from_official(kind: type[NetworkConfig], mapping: Mapping[str, Any]) -> Any:
    """The configuration of a network from upstream's keywords; an unknown keyword or value fails."""
    if kind is VMambaConfig:
        return VMambaConfig.from_official(mapping)
    renamed, fixed, names = FAMILIES[kind.__name__]
    given = dict(mapping)
    if kind is configs.LocalVimConfig:
        given |= given.pop("ssm_cfg", None) or {}
    for key, value in given.items():
        allowed = list(names[key]) if key in names else fixed.get(key)
        assert key in renamed or key in fixed, key
        assert allowed is None or value in allowed, (key, value)
    found = {renamed[k]: names[k][v] if k in names else v for k, v in given.items() if k in renamed}
    if found.get("dt_rank") == "auto":
        found["dt_rank"] = None
    if isinstance(side := found.get("image_size"), int):
        found["image_size"] = (side, side)
    if isinstance(found.get("dims"), int):  # upstream doubles a single width at every stage
        found["dims"] = tuple(found["dims"] * 2**i for i in range(len(found["depths"])))
    if kind is configs.LocalVimConfig:
        found = {"rotary": False, **found, "stride": found.get("patch_size", 16)}
    if kind is configs.MSVMambaConfig:
        first = "sscore_type" in given
        found |= {"first_generation": first} | ({"ffn_ratio": 2.0} if first else {})
    if kind is configs.VSSDConfig and "attention" in found:
        found["attention"] = tuple(attends == "standard" for attends in found["attention"])
    return parse(kind, found, where="upstream configuration")
