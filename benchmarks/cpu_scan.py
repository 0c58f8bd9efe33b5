"""The CPU scan against its alternatives, alone and inside VMamba-T, and what its compilation costs.

    python benchmarks/cpu_scan.py --out cpu_scan.json

Every figure comes from this one run. Times are medians of `--repeats`; each candidate is checked against the
reference before it is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

import trust_tta as tt
from trust_tta.atomic import replacing
from trust_tta.ops import reference
from trust_tta.ops.functional import grouped_scan
from trust_tta.ops.reference import scan_grouped

LONG = 2.0  # seconds after which a call is not repeated

Scan = Callable[..., Tensor]
Recurrence = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Row:
    """One candidate: seconds, or the reason why it did not run."""

    name: str
    forward: float | None = None
    both: float | None = None
    error: float | None = None
    reason: str = ""


def loop_over_slices(a: Tensor, x: Tensor) -> Tensor:
    """A slice of the sequence at every step, as the loop is usually written.

    The backward of a slice fills a tensor of the whole length, so that it is quadratic in the length.
    """
    h, states = torch.zeros_like(x[..., 0]), []
    for t in range(x.shape[-1]):
        h = a[..., t] * h + x[..., t]
        states.append(h)
    return torch.stack(states, dim=-1)


def loop_time_major(a: Tensor, x: Tensor) -> Tensor:
    """The same loop with time as the first axis, so that every step reads and writes contiguous memory."""
    h, states = torch.zeros_like(x[..., 0]), []
    for a_t, x_t in zip(a.movedim(-1, 0).contiguous(), x.movedim(-1, 0).contiguous(), strict=True):
        h = a_t * h + x_t
        states.append(h)
    return torch.stack(states).movedim(0, -1)


def loop_over_chunks(a: Tensor, x: Tensor) -> Tensor:
    """All chunks side by side, then the carries from chunk to chunk: about 2 sqrt(length) steps."""
    length = x.shape[-1]
    size = max(1, round(length**0.5))
    padding = -length % size
    a, x = (F.pad(t, (0, padding)).unflatten(-1, (-1, size)) for t in (a, x))
    state, decay = torch.zeros_like(x[..., 0]), torch.ones_like(x[..., 0])
    states, decays = [], []
    for a_t, x_t in zip(a.unbind(-1), x.unbind(-1), strict=True):
        state, decay = a_t * state + x_t, a_t * decay
        states.append(state)
        decays.append(decay)
    carry, carries = torch.zeros_like(state[..., 0]), []
    for last_state, last_decay in zip(state.unbind(-1), decay.unbind(-1), strict=True):
        carries.append(carry)
        carry = last_decay * carry + last_state
    h = torch.stack(states, dim=-1) + torch.stack(decays, dim=-1) * torch.stack(carries, dim=-1)[..., None]
    return h.flatten(-2)[..., :length]


def associative(a: Tensor, x: Tensor) -> Tensor:
    """PyTorch's own associative scan, without its compiler."""
    from torch._higher_order_ops.associative_scan import associative_scan

    def combine(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return first[0] * second[0], second[0] * first[1] + second[1]

    h: Tensor = associative_scan(combine, (a, x), dim=x.dim() - 1, combine_mode="generic")[1]
    return h


def scan_with(recurrence: Recurrence) -> Scan:
    """The whole scan around one way to compute h_t = a_t h_{t-1} + x_t along the last axis."""

    def scan(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, bias: Tensor, _: bool) -> Tensor:
        d = F.softplus(delta + bias[..., None])
        y = D.sum(1)[..., None] * u
        for m in range(delta.shape[2]):
            a = torch.exp(d[:, :, m, :, None] * A[:, m, :, :, None])
            x = (d[:, :, m] * u)[:, :, :, None] * B[:, :, m, None]
            h = recurrence(a, x) if m == 0 else recurrence(a.flip(-1), x.flip(-1)).flip(-1)
            y = y + (h * C[:, :, m, None]).sum(3)
        return y

    return scan


def four_copies(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, bias: Tensor, _: bool) -> Tensor:
    """The loop as Mamba's reference is written: four reversed or plain copies, three slices at every step."""
    groups, directions, channels, state = A.shape

    def copies(t: Tensor) -> Tensor:
        """(b, g, m, c, l) with the backward direction back to front, as (b, g*m*c, l)."""
        return torch.stack([t[:, :, m] if m == 0 else t[:, :, m].flip(-1) for m in range(directions)], 2).flatten(1, 3)

    x = copies(u.unsqueeze(2).expand(-1, -1, directions, -1, -1))
    d = F.softplus(copies(delta) + bias.flatten()[:, None])
    rows = [copies(t).unflatten(1, (groups * directions, state)).repeat_interleave(channels, 1) for t in (B, C)]
    decay = torch.exp(torch.einsum("bdl,dn->bdln", d, A.flatten(0, 2)))
    drive = torch.einsum("bdl,bdnl,bdl->bdln", d, rows[0], x)
    h, outputs = torch.zeros_like(decay[:, :, 0]), []
    for t in range(x.shape[-1]):
        h = decay[:, :, t] * h + drive[:, :, t]
        outputs.append(torch.einsum("bdn,bdn->bd", h, rows[1][:, :, :, t]))
    y = (torch.stack(outputs, dim=2) + x * D.flatten()[:, None]).unflatten(1, (groups, directions, channels))
    return sum((y[:, :, m] if m == 0 else y[:, :, m].flip(-1) for m in range(directions)), torch.zeros_like(u))


def compiled_scan(*inputs: Any) -> Tensor:
    return grouped_scan(*inputs[:-1], delta_softplus=inputs[-1], backend="cpu")


CANDIDATES: dict[str, Scan] = {
    "numba (backend 'cpu')": compiled_scan,
    "loop over time (backend 'reference')": scan_grouped,
    "loop over time, slicing": scan_with(loop_over_slices),
    "loop over time, as Mamba's reference": four_copies,
    "loop over time, time-major": scan_with(loop_time_major),
    "chunked PyTorch": scan_with(loop_over_chunks),
    "torch associative_scan": scan_with(associative),
}


def make_inputs(batch: int, channels: int, length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    row, weight = (batch, 2, 2, 1, length), (2, 2, channels)
    shapes = ((batch, 2, channels, length), (batch, 2, 2, channels, length), (*weight, 1), row, row, weight, weight)
    u, delta, A, B, C, D, bias = (torch.randn(s, generator=generator) for s in shapes)
    return [u, delta - 3, -A.exp(), B, C, D, bias]


def median_time(work: Callable[[], object], repeats: int) -> float:
    """Seconds of the median call, after one that counts only if it took so long that warming up is nothing."""
    first = timed(work)
    return first if first > LONG else statistics.median([timed(work) for _ in range(repeats)])


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def forward_and_backward(scan: Scan, inputs: list[Tensor]) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in inputs]
    y = scan(*leaves, True)
    return [y.detach(), *torch.autograd.grad(y.square().mean(), leaves)]


def largest_error(scan: Scan, inputs: list[Tensor]) -> float:
    actual = forward_and_backward(scan, inputs)
    expected = forward_and_backward(scan_grouped, [t.double() for t in inputs])
    return max(((a - e).abs().max() / e.abs().max()).item() for a, e in zip(actual, expected, strict=True))


def time_scan(name: str, inputs: list[Tensor], repeats: int) -> Row:
    scan = CANDIDATES[name]
    try:
        error = largest_error(scan, [t[..., :200] if t.dim() > 3 and t.shape[-1] > 200 else t for t in inputs])
        if not error < 1e-4:
            return Row(name, error=error, reason="wrong result")
        with torch.no_grad():
            forward = median_time(lambda: scan(*inputs, True), repeats)
        return Row(name, forward, median_time(lambda: forward_and_backward(scan, inputs), repeats), error)
    except (RuntimeError, ImportError, NotImplementedError) as failure:
        return Row(name, reason=str(failure).strip().splitlines()[0])


def time_network(name: str, model: tt.VMamba, images: Tensor, backend: str, repeats: int) -> Row:
    model.set_scan_backend(backend)
    parameters = list(model.parameters())

    def both() -> None:
        torch.autograd.grad(model(images).square().mean(), parameters)

    with torch.no_grad():
        forward = median_time(lambda: model(images), repeats)
    return Row(name, forward, median_time(both, repeats))


def time_networks(batch: int, size: int, repeats: int) -> list[Row]:
    """VMamba-T with each way to scan."""
    torch.manual_seed(0)
    model, images = tt.create_model("vmamba_tiny_s1l8").eval(), torch.randn(batch, 3, size, size)
    rows = [time_network("numba (backend 'auto')", model, images, "auto", repeats)]
    rows.append(time_network("loop over time (backend 'reference')", model, images, "reference", repeats))
    for name in ("loop over time, slicing", "loop over time, as Mamba's reference"):
        with mock.patch.object(reference, "scan_grouped", CANDIDATES[name]):
            rows.append(time_network(name, model, images, "reference", repeats))
    return rows


FIRST_USE = """
import time, torch
from trust_tta.ops.operators import scan
start = time.perf_counter()
row, weight = torch.ones(1, 1, 1, 1, 8, requires_grad=True), torch.ones(1, 1, 1)
inputs = torch.ones(1, 1, 1, 8), torch.ones(1, 1, 1, 1, 8), -torch.ones(1, 1, 1, 1), row, row, weight, weight
scan(*inputs, True, False)[0].sum().backward()
print(time.perf_counter() - start)
"""


def time_first_use() -> dict[str, float]:
    """Seconds of the first forward and backward in a new process: with an empty cache, and with a filled one."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"NUMBA_CACHE_DIR": folder}
        seconds = [
            float(
                subprocess.run(
                    [sys.executable, "-c", FIRST_USE], env=environment, capture_output=True, check=True
                ).stdout
            )
            for _ in range(2)
        ]
    return {"cold": seconds[0], "cached": seconds[1]}


def print_rows(title: str, rows: list[Row]) -> None:
    print(f"\n{title}\n{'':<40}{'forward':>12}{'both':>12}{'both, ratio':>14}")
    first = rows[0].both
    for row in rows:
        if row.forward is None or row.both is None or first is None:
            print(f"{row.name:<40}{row.reason}")
        else:
            print(f"{row.name:<40}{row.forward * 1e3:>9.1f} ms{row.both * 1e3:>9.1f} ms{row.both / first:>13.1f}x")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument(
        "--size", type=int, default=224, help="pixels of the network's images; the scan's map is a quarter"
    )
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    length = (arguments.size // 4) ** 2
    inputs = make_inputs(arguments.batch, 96, length)
    scans = [time_scan(name, inputs, arguments.repeats) for name in CANDIDATES]
    print_rows(f"scan of (B={arguments.batch}, G=2, M=2, C=96, L={length}, N=1), {arguments.threads} threads", scans)
    networks = time_networks(arguments.batch, arguments.size, arguments.repeats)
    print_rows(f"vmamba_tiny_s1l8, {arguments.size} px, batch {arguments.batch}", networks)
    first_use = time_first_use()
    print(f"\nfirst use: {first_use['cold']:.1f} s with an empty cache, {first_use['cached']:.2f} s with a filled one")
    if arguments.out:
        settings = {k: v for k, v in vars(arguments).items() if k != "out"}
        machine = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
        record: dict[str, Any] = {"settings": settings, "versions": machine, "first_use_s": first_use}
        record |= {"scan_s": [asdict(r) for r in scans], "network_s": [asdict(r) for r in networks]}
        with replacing(arguments.out) as path:
            path.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
