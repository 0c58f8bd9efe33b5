"""Known checkpoints: where they come from, which network they fit, and the preprocessing they were trained with."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from trust_tta.data.class_names import CIFAR10_CLASSES, imagenet_classes, segmentation_classes
from trust_tta.data.download import check_hash, download
from trust_tta.errors import CheckpointError, DownloadError, reason_of
from trust_tta.models.metadata import NO_FIELDS, ModelInfo
from trust_tta.models.variants import VARIANTS, default_preprocessing
from trust_tta.ops.cache import cache_folder
from trust_tta.optional import require
from trust_tta.preprocessing import CIFAR10_MEAN, CIFAR10_STD, PRESETS, Preprocessing
from trust_tta.schema import did_you_mean, show


@dataclass(frozen=True)
class Pretrained:
    """One published file. `address` is a URL, or None for a file that ships with the package."""

    name: str
    variant: str
    file: str
    address: str | None
    accuracy: float  # published top-1 accuracy on the clean test set, or the mean IoU at one scale, in percent
    num_classes: int = 1000
    preprocessing: Preprocessing = PRESETS["imagenet"]
    norm: str | None = None  # None: the variant's
    license: str = "MIT"  # of the weights
    sha256: str | None = None  # None: recorded beside the file when it is first fetched

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of its classes, in label order."""
        if self.num_classes == 10:
            return CIFAR10_CLASSES
        if self.num_classes in _PIXELS:
            return tuple(segmentation_classes(_PIXELS[self.num_classes]))
        return tuple(c.name for c in imagenet_classes())

    @property
    def is_average(self) -> bool:
        """Whether the accuracy is that of the moving average of the weights, as the name of the file says."""
        return self.file.endswith("_ema.pth")

    @property
    def info(self) -> ModelInfo:
        fields = NO_FIELDS if self.norm is None else {"norm": self.norm}
        return ModelInfo(self.variant, fields, self.num_classes, self.classes, self.preprocessing, self.license)


HUB_PREFIX, HUB_WEIGHTS = "hf:", "model.safetensors"
_HUB_FILES = (HUB_WEIGHTS, "adaptation.safetensors", "config.json", "README.md")
_PIXELS = {11: "camvid", 150: "ade20k"}  # data sets of segmentation networks by their number of classes

_GITHUB, _HUB = "https://github.com/", "https://huggingface.co/"
_VMAMBA = f"{_GITHUB}MzeroMiko/VMamba/releases/download/"
_ADE = "4xb4-160k_ade20k-512x512"
NOT_STATED = "not stated"  # no license file, and no word on one: all rights are reserved

