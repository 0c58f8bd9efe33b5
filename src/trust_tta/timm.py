"""timm integration: `import trust_tta.timm` registers our networks in timm, and "timm:NAME" names a timm network here.

import timm, trust_tta.timm
model = timm.create_model("vmamba_tiny_s1l8", pretrained=True)
model = trust_tta.create_model("timm:resnet50_gn", pretrained=True)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from trust_tta.errors import ConfigError
from trust_tta.models.base import Orders, ScanNetwork
from trust_tta.models.checkpoint import Checkpoint, set_license
from trust_tta.models.config import NetworkConfig, UPerNetConfig
from trust_tta.models.efficientvmamba import EfficientVMamba
from trust_tta.models.groupmamba import GroupMamba
from trust_tta.models.localvim import LocalVim
from trust_tta.models.localvmamba import LocalVMamba
from trust_tta.models.mambavision import MambaVision
from trust_tta.models.msvmamba import MSVMamba
from trust_tta.models.pretrained import PRETRAINED, Pretrained
from trust_tta.models.spatialmamba import SpatialMamba
from trust_tta.models.variants import VARIANTS, default_preprocessing
from trust_tta.models.vim import Vim, normalize
from trust_tta.models.vmamba import VMamba
from trust_tta.models.vssd import VSSD
from trust_tta.models.weights import load_state
from trust_tta.optional import require
from trust_tta.schema import did_you_mean

_timm: Any = require("timm", extra="timm")
_models: Any = require("timm.models", extra="timm")

_FIELDS = {"in_chans": "in_channels", "drop_path_rate": "drop_path", "img_size": "image_size"}  # timm's word, ours


class TimmNetwork(ScanNetwork):
    """timm's interface on our networks, with the same parameters, names and logits.

    `forward_features` gives the last map (n, d, h, w) or all tokens (n, l, d); `forward_head` normalizes, pools and
    classifies them.
    """

    variant: str
    pretrained_cfg: dict[str, Any]
    feature_info: list[dict[str, Any]]

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__(config)
        self.num_classes = self.config.num_classes
        self.num_features = self.head_hidden_size = self.heads()[0].in_features
        self.feature_info = [
            {"num_chs": channels, "reduction": reduction, "module": module}
            for module, channels, reduction in self.describe_stages()
        ]

    # Defined by each family

    def describe_stages(self) -> list[tuple[str, int, int]]:
        """Last module of each stage, the channels of its map, and the reduction of its size."""
        path, patch = getattr(self, "stages_path", ""), getattr(self.config, "patch_size", 4)
        return [(f"{path}.{i}", dim, patch * 2**i) for i, (_, dim) in enumerate(self.config.stages())]

    def as_map(self, arguments: tuple[Any, ...], given: Tensor) -> Tensor:
        """Output `given` of a stage's last module as a map (n, c, h, w); `arguments` were its inputs."""
        del arguments
        return given

    # timm's interface

    def forward_features(self, images: Tensor, order: Orders = None, *, directions: Tensor | None = None) -> Tensor:
        return self.encode(images, order, directions=directions)

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        """Logits of the output of `forward_features`, or of pooled features (n, d)."""
        pooled = features if features.dim() == 2 else self.pool(features)
        return pooled if pre_logits or self.num_classes == 0 else super().forward_head(pooled)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """The output of `forward_features`, and the maps at the end of the stages `indices`.

        `norm` applies the final norm of a Vim to its maps. `stop_early` has no effect: the whole network always runs.
        """
        del stop_early
        layout = str(getattr(output_fmt, "value", output_fmt))
        if layout not in ("NCHW", "NHWC"):
            raise ConfigError(f"output_fmt is {layout!r}; choose 'NCHW' or 'NHWC'")
        stages = range(len(self.feature_info))
        chosen = stages[-indices:] if isinstance(indices, int) else [stages[i] for i in indices or stages]
        found: dict[int, Tensor] = {}
        handles = []
        for stage in chosen:
            module = self.get_submodule(self.feature_info[stage]["module"])
            last = module[-1] if isinstance(module, nn.ModuleList) else module

            def keep(module: nn.Module, arguments: tuple[Any, ...], given: Tensor, stage: int = stage) -> None:
                found[stage] = self.as_map(arguments, given)

            handles.append(last.register_forward_hook(keep))
        try:
            features = self.forward_features(x)
        finally:
            for handle in handles:
                handle.remove()
        maps = [self.normalize_map(found[i]) if norm else found[i] for i in chosen]
        maps = [m.permute(0, 2, 3, 1) for m in maps] if layout == "NHWC" else maps
        return maps if intermediates_only else (features, maps)

    def normalize_map(self, x: Tensor) -> Tensor:
        return x

    def get_classifier(self) -> Any:
        heads = [self.get_submodule(path) for path in self._classifier_paths()]
        return heads[0] if len(heads) == 1 else tuple(heads)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier by a random one; with 0 classes, the network returns pooled features."""
        if global_pool not in (None, "avg", "token"):
            raise ConfigError(f"global_pool is {global_pool!r}; {type(self).__name__} pools in one way; omit it")
        for path in self._classifier_paths():
            parent, _, leaf = path.rpartition(".")
            old = self.get_submodule(path)
            like = next(old.parameters(), torch.empty(0))
            new = nn.Linear(self.num_features, num_classes, device=like.device) if num_classes else nn.Identity()
            setattr(self.get_submodule(parent), leaf, new)
        self.num_classes, self.classes = num_classes, None
        if num_classes:
            self.config = self.config.changed(num_classes=num_classes)

    def classifier_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.named_parameters() if name.rpartition(".")[0] in self._classifier_paths())

    def _classifier_paths(self) -> list[str]:
        own = dict(self.named_modules())
        return [path for path in _HEADS if path in own]

    def load_pretrained(self, source: str) -> None:
        """Load a known checkpoint or a file; a classifier with another number of classes stays random."""
        found = Checkpoint.open(source, variant=self.variant, fields=self.config.changes_from(VARIANTS[self.variant]))
        head = found.num_classes == self.num_classes
        load_state(self, found.state, origin=found.origin, head=head)
        self.preprocessing, self.classes = found.preprocessing, found.classes if head else None
        set_license(self, found.license, origin=found.origin)

    def no_weight_decay(self) -> set[str]:
        """Parameters without weight decay: all but the weights of projections and convolutions."""
        return {name for name, p in self.named_parameters() if p.dim() < 2 or name.endswith(_NOT_DECAYED)}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Regular expressions that group the parameters into the stem and successive blocks."""
        del coarse
        return {"stem": r"^(?:patch_embed1?\.|cls_token|pos_embed)", "blocks": self.block_pattern}

    block_pattern = r"^layers\.(\d+)"

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        if enable:
            raise ConfigError(f"{type(self).__name__} has no gradient checkpointing; omit it")


