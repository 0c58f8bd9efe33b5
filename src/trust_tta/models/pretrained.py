"""Known checkpoints: where they come from, which network they fit, and the preprocessing they were trained with."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from trust_tta.data.class_names import CIFAR10_CLASSES, imagenet_classes, segmentation_classes
from trust_tta.data.download import check_hash, download
from trust_tta.errors import CheckpointError, DownloadError, reason_of
from trust_tta.models.variants import default_preprocessing
from trust_tta.ops.cache import cache_folder
from trust_tta.optional import require
from trust_tta.preprocessing import CIFAR10_MEAN, CIFAR10_STD, PRESETS, Preprocessing
from trust_tta.progress import SILENT, Progress


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


_PIXELS = {11: "camvid", 150: "ade20k"}

_UPSTREAM = "https://github.com/MzeroMiko/VMamba/releases/download/"


def _upstream(variant: str, release: str, file: str, accuracy: float) -> Pretrained:
    return Pretrained(f"{variant}_imagenet", variant, file, f"{_UPSTREAM}%23{release}/{file}", accuracy)


_ADE = "4xb4-160k_ade20k-512x512"


def _segmenter(variant: str, release: str, file: str, mean_iou: float) -> Pretrained:
    """Entry for ADE20K at 512 x 512 pixels."""
    return Pretrained(
        f"upernet_{variant}_ade20k",
        f"upernet_{variant}",
        file,
        f"{_UPSTREAM}%23{release}/{file}",
        mean_iou,
        num_classes=150,
        preprocessing=PRESETS["pixels512"],
    )


NOT_STATED = "not stated"  # no license file, and no word on one: all rights are reserved
_HUB = "https://huggingface.co/"


def _vim(variant: str, repository: str, file: str, accuracy: float) -> Pretrained:
    address = f"{_HUB}hustvl/{repository}/resolve/main/{file}"
    return Pretrained(f"{variant}_imagenet", variant, file, address, accuracy, license="Apache-2.0")


def _groupmamba(size: str, accuracy: float) -> Pretrained:
    variant, file = f"groupmamba_{size}", f"groupmamba_{size}_ema.pth"
    address = f"{_HUB}Abdelrahman-shaker/GroupMamba-{size.title()}/resolve/main/{file}"
    return Pretrained(f"{variant}_imagenet", variant, file, address, accuracy)


def _local(variant: str, file: str, accuracy: float) -> Pretrained:
    address = f"https://github.com/hunto/LocalMamba/releases/download/v1.0.0/{file}"
    return Pretrained(f"{variant}_imagenet", variant, file, address, accuracy, license="Apache-2.0")


def _mambavision(variant: str, repository: str, file: str, accuracy: float) -> Pretrained:
    name, address = f"{variant}_imagenet", f"{_HUB}nvidia/{repository}/resolve/main/{file}"
    wanted = default_preprocessing(variant)
    return Pretrained(name, variant, file, address, accuracy, preprocessing=wanted, license="CC-BY-NC-SA-4.0")


def _msvmamba(size: str, accuracy: float) -> Pretrained:
    variant, file = f"msvmambav3_{size}", f"msvmambav3_{size}_224.pth"
    address = f"{_HUB}YuhengSSS/MSVMamba/resolve/main/{file}"
    return Pretrained(f"{variant}_imagenet", variant, file, address, accuracy, license=NOT_STATED)


def _efficient(size: str, accuracy: float) -> Pretrained:
    variant, file = f"efficientvmamba_{size}", f"efficient_vmamba_{size}.ckpt"
    address = f"{_HUB}TerryPei/EfficientVMamba-{size.title()}/resolve/main/{file}"
    return Pretrained(f"{variant}_imagenet", variant, file, address, accuracy, license="Apache-2.0")


def _vssd(size: str, file: str, accuracy: float) -> Pretrained:
    variant, address = f"vssd_{size}", f"{_HUB}YuhengSSS/VSSD/resolve/main/{file}"
    return Pretrained(f"{variant}_imagenet", variant, file, address, accuracy, license=NOT_STATED)


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

PRETRAINED = {
    p.name: p
    for p in (
        _NANO,
        _CAMVID,
        _upstream("vmamba_tiny_s1l8", "v2cls", "vssm1_tiny_0230s_ckpt_epoch_264.pth", 82.6),
        _upstream("vmamba_tiny_s2l5", "v2cls", "vssm_tiny_0230_ckpt_epoch_262.pth", 82.5),
        _upstream("vmamba_small_s1l20", "v2cls", "vssm1_small_0229s_ckpt_epoch_240.pth", 83.3),
        _upstream("vmamba_small_s2l15", "v2cls", "vssm_small_0229_ckpt_epoch_222.pth", 83.6),
        _upstream("vmamba_base_s1l20", "v2cls", "vssm1_base_0229s_ckpt_epoch_225.pth", 83.8),
        _upstream("vmamba_base_s2l15", "v2cls", "vssm_base_0229_ckpt_epoch_237.pth", 83.9),
        _upstream("vanilla_vmamba_tiny", "v0cls", "vssmtiny_dp01_ckpt_epoch_292.pth", 82.2),
        _upstream("vanilla_vmamba_small", "v0cls", "vssmsmall_dp03_ckpt_epoch_238.pth", 83.5),
        _upstream("vanilla_vmamba_base", "v0cls", "vssmbase_dp06_ckpt_epoch_241.pth", 83.7),
        _segmenter("vmamba_tiny_s1l8", "v2seg", f"upernet_vssm_{_ADE}_tiny_s_iter_160000.pth", 47.9),
        _segmenter("vmamba_tiny_s2l5", "v2seg", f"upernet_vssm_{_ADE}_tiny_iter_160000.pth", 48.3),
        _segmenter("vmamba_small_s2l15", "v2seg", f"upernet_vssm_{_ADE}_small_iter_144000.pth", 50.6),
        _segmenter("vmamba_base_s2l15", "v2seg", f"upernet_vssm_{_ADE}_base_iter_160000.pth", 51.0),
        _segmenter("vanilla_vmamba_tiny", "v0seg", f"vssmtiny_upernet_{_ADE}_iter_160000.pth", 47.3),
        _segmenter("vanilla_vmamba_small", "v0seg", f"vssmsmall_upernet_{_ADE}_iter_160000.pth", 49.5),
        _segmenter("vanilla_vmamba_base", "v0seg", f"vssmbase_upernet_{_ADE}_iter_128000.pth", 50.0),
        _vim("vim_tiny", "Vim-tiny-midclstok", "vim_t_midclstok_76p1acc.pth", 76.1),
        _vim("vim_tiny_stride8", "Vim-tiny-midclstok", "vim_t_midclstok_ft_78p3acc.pth", 78.3),
        _vim("vim_small", "Vim-small-midclstok", "vim_s_midclstok_80p5acc.pth", 80.5),
        _vim("vim_small_stride8", "Vim-small-midclstok", "vim_s_midclstok_ft_81p6acc.pth", 81.6),
        _vim("vim_base", "Vim-base-midclstok", "vim_b_midclstok_81p9acc.pth", 81.9),
        _groupmamba("tiny", 83.3),
        _groupmamba("small", 83.9),
        _groupmamba("base", 84.5),
        _local("localvmamba_small", "local_vssm_small.ckpt", 83.7),
        _local("localvim_tiny", "local_vim_tiny.ckpt", 76.2),
        _local("localvim_tiny_midclstok", "local_vim_tiny_middle_cls_token.ckpt", 77.8),
        _mambavision("mambavision_tiny", "MambaVision-T-1K", "mambavision_tiny_1k.pth.tar", 82.3),
        _mambavision("mambavision_tiny2", "MambaVision-T2-1K", "mambavision_tiny2_1k.pth.tar", 82.7),
        _mambavision("mambavision_small", "MambaVision-S-1K", "mambavision_small_1k.pth.tar", 83.3),
        _mambavision("mambavision_base", "MambaVision-B-1K", "mambavision_base_1k.pth.tar", 84.2),
        _mambavision("mambavision_base_21k", "MambaVision-B-21K", "mambavision_base_21k.pth.tar", 84.9),
        _mambavision("mambavision_large", "MambaVision-L-1K", "mambavision_large_1k.pth.tar", 85.0),
        _mambavision("mambavision_large_21k", "MambaVision-L-21K", "mambavision_large_21k.pth.tar", 86.1),
        _mambavision("mambavision_large2", "MambaVision-L2-1K", "mambavision_large2_1k.pth.tar", 85.3),
        _mambavision(
            "mambavision_large2_512_21k", "MambaVision-L2-512-21K", "mambavision_L2_21k_240m_512.pth.tar", 87.3
        ),
        _mambavision(
            "mambavision_large3_256_21k", "MambaVision-L3-256-21K", "mambavision_L3_21k_740m_256.pth.tar", 87.3
        ),
        _mambavision(
            "mambavision_large3_512_21k", "MambaVision-L3-512-21K", "mambavision_L3_21k_740m_512.pth.tar", 88.1
        ),
        _msvmamba("tiny", 83.0),
        _msvmamba("small", 84.1),
        _msvmamba("base", 84.4),
        _efficient("tiny", 76.5),
        _efficient("small", 78.7),
        _efficient("base", 81.8),
        _vssd("micro", "vssd_micro_best.pth", 82.5),
        _vssd("tiny", "vssd_tiny_best_ema.pth", 83.6),
        _vssd("small", "vssd_small_best_ema.pth", 84.1),
        _vssd("base", "vssd_base_best_ema.pth", 84.7),
    )
}


def find_published(source: str | os.PathLike[str] | None, file: Path | None) -> Pretrained | None:
    """The published checkpoint that a path or "hf:owner/name" is, by the name of its file or repository."""
    repository = str(source).removeprefix(HUB_PREFIX) if str(source).startswith(HUB_PREFIX) else None
    for known in PRETRAINED.values():
        if file is not None and known.address and known.file == file.name:
            return known
        if repository and known.address and known.address.startswith(f"{_HUB}{repository}/"):
            return known
    return None


def locate(pretrained: Pretrained, *, progress: Progress = SILENT) -> Path:
    """Path of a known checkpoint: shipped, cached, or downloaded now. The caller checks its hash."""
    if pretrained.address is None:
        return Path(str(resources.files("trust_tta") / "assets" / pretrained.file))
    path = cache_folder() / pretrained.file
    if not path.is_file():
        try:
            download(pretrained.address, path, sha256=pretrained.sha256, progress=progress)
        except DownloadError as error:
            raise CheckpointError(
                f"{pretrained.name}: {error}; or fetch it elsewhere and put it at '{path}', or give its path"
            ) from error
    return path


HUB_PREFIX, HUB_WEIGHTS = "hf:", "model.safetensors"
_HUB_FILES = (HUB_WEIGHTS, "adaptation.safetensors", "config.json", "README.md")


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
