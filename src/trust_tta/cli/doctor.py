"""`trust-tta doctor`: what this machine can run, and whether it computes the right thing."""

from __future__ import annotations

import platform
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from trust_tta._version import __version__
from trust_tta.cli.output import say
from trust_tta.errors import BackendError
from trust_tta.optional import available

if TYPE_CHECKING:
    import torch

EXAMPLES = """\
  trust-tta doctor                      check this machine
  trust-tta doctor --data /datasets     look for data sets there
  TRITON_INTERPRET=1 trust-tta doctor   check the GPU kernels too, in Triton's interpreter on the CPU"""

TOLERANCE = 1e-4  # of float32 against float64, relative to the largest entry
NAMES = ("y", "du", "ddelta", "dA", "dB", "dC", "dD", "ddelta_bias")

# Extra of trust-tta, the package it brings, what it is for.
EXTRAS = (
    ("triton", "triton", "the selective scan on a GPU"),
    ("foa", "cma", "the method foa"),
    ("parquet", "pyarrow", "export of results to Parquet"),
    ("figures", "matplotlib", "figures in reports"),
)


@dataclass(frozen=True)
class Check:
    """The largest relative error of a backend against the reference, and where it was found."""

    error: float
    where: str

    @property
    def passed(self) -> bool:
        return self.error <= TOLERANCE  # False for NaN


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--data",
        type=Path,
        default=Path("data"),
        metavar="ROOT",
        help="folder that holds the data sets (default: data)",
    )


def run(arguments: Namespace) -> None:
    """Print the findings; a backend that computes something else than the reference is a failure."""
    _section("versions", versions())
    _section("extras", [(extra, _describe_extra(extra, package, use)) for extra, package, use in EXTRAS])
    _section("shipped", shipped())
    _section("data", found_data(arguments.data))
    checks = {name: check_backend(name, device) for name, device in usable_backends().items()}
    lines = [(name, _describe_check(check)) for name, check in checks.items()]
    _section("scan backends (float32 against the reference in float64)", lines + list(unusable_backends().items()))
    failed = [name for name, check in checks.items() if not check.passed]
    if failed:
        raise BackendError(
            f"the scan backend {', '.join(failed)} does not agree with the reference within {TOLERANCE:g}; "
            "do not trust its results, use backend='reference' and report the lines above"
        )
    say(f"verdict: ok, every usable scan backend ({', '.join(checks)}) agrees with the reference")


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
    """The network and the images that come with the package, each checked against its pinned hash."""
    from trust_tta.data.embedded import load_sample
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


def usable_backends() -> dict[str, str]:
    """The backends that run here, each with the device to check it on."""
    import torch

    usable = {"reference": "cpu", "cpu": "cpu"}
    if available("triton") and (torch.cuda.is_available() or _interpreting()):
        usable["triton"] = "cpu" if _interpreting() else "cuda"
    return usable


def unusable_backends() -> dict[str, str]:
    """The backends that do not run here, each with the reason."""
    if "triton" in usable_backends():
        return {}
    if not available("triton"):
        return {"triton": "not usable: the package triton is missing; pip install 'trust-tta[triton]'"}
    return {"triton": "not usable: no CUDA device (TRITON_INTERPRET=1 checks it in the interpreter)"}


def check_backend(name: str, device: str) -> Check:
    """Output and every gradient of one backend against the reference, with one and with three states a channel."""
    worst = Check(0.0, "y")
    for state in (1, 3):
        inputs = _inputs(state)
        expected = _outputs(inputs, "reference")
        actual = _outputs([t.float().to(device) for t in inputs], name)
        for where, got, want in zip(NAMES, actual, expected, strict=True):
            error = ((got.double().cpu() - want).abs().max() / want.abs().max()).item()
            if not error <= worst.error:
                worst = Check(error, where)
    return worst


def _inputs(state: int) -> list[torch.Tensor]:
    """Two images, two groups, both directions, an odd number of channels, positions over more than one chunk."""
    import torch

    generator = torch.Generator().manual_seed(0)
    b, g, m, c, n, length = 2, 2, 2, 5, state, 300
    row, weight = (b, g, m, n, length), (g, m, c)
    shapes = ((b, g, c, length), (b, g, m, c, length), (g, m, c, n), row, row, weight, weight)
    u, delta, A, B, C, D, bias = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return [u, delta - 3, -A.exp(), B, C, D, bias]


def _outputs(inputs: list[torch.Tensor], backend: str) -> list[torch.Tensor]:
    """y and the gradients of the seven inputs, for an upstream gradient of cos(y's positions)."""
    import torch

    from trust_tta.scan import grouped_scan

    leaves = [t.clone().requires_grad_() for t in inputs]
    y = grouped_scan(*leaves, backend=backend)
    dy = torch.arange(y.numel(), dtype=torch.float64).cos().view(y.shape).to(y)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def _interpreting() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)


def _describe_check(check: Check) -> str:
    verdict = "ok" if check.passed else "FAILED"
    return f"{verdict}, largest relative error {check.error:.1e} ({check.where})"


def _describe_extra(extra: str, package: str, use: str) -> str:
    if available(package):
        return f"{package} {_version(package)}"
    return f"missing ({use}); pip install 'trust-tta[{extra}]'"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "present, version unknown" if available(package) else "missing"


def _section(title: str, lines: list[tuple[str, str]]) -> None:
    say(title)
    for name, text in lines:
        say(f"  {name:<10} {text}")
