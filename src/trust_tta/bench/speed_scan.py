"""The selective scan by itself, at the shapes it has inside a network, against the bytes that it must move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from trust_tta.bench.speed import Job, Limits, Row, Work
from trust_tta.models.vmamba import VMamba

Scan: TypeAlias = Callable[..., Tensor]
"""`scan.grouped_scan`."""

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Shape:
    """u (batch, 2, channels, length), each read forwards and backwards, with so many states a channel."""

    batch: int
    channels: int
    length: int
    state: int


@torch.no_grad()
def stage_shapes(model: VMamba, *, batch: int, size: int) -> list[Shape]:
    """The scan of each stage of a network for images of `size` x `size` pixels."""
    config = model.config
    device = next(model.parameters()).device
    maps = model.eval().forward_maps(model.embed(torch.zeros(1, config.in_channels, size, size, device=device)))
    return [Shape(batch, int(config.ssm_ratio * m.shape[1]), m.shape[2] * m.shape[3], config.d_state) for m in maps]


def scan_jobs(
    scan: Scan, shape: Shape, *, backend: str, dtype: str, device: torch.device, bandwidth: float, limits: Limits
) -> list[Job]:
    """Forward and backward of one scan."""
    own, apart = floor_bytes(shape, dtype), unfused_bytes(shape, dtype)
    jobs = []
    for i, work in enumerate(("forward", "backward")):
        row = Row(
            part="scan",
            work=work,
            backend=backend,
            dtype=dtype,
            batch=shape.batch,
            size=shape.length,
            channels=shape.channels,
        )

        def prepare(backward: bool = work == "backward") -> Iterator[Work]:
            return _prepare(scan, shape, backend=backend, dtype=dtype, device=device, backward=backward)

        jobs.append(
            Job(
                row=row,
                prepare=contextmanager(prepare),
                limits=limits,
                on_device=device.type == "cuda" and backend != "reference",
                floor=own[i] / bandwidth,
                unfused=apart[i] / bandwidth,
            )
        )
    return jobs


def floor_bytes(shape: Shape, dtype: str) -> tuple[int, int]:
    """Bytes that forward and backward must move: each input read once, each output written once."""
    itemsize = DTYPES[dtype].itemsize
    u = 2 * shape.batch * shape.channels * shape.length * itemsize
    delta, rows = 2 * u, 2 * 4 * shape.batch * shape.state * shape.length * itemsize
    return 2 * u + delta + rows, 3 * u + 2 * (delta + rows)


def unfused_bytes(shape: Shape, dtype: str) -> tuple[int, int]:
    """The same for four scans with an input and an output each: u, delta, y; and dy, du, ddelta beside u and delta."""
    sequence = 4 * shape.batch * shape.channels * shape.length * DTYPES[dtype].itemsize
    return 3 * sequence, 5 * sequence


def scan_inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """u, delta, A, B, C, D and delta_bias for two groups of two directions."""
    generator = torch.Generator().manual_seed(0)
    b, c, n, length = shape.batch, shape.channels, shape.state, shape.length

    def normal(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        if device.type != "cuda":
            return torch.randn(size, generator=generator).to(dtype)
        return torch.randn(size, device=device, dtype=dtype)

    u, delta = normal(b, 2, c, length, dtype=dtype), normal(b, 2, 2, c, length, dtype=dtype)
    B, C = normal(b, 2, 2, n, length, dtype=dtype), normal(b, 2, 2, n, length, dtype=dtype)
    return [u, delta, -torch.exp(normal(2, 2, c, n)), B, C, normal(2, 2, c), normal(2, 2, c) - 4]


def _prepare(
    scan: Scan, shape: Shape, *, backend: str, dtype: str, device: torch.device, backward: bool
) -> Iterator[Work]:
    inputs = scan_inputs(shape, DTYPES[dtype], device)
    if device.type != "cuda" or backend == "reference":
        yield _work(scan, inputs, backend, backward)
    else:
        yield _record(lambda: _work(scan, inputs, backend, backward), device)


def _record(make: Callable[[], Work], device: torch.device) -> Work:
    """The work as a graph of the device, so that launching it from Python does not count; as it is where that fails."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        work = make()  # autograd runs a backward on the stream of its forward
        for _ in range(3):
            work()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            work()
    except RuntimeError:
        return work
    return graph.replay


def _work(scan: Scan, inputs: list[Tensor], backend: str, backward: bool) -> Work:
    if not backward:

        def forward() -> Tensor:
            with torch.no_grad():
                return scan(*inputs, backend=backend)

        return forward
    leaves = [t.requires_grad_() for t in inputs]
    y = scan(*leaves, backend=backend)
    dy = torch.ones_like(y)
    return lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)
