"""The environment of a run: device, versions, commit."""

from __future__ import annotations

import platform
import re
import subprocess
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np
import torch

import trust_tta
from trust_tta import __version__
from trust_tta.errors import ConfigError
from trust_tta.optional import version_of
from trust_tta.results.record import Provenance


def choose_device(name: str) -> torch.device:
    """The CPU or CUDA device of this name; "auto" is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ConfigError(f"device {name!r} is unknown; give auto, cpu, cuda or cuda:1")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} needs a GPU and none is usable here; give auto or cpu")
    if device.type == "cuda" and device.index is not None and device.index >= (count := torch.cuda.device_count()):
        raise ConfigError(f"device {name!r} does not exist; the last one is cuda:{count - 1}")
    return device


def autocast(device: torch.device, dtype: str) -> torch.autocast:
    """Autocast to bfloat16, enabled if the dtype is "bf16"."""
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bf16")


def synchronize(device: torch.device) -> None:
    """Wait for the queued work of a CUDA device; on a CPU there is none."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def collect_provenance(*, device: torch.device, dtype: str, config: str) -> Provenance:
    """Versions and hardware of this process; each cell fills in its times."""
    return Provenance(
        trust_tta=__version__,
        torch=str(torch.__version__),
        numpy=np.__version__,
        triton=version_of("triton"),
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        device=f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device),
        dtype=dtype,
        threads=torch.get_num_threads(),
        commit=find_commit(Path(trust_tta.__file__).parent),
        config=config,
        started="",
        finished="",
    )


def now() -> str:
    """The time in UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def find_commit(package: Path) -> str | None:
    """The commit of the package's files, with "-dirty" if they were changed; None outside a clone."""
    git = partial(subprocess.run, cwd=package, capture_output=True, check=True, text=True, timeout=30)
    try:
        # An installed package may lie inside another repository: only tracked files count.
        git(["git", "ls-files", "--error-unmatch", "__init__.py"])
        described = git(["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"])
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip() or None
