"""The published networks, as data. Each VMamba has a `_bn` twin with batch normalization, as TRUST uses it, and each
serves as the backbone of a UPerNet."""

from __future__ import annotations

from trust_tta.models.config import (
    EfficientVMambaConfig,
    Four,
    GroupMambaConfig,
    LocalVimConfig,
    LocalVMambaConfig,
    MambaVisionConfig,
    MSVMambaConfig,
    NetworkConfig,
    SpatialMambaConfig,
    UPerNetConfig,
    VanillaConfig,
    VimConfig,
    VMambaConfig,
    VSSDConfig,
)
from trust_tta.preprocessing import PRESETS, Preprocessing

_SMALL_DIMS, _BASE_DIMS = (96, 192, 384, 768), (128, 256, 512, 1024)
_VANILLA = VMambaConfig(**VanillaConfig.defaults() | {"depths": (2, 2, 9, 2), "drop_path": 0.1})

_PUBLISHED = {
    "vmamba_tiny_s1l8": VMambaConfig(depths=(2, 2, 8, 2), dims=_SMALL_DIMS),
    "vmamba_tiny_s2l5": VMambaConfig(depths=(2, 2, 5, 2), dims=_SMALL_DIMS, ssm_ratio=2.0),
    "vmamba_small_s1l20": VMambaConfig(depths=(2, 2, 20, 2), dims=_SMALL_DIMS, drop_path=0.3),
    "vmamba_small_s2l15": VMambaConfig(depths=(2, 2, 15, 2), dims=_SMALL_DIMS, ssm_ratio=2.0, drop_path=0.3),
    "vmamba_base_s1l20": VMambaConfig(depths=(2, 2, 20, 2), dims=_BASE_DIMS, drop_path=0.5),
    "vmamba_base_s2l15": VMambaConfig(depths=(2, 2, 15, 2), dims=_BASE_DIMS, ssm_ratio=2.0, drop_path=0.6),
    "vanilla_vmamba_tiny": _VANILLA,
    "vanilla_vmamba_small": _VANILLA.changed(depths=(2, 2, 27, 2), drop_path=0.3),
    "vanilla_vmamba_base": _VANILLA.changed(depths=(2, 2, 27, 2), dims=_BASE_DIMS, drop_path=0.6),
}

_VMAMBA: dict[str, VMambaConfig] = {
    **_PUBLISHED,
    **{f"{name}_bn": config.changed(norm="batch") for name, config in _PUBLISHED.items()},
    "vmamba_nano": VMambaConfig(
        depths=(2, 4, 2),
        dims=(64, 128, 256),
        num_classes=10,
        patch_size=2,
        overlapping_stem=False,
        norm="batch",
        drop_path=0.1,
    ),
}


def _directions(text: str) -> tuple[Four, ...]:
    """Four directions for each block; a minus stands for "_flip"."""
    rows = [row.replace("-", "_flip").split() for row in text.split(",")]
    return tuple((a, b, c, d) for a, b, c, d in rows)


# As the search of the authors has chosen them.
_LOCALVMAMBA_TINY = _directions(
    "h h- w7 w7-, h- v- w2 w2-, h- v- w2- w7, h- v v- w2, h h- v- w2-, h- v- w2 w2-, h w2- w7 w7-, h h- v v-, "
    "h v- w7 w7-, h- v w2 w7-, v v- w2 w7-, h h- v- w2-, v- w2- w7 w7-, h- v- w2- w7-, h- v w7 w7-"
)
_LOCALVMAMBA_SMALL = _directions(
    "h v v- w7-, h h- v w7, h- v v- w7, h- v w2- w7, h- v w2- w7, h- v- w2 w7-, h- v v- w7, h v v- w7, h v v- "
    "w7, h v v- w7-, h h- v v-, h v v- w2, v v- w2- w7, h h- v w2, h- v v- w7-, h h- v v-, h v v- w7-, h v v- "
    "w7-, h h- v- w7, h- v- w2- w7, h- v v- w7-, v v- w7 w7-, h v v- w7-, h- v v- w2, h v v- w2-, h h- v w7, "
    "h h- w7 w7-, h v- w2 w2-, h v- w2 w7, h v v- w7-, h- v w2- w7, h- v- w7 w7-, h v w7 w7-"
)
_LOCALVIM_TINY = _directions(
    "h v- w7 w7-, h- w2- w7 w7-, h h- v w7, h h- v v-, h h- v v-, h h- v v-, h- v v- w7, h- v v- w2-, h h- v "
    "v-, h h- v v-, h v v- w2, h v v- w2-, h h- v- w7, h- v v- w2, h h- v v-, h v w2 w2-, v v- w2 w7, h h- v "
    "w2, h h- w2- w7, v v- w2 w2-"
)
_LOCALVIM_SMALL = 20 * _directions("h h- w2 w2-")

_MAMBAVISION_B = MambaVisionConfig(dim=128, stem_dim=64, depths=(3, 3, 10, 5), layer_scale=1e-5, drop_path=0.3)
_MAMBAVISION_L = _MAMBAVISION_B.changed(dim=196, heads=(4, 8, 16, 32))
_MAMBAVISION_L2 = _MAMBAVISION_L.changed(depths=(3, 3, 12, 5))
_MAMBAVISION_L3 = _MAMBAVISION_L.changed(dim=256, depths=(3, 3, 20, 10), drop_path=0.5)
_MSVMAMBA_FIRST = MSVMambaConfig(
    first_generation=True,
    depths=(1, 2, 5, 2),
    dims=(48, 96, 192, 384),
    overlapping_stem=False,
    merging_downsample=True,
    ssm_ratio=2.0,
    gate=True,
    ffn_ratio=2.0,
)