_HEADS = ("classifier.head", "head", "dist_head")
_NOT_DECAYED = ("A_logs", "A_log", "A_b_log", "Ds", ".D", "pos_embed", "cls_token")


class TimmVMamba(TimmNetwork, VMamba): ...


class TimmLocalVMamba(TimmVMamba, LocalVMamba): ...


class TimmMSVMamba(TimmVMamba, MSVMamba): ...


class TimmEfficientVMamba(TimmVMamba, EfficientVMamba): ...


class TimmSpatialMamba(TimmNetwork, SpatialMamba): ...


class TimmVSSD(TimmSpatialMamba, VSSD): ...


class TimmGroupMamba(TimmNetwork, GroupMamba):
    block_pattern = r"^(?:patch_embed|block|norm)(\d+)"

    def describe_stages(self) -> list[tuple[str, int, int]]:
        return [(f"block{i + 1}", dim, 4 * 2**i) for i, dim in enumerate(self.config.dims)]

    def as_map(self, arguments: tuple[Any, ...], given: Tensor) -> Tensor:
        tokens: Tensor = given.transpose(1, 2)
        return tokens.reshape(*tokens.shape[:2], int(arguments[1]), -1)


class TimmMambaVision(TimmNetwork, MambaVision):
    block_pattern = r"^levels\.(\d+)"


class TimmVim(TimmNetwork, Vim):
    def describe_stages(self) -> list[tuple[str, int, int]]:
        return [(f"layers.{i}", self.config.dim, self.config.stride) for i in range(self.config.depth)]

    def as_map(self, arguments: tuple[Any, ...], given: Tensor) -> Tensor:
        del arguments
        if self.cls_token is not None:
            given = torch.cat((given[:, : self.middle], given[:, self.middle + 1 :]), dim=1)
        tokens: Tensor = given.transpose(1, 2)
        return tokens.reshape(*tokens.shape[:2], *self.config.grid)

    def normalize_map(self, x: Tensor) -> Tensor:
        return normalize(x.permute(0, 2, 3, 1), self.norm_f).permute(0, 3, 1, 2)


class TimmLocalVim(TimmVim, LocalVim): ...


