"""`trust-tta doctor`: versions, extras and data of this machine, and a self-check of its scan backends."""

from __future__ import annotations

import importlib
import platform
from argparse import ArgumentParser, Namespace
from pathlib import Path

from trust_tta import __version__
from trust_tta.cli.output import say
from trust_tta.errors import BackendError, reason_of
from trust_tta.optional import available, version_of

EXAMPLES = """\
  trust-tta doctor                      check this machine
  trust-tta doctor --data /datasets     look for data sets there
  trust-tta doctor --compile            compile the kernels now, as when an image is built
  TRITON_INTERPRET=1 trust-tta doctor   check the GPU kernels too, in Triton's interpreter on the CPU"""

# Extra of trust-tta, the package it installs, what it is for.
EXTRAS = (
    ("triton", "triton", "the selective scan on a GPU"),
    ("foa", "cma", "the method foa"),
    ("parquet", "pyarrow", "export of results to Parquet"),
    ("figures", "matplotlib", "figures in reports"),
    ("serve", "starlette", "the service over HTTP"),
    ("export", "onnx", "export to ONNX"),
    ("timm", "timm", "networks of timm"),
    ("hub", "huggingface_hub", "the Hugging Face hub"),
    ("mlflow", "mlflow", "results to MLflow"),
    ("tensorboard", "tensorboard", "results to TensorBoard"),
    ("wandb", "wandb", "results to Weights & Biases"),
    ("ray", "ray", "clusters"),
)
_IMPORTED_FIRST = {"timm": ("torchvision",)}  # dependencies whose failure is otherwise taken for the package's


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--data", type=Path, default=Path("data"), metavar="ROOT", help="folder of the data sets (default: data)")
    add("--compile", action="store_true", help="fill the caches of compiled kernels; prints the seconds of each")


def run(arguments: Namespace) -> None:
    """Print the findings; fails if a backend disagrees with the reference."""
    from trust_tta.ops.selfcheck import TOLERANCE, check_backend, unusable_backends, usable_backends

    _section("versions", versions())
    _section("extras", [(extra, describe_extra(extra, package, use)) for extra, package, use in EXTRAS])
    _section("shipped", shipped())
    _section("data", found_data(arguments.data))
    if arguments.compile:
        _section("compiled kernels", compile_kernels())
    checks = {name: check_backend(name, device) for name, device in usable_backends().items()}
    lines = [
        (name, f"{'ok' if c.passed else 'FAILED'}, largest relative error {c.error:.1e} ({c.where})")
        for name, c in checks.items()
    ]
    _section("scan backends (float32 against the reference in float64)", lines + list(unusable_backends().items()))
    failed = [name for name, check in checks.items() if not check.passed]
    if failed:
        raise BackendError(
            f"the scan backend {', '.join(failed)} does not agree with the reference within {TOLERANCE:g}; "
            "do not trust its results, use backend='reference' and report the lines above"
        )
    say(f"verdict: ok, every usable scan backend ({', '.join(checks)}) agrees with the reference")


def compile_kernels() -> list[tuple[str, str]]:
    """Compile the kernels of the CPU, and those of the GPU in parallel processes; returns the seconds of each."""
    import torch

    from trust_tta.bench.startup import fill_gpu_caches
    from trust_tta.ops.cache import cache_folder, write_cached
    from trust_tta.ops.cpu.native import load_all

    if not write_cached("kernels/writable", b""):
        raise BackendError(
            f"kernels cannot be cached in '{cache_folder()}'; set TRUST_TTA_CACHE to a folder that can be written"
        )
    lines = [("CPU", f"{name} {seconds:.2f} s") for name, seconds in load_all().items()]
    rows = fill_gpu_caches() if torch.cuda.is_available() and available("triton") else []
    if failed := [row for row in rows if row.failed and row.batch < max(row.batch for row in rows)]:
        raise BackendError(f"{failed[0].work}, batch {failed[0].batch}, failed on the GPU: {failed[0].failed}")
    for row in rows:  # the largest batch may be too large for the device
        result = row.failed or f"{(row.median_ms or 0) / 1e3:.1f} s"
        lines.append(("GPU", f"{row.work}, {row.dtype}, {row.batch} images: {result}"))
    return [*lines, ("kept in", str(cache_folder()))]


def versions() -> list[tuple[str, str]]:
    import torch

    packages = [(name, _version(name)) for name in ("torch", "numba", "numpy")]
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return [
        ("trust-tta", __version__),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        *packages,
        ("threads", str(torch.get_num_threads())),
        ("GPU", ", ".join(devices) or "none"),
    ]


def shipped() -> list[tuple[str, str]]:
    """The network and the images that ship with the package, checked against their hashes."""
    from trust_tta.data.sample import load_sample
    from trust_tta.models.checkpoint import Checkpoint
    from trust_tta.models.pretrained import PRETRAINED

    known = PRETRAINED["vmamba_nano_cifar10"]
    Checkpoint.open(known.name)  # refuses a file with another hash
    images, _ = load_sample()
    return [("network", f"{known.name}, {known.accuracy} % clean accuracy"), ("images", f"{len(images)} of CIFAR-10")]


def found_data(root: Path) -> list[tuple[str, str]]:
    from trust_tta.data.check import find_present

    present = find_present(root) if root.is_dir() else []
    lines = [(spec.name, str(folder)) for spec, folder in present]
    return lines or [("none", f"in '{root}'; fetch one with: trust-tta data get cifar10 --root {root}")]


def describe_extra(extra: str, package: str, use: str) -> str:
    """The version of an extra's package, or why it cannot be imported."""
    if not available(package):
        return f"missing ({use}); pip install 'trust-tta[{extra}]'"
    for name in (*_IMPORTED_FIRST.get(package, ()), package):
        try:
            importlib.import_module(name)
        except Exception as error:  # libraries that do not fit each other raise all kinds
            cause = name if name == package else f"{name}, which {package} needs,"
            return f"BROKEN: {cause} cannot be imported: {type(error).__name__} ({reason_of(error)})"
    return f"{package} {_version(package)}"


def _version(package: str) -> str:
    return version_of(package) or ("present, version unknown" if available(package) else "missing")


def _section(title: str, lines: list[tuple[str, str]]) -> None:
    say(title)
    for name, text in lines:
        say(f"  {name:<10} {text}")