# By address and license: variant, file of a release or REPOSITORY/FILE of the hub, accuracy.
_PUBLISHED: dict[tuple[str, str], tuple[tuple[str, str, float], ...]] = {
    (f"{_VMAMBA}%23v2cls/", "MIT"): (
        ("vmamba_tiny_s1l8", "vssm1_tiny_0230s_ckpt_epoch_264.pth", 82.6),
        ("vmamba_tiny_s2l5", "vssm_tiny_0230_ckpt_epoch_262.pth", 82.5),
        ("vmamba_small_s1l20", "vssm1_small_0229s_ckpt_epoch_240.pth", 83.3),
        ("vmamba_small_s2l15", "vssm_small_0229_ckpt_epoch_222.pth", 83.6),
        ("vmamba_base_s1l20", "vssm1_base_0229s_ckpt_epoch_225.pth", 83.8),
        ("vmamba_base_s2l15", "vssm_base_0229_ckpt_epoch_237.pth", 83.9),
    ),
    (f"{_VMAMBA}%23v0cls/", "MIT"): (
        ("vanilla_vmamba_tiny", "vssmtiny_dp01_ckpt_epoch_292.pth", 82.2),
        ("vanilla_vmamba_small", "vssmsmall_dp03_ckpt_epoch_238.pth", 83.5),
        ("vanilla_vmamba_base", "vssmbase_dp06_ckpt_epoch_241.pth", 83.7),
    ),
    (f"{_VMAMBA}%23v2seg/", "MIT"): (
        ("upernet_vmamba_tiny_s1l8", f"upernet_vssm_{_ADE}_tiny_s_iter_160000.pth", 47.9),
        ("upernet_vmamba_tiny_s2l5", f"upernet_vssm_{_ADE}_tiny_iter_160000.pth", 48.3),
        ("upernet_vmamba_small_s2l15", f"upernet_vssm_{_ADE}_small_iter_144000.pth", 50.6),
        ("upernet_vmamba_base_s2l15", f"upernet_vssm_{_ADE}_base_iter_160000.pth", 51.0),
    ),
    (f"{_VMAMBA}%23v0seg/", "MIT"): (
        ("upernet_vanilla_vmamba_tiny", f"vssmtiny_upernet_{_ADE}_iter_160000.pth", 47.3),
        ("upernet_vanilla_vmamba_small", f"vssmsmall_upernet_{_ADE}_iter_160000.pth", 49.5),
        ("upernet_vanilla_vmamba_base", f"vssmbase_upernet_{_ADE}_iter_128000.pth", 50.0),
    ),
    (f"{_HUB}hustvl/", "Apache-2.0"): (
        ("vim_tiny", "Vim-tiny-midclstok/vim_t_midclstok_76p1acc.pth", 76.1),
        ("vim_tiny_stride8", "Vim-tiny-midclstok/vim_t_midclstok_ft_78p3acc.pth", 78.3),
        ("vim_small", "Vim-small-midclstok/vim_s_midclstok_80p5acc.pth", 80.5),
        ("vim_small_stride8", "Vim-small-midclstok/vim_s_midclstok_ft_81p6acc.pth", 81.6),
        ("vim_base", "Vim-base-midclstok/vim_b_midclstok_81p9acc.pth", 81.9),
    ),
    (f"{_HUB}Abdelrahman-shaker/", "MIT"): (
        ("groupmamba_tiny", "GroupMamba-Tiny/groupmamba_tiny_ema.pth", 83.3),
        ("groupmamba_small", "GroupMamba-Small/groupmamba_small_ema.pth", 83.9),
        ("groupmamba_base", "GroupMamba-Base/groupmamba_base_ema.pth", 84.5),
    ),
    (f"{_GITHUB}hunto/LocalMamba/releases/download/v1.0.0/", "Apache-2.0"): (
        ("localvmamba_small", "local_vssm_small.ckpt", 83.7),
        ("localvim_tiny", "local_vim_tiny.ckpt", 76.2),
        ("localvim_tiny_midclstok", "local_vim_tiny_middle_cls_token.ckpt", 77.8),
    ),
    (f"{_HUB}nvidia/", "CC-BY-NC-SA-4.0"): (
        ("mambavision_tiny", "MambaVision-T-1K/mambavision_tiny_1k.pth.tar", 82.3),
        ("mambavision_tiny2", "MambaVision-T2-1K/mambavision_tiny2_1k.pth.tar", 82.7),
        ("mambavision_small", "MambaVision-S-1K/mambavision_small_1k.pth.tar", 83.3),
        ("mambavision_base", "MambaVision-B-1K/mambavision_base_1k.pth.tar", 84.2),
        ("mambavision_base_21k", "MambaVision-B-21K/mambavision_base_21k.pth.tar", 84.9),
        ("mambavision_large", "MambaVision-L-1K/mambavision_large_1k.pth.tar", 85.0),
        ("mambavision_large_21k", "MambaVision-L-21K/mambavision_large_21k.pth.tar", 86.1),
        ("mambavision_large2", "MambaVision-L2-1K/mambavision_large2_1k.pth.tar", 85.3),
        ("mambavision_large2_512_21k", "MambaVision-L2-512-21K/mambavision_L2_21k_240m_512.pth.tar", 87.3),
        ("mambavision_large3_256_21k", "MambaVision-L3-256-21K/mambavision_L3_21k_740m_256.pth.tar", 87.3),
        ("mambavision_large3_512_21k", "MambaVision-L3-512-21K/mambavision_L3_21k_740m_512.pth.tar", 88.1),
    ),
    (f"{_HUB}YuhengSSS/", NOT_STATED): (
        ("msvmambav3_tiny", "MSVMamba/msvmambav3_tiny_224.pth", 83.0),
        ("msvmambav3_small", "MSVMamba/msvmambav3_small_224.pth", 84.1),
        ("msvmambav3_base", "MSVMamba/msvmambav3_base_224.pth", 84.4),
        ("vssd_micro", "VSSD/vssd_micro_best.pth", 82.5),
        ("vssd_tiny", "VSSD/vssd_tiny_best_ema.pth", 83.6),
        ("vssd_small", "VSSD/vssd_small_best_ema.pth", 84.1),
        ("vssd_base", "VSSD/vssd_base_best_ema.pth", 84.7),
    ),
    (f"{_HUB}TerryPei/", "Apache-2.0"): (
        ("efficientvmamba_tiny", "EfficientVMamba-Tiny/efficient_vmamba_tiny.ckpt", 76.5),
        ("efficientvmamba_small", "EfficientVMamba-Small/efficient_vmamba_small.ckpt", 78.7),
        ("efficientvmamba_base", "EfficientVMamba-Base/efficient_vmamba_base.ckpt", 81.8),
    ),
}

_NANO = Pretrained(
    name="vmamba_nano_cifar10",
    variant="vmamba_nano",
    file="vmamba_nano_cifar10.safetensors",
    address=None,
    accuracy=94.09,
    num_classes=10,
    preprocessing=Preprocessing(size=32, resize=None, crop=False, mean=CIFAR10_MEAN, std=CIFAR10_STD),
    license="Apache-2.0",
    sha256="16a0a9d531deb58eb9eb94d332b64d568a98fe80776cab4847ce9a911487226b",
)