_FAMILIES: dict[str, type[TimmNetwork]] = {
    "VMambaConfig": TimmVMamba,
    "LocalVMambaConfig": TimmLocalVMamba,
    "GroupMambaConfig": TimmGroupMamba,
    "VimConfig": TimmVim,
    "LocalVimConfig": TimmLocalVim,
    "MambaVisionConfig": TimmMambaVision,
    "MSVMambaConfig": TimmMSVMamba,
    "EfficientVMambaConfig": TimmEfficientVMamba,
    "SpatialMambaConfig": TimmSpatialMamba,
    "VSSDConfig": TimmVSSD,
}


def _make(variant: str, *, num_classes: int = 1000, global_pool: str | None = None, **options: Any) -> TimmNetwork:
    """One of our variants with timm's interface; `options` are fields of its configuration, under either name."""
    fields = {_FIELDS.get(name, name): value for name, value in options.items()}
    if isinstance(size := fields.get("image_size"), int):
        fields["image_size"] = (size, size)
    elif size is not None:
        fields["image_size"] = tuple(size)
    config = VARIANTS[variant].override({**fields, "num_classes": num_classes or VARIANTS[variant].num_classes})
    network = _FAMILIES[type(config).__name__](config)
    network.variant, network.preprocessing = variant, default_preprocessing(variant)
    if num_classes == 0 or global_pool is not None:
        network.reset_classifier(num_classes, global_pool)
    return network


def _cfg(variant: str, known: Pretrained | None) -> dict[str, Any]:
    """timm's default_cfg of a variant and its published weights; `file` is the name of our checkpoint."""
    config, wanted = VARIANTS[variant], known.preprocessing if known else default_preprocessing(variant)
    return {
        "file": known.name if known else None,
        "custom_load": True,
        "license": known.license if known else None,
        "origin_url": known.address if known else None,
        "num_classes": known.num_classes if known else config.num_classes,
        "input_size": (config.in_channels, wanted.size, wanted.size),
        "fixed_input_size": "image_size" in type(config).model_fields,
        "crop_pct": 1.0 if wanted.resize is None else wanted.size / wanted.resize,
        "crop_mode": "center" if wanted.crop else "squash",
        "interpolation": wanted.interpolation,
        "mean": wanted.mean,
        "std": wanted.std,
        "classifier": _FAMILIES[type(config).__name__].head_path,
    }


def _entry_point(variant: str) -> Callable[..., nn.Module]:
    def create(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        def make(**options: Any) -> TimmNetwork:
            return _make(variant, **options)

        features = {"feature_cls": "getter", "out_indices": min(4, len(getattr(VARIANTS[variant], "dims", range(4))))}
        built = _models.build_model_with_cfg(make, variant, pretrained, feature_cfg=features, **kwargs)
        return cast(nn.Module, built)

    create.__name__ = create.__qualname__ = variant
    create.__doc__ = f"The network '{variant}' of trust-tta."
    return create


def _default_cfgs() -> Any:
    named: dict[str, dict[str, Any]] = {}
    for known in PRETRAINED.values():
        if known.variant in OURS and known.norm is None:
            named[f"{known.variant}.{known.name.removeprefix(known.variant + '_')}"] = _cfg(known.variant, known)
    bare = {name: _cfg(name, None) for name in OURS if not any(key.startswith(f"{name}.") for key in named)}
    return _models.generate_default_cfgs({**named, **bare})


OURS = tuple(name for name, config in VARIANTS.items() if not isinstance(config, UPerNetConfig))
"""The variants of this package that timm knows: all that classify images."""

default_cfgs = _default_cfgs()
__all__ = ["OURS", "TimmNetwork", "network"]

for _name in OURS:
    setattr(sys.modules[__name__], _name, _models.register_model(_entry_point(_name)))


def network(name: str) -> Callable[..., nn.Module]:
    """The factory of timm's network `name`, which may have a tag; or "hf-hub:..." or "local-dir:...".

    Its keywords are those of `timm.create_model`.
    """
    if ":" not in name and not _timm.is_model(name.split(".")[0]):
        raise ConfigError(f"timm has no network '{name}'; {did_you_mean(name.split('.')[0], _timm.list_models())}")

    def make(**options: Any) -> nn.Module:
        made: Any = _timm.create_model(name, **options)
        if "img_size" in options:  # timm's data configuration still states the size of the weights
            side = options["img_size"]
            height, width = (side, side) if isinstance(side, int) else side
            made.pretrained_cfg = {
                **made.pretrained_cfg,
                "input_size": (made.pretrained_cfg["input_size"][0], height, width),
            }
            made.default_cfg = made.pretrained_cfg
        return cast(nn.Module, made)

    return make