VARIANTS: dict[str, NetworkConfig] = {
    **_VMAMBA,
    **{f"upernet_{name}": UPerNetConfig(**dict(config) | {"num_classes": 150}) for name, config in _VMAMBA.items()},
    "upernet_vmamba_nano": UPerNetConfig(
        **dict(_VMAMBA["vmamba_nano"]) | {"num_classes": 150, "channels": 48, "auxiliary_channels": 32}
    ),
    "vim_tiny": VimConfig(),
    "vim_tiny_stride8": VimConfig(stride=8),
    "vim_small": VimConfig(dim=384),
    "vim_small_stride8": VimConfig(dim=384, stride=8),
    "vim_base": VimConfig(dim=768),
    "localvmamba_tiny": LocalVMambaConfig(depths=(2, 2, 9, 2), directions=_LOCALVMAMBA_TINY),
    "localvmamba_small": LocalVMambaConfig(depths=(2, 2, 27, 2), directions=_LOCALVMAMBA_SMALL),
    "localvim_tiny": LocalVimConfig(directions=_LOCALVIM_TINY),
    "localvim_tiny_midclstok": LocalVimConfig(directions=_LOCALVIM_TINY, rotary=False, middle_token=True),
    "localvim_small": LocalVimConfig(dim=384, directions=_LOCALVIM_SMALL),
    "groupmamba_tiny": GroupMambaConfig(),
    "groupmamba_small": GroupMambaConfig(stem_dim=64, dims=(64, 128, 348, 512), depths=(3, 4, 16, 3)),
    "groupmamba_base": GroupMambaConfig(stem_dim=64, dims=(96, 192, 424, 512), depths=(3, 6, 21, 3)),
    "mambavision_tiny": MambaVisionConfig(),
    "mambavision_tiny2": MambaVisionConfig(depths=(1, 3, 11, 4)),
    "mambavision_small": MambaVisionConfig(dim=96, stem_dim=64, depths=(3, 3, 7, 5)),
    "mambavision_base": _MAMBAVISION_B,
    "mambavision_base_21k": _MAMBAVISION_B,  # pretrained on ImageNet-21K, as the following ones of this name
    "mambavision_large": _MAMBAVISION_L,
    "mambavision_large_21k": _MAMBAVISION_L,
    "mambavision_large2": _MAMBAVISION_L2,
    "mambavision_large2_512_21k": _MAMBAVISION_L2.changed(windows=(8, 8, 32, 16)),
    "mambavision_large3_256_21k": _MAMBAVISION_L3.changed(windows=(8, 8, 16, 8)),
    "mambavision_large3_512_21k": _MAMBAVISION_L3.changed(windows=(8, 8, 32, 16)),
    "msvmambav3_tiny": MSVMambaConfig(),
    "msvmambav3_small": MSVMambaConfig(depths=(2, 3, 20, 2), drop_path=0.4),
    "msvmambav3_base": MSVMambaConfig(depths=(2, 4, 18, 2), dims=_BASE_DIMS, gate=True, drop_path=0.5),
    "msvmamba_nano": _MSVMAMBA_FIRST,
    "msvmamba_micro": _MSVMAMBA_FIRST.changed(dims=(64, 128, 256, 512)),
    "msvmamba_tiny": _MSVMAMBA_FIRST.changed(depths=(1, 2, 9, 2), dims=_SMALL_DIMS),
    "efficientvmamba_tiny": EfficientVMambaConfig(),
    "efficientvmamba_small": EfficientVMambaConfig(dims=(64, 128, 256, 512)),
    "efficientvmamba_base": EfficientVMambaConfig(depths=(2, 2, 9, 2), dims=_SMALL_DIMS),
    "spatialmamba_tiny": SpatialMambaConfig(),
    "spatialmamba_small": SpatialMambaConfig(depths=(2, 4, 21, 5), drop_path=0.3),
    "spatialmamba_base": SpatialMambaConfig(depths=(2, 4, 21, 5), dims=_SMALL_DIMS, drop_path=0.5),
    "vssd_micro": VSSDConfig(depths=(2, 2, 8, 4), dims=(48, 96, 192, 384), d_state=48),
    "vssd_tiny": VSSDConfig(),
    "vssd_small": VSSDConfig(depths=(3, 4, 21, 5), drop_path=0.4),
    "vssd_base": VSSDConfig(depths=(3, 4, 21, 5), dims=_SMALL_DIMS, heads=(3, 6, 12, 24), drop_path=0.6),
}


_IMAGENET, _WHOLE = PRESETS["imagenet"], Preprocessing(resize=224)  # the latter without a margin around the crop
_PREPROCESSING = {
    "vmamba_nano": PRESETS["cifar32"],
    **{f"upernet_{name}": PRESETS["pixels512"] for name in _VMAMBA},
    "upernet_vmamba_nano": PRESETS["pixels224"],
    **dict.fromkeys((name for name in VARIANTS if name.startswith("mambavision")), _WHOLE),
    "mambavision_tiny2": Preprocessing(resize=228),
    "mambavision_small": Preprocessing(resize=240),
    "mambavision_large2_512_21k": Preprocessing(size=512, resize=None, crop=False),
    "mambavision_large3_256_21k": Preprocessing(size=256),
    "mambavision_large3_512_21k": Preprocessing(size=512, resize=None, crop=False),
}


def default_preprocessing(variant: str) -> Preprocessing:
    """Preprocessing of a variant, unless its checkpoint states another; ImageNet's where none is known."""
    return _PREPROCESSING.get(variant, _IMAGENET)