_NANO_LAYERNORM = replace(
    _NANO,
    name="vmamba_nano_layernorm_cifar10",
    file="vmamba_nano_layernorm_cifar10.safetensors",
    accuracy=93.02,
    norm="layer",
    sha256="c38d8916da6b47eb5965e2263de54b94a557c63a53bc71798b21a55594967daf",
)

_CAMVID = Pretrained(
    name="upernet_vmamba_nano_camvid",
    variant="upernet_vmamba_nano",
    file="upernet_vmamba_nano_camvid.safetensors",
    address=None,
    accuracy=55.2,
    num_classes=11,
    preprocessing=Preprocessing(size=180, resize=None, crop=False, interpolation="bilinear", keep_ratio=True),
    license="Apache-2.0",
    sha256="c458e7319b03632f63a27432a2839fd52b16f0a97b032fdb38680df5a8640fa5",
)


def _entries() -> Iterator[Pretrained]:
    yield from (_NANO, _NANO_LAYERNORM, _CAMVID)
    for (address, license), rows in _PUBLISHED.items():
        for variant, path, accuracy in rows:
            folder, _, file = path.rpartition("/")
            yield Pretrained(
                name=f"{variant}_{'ade20k' if variant.startswith('upernet_') else 'imagenet'}",
                variant=variant,
                file=file,
                address=f"{address}{folder}/resolve/main/{file}" if folder else f"{address}{file}",
                accuracy=accuracy,
                num_classes=VARIANTS[variant].num_classes,
                preprocessing=default_preprocessing(variant),
                license=license,
            )


PRETRAINED = {entry.name: entry for entry in _entries()}


def locate(pretrained: Pretrained) -> Path:
    """Path of a known checkpoint: shipped, cached, or downloaded now. Its hash is not checked."""
    if pretrained.address is None:
        return Path(str(resources.files("trust_tta") / "assets" / pretrained.file))
    path = cache_folder() / pretrained.file
    if not path.is_file():
        try:
            download(pretrained.address, path, sha256=pretrained.sha256)
        except DownloadError as error:
            raise CheckpointError(
                f"{pretrained.name}: {error}; or fetch it elsewhere and put it at '{path}', or give its path"
            ) from error
    return path


def find_file(source: object) -> tuple[Path, Pretrained | None]:
    """File of a known name, a path or "hf:owner/name", downloaded on first use, and the entry it is known by.

    Files and repositories of the hub are known by the name of a published one.
    """
    if not isinstance(source, str | os.PathLike):
        raise CheckpointError(f"a checkpoint is {show(source)}; give a name, a path or a state dict")
    name = str(source)
    if name in PRETRAINED:
        return locate(PRETRAINED[name]), PRETRAINED[name]
    file, repository = Path(source), None
    if name.startswith(HUB_PREFIX):
        repository = f"{_HUB}{name.removeprefix(HUB_PREFIX)}/"
        file = hub_folder(name.removeprefix(HUB_PREFIX)) / HUB_WEIGHTS
    if not file.is_file():
        if re.fullmatch(r"[\w.]+:\w+", name):
            raise CheckpointError(f"'{name}' is the name of a network, not of a checkpoint; give --model {name}")
        raise CheckpointError(
            f"no checkpoint at '{file}'; give the path of a .pth or .safetensors file or a known name: "
            f"{did_you_mean(name, PRETRAINED)}"
        )
    downloads = (known for known in PRETRAINED.values() if known.address)
    same = (k for k in downloads if k.file == file.name or (repository and str(k.address).startswith(repository)))
    return file, next(same, None)


def hub_folder(source: str | os.PathLike[str], *, revision: str | None = None) -> Path:
    """A folder of this machine, or the files of a repository "owner/name[@revision]" of the Hugging Face hub."""
    folder = Path(source)
    if folder.is_dir():
        return folder
    library = require("huggingface_hub", extra="hub")
    repository, _, stated = str(source).partition("@")
    try:
        found = library.snapshot_download(repository, revision=revision or stated or None, allow_patterns=_HUB_FILES)
    except Exception as error:  # the library may raise anything
        raise CheckpointError(
            f"'{source}' is not a folder here and cannot be fetched from the hub: {reason_of(error)}"
        ) from error
    return Path(found)


def check_pretrained(pretrained: Pretrained, path: Path, sha256: str) -> None:
    """Refuse a file whose hash is not the published one, nor the one it had when it was first read."""
    try:
        check_hash(path, sha256, pinned=pretrained.sha256)
    except DownloadError as error:
        raise CheckpointError(f"{pretrained.name}: {error}") from error
