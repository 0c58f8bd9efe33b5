"""`trust-tta speed`: forward, Tent, tide, TRUST in each mode and the scan, timed against the reference scan."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from trust_tta.bench.environment import collect_provenance, now
from trust_tta.bench.startup import startup_timings
from trust_tta.bench.timing import Case, Timing, TimingLimits, Work, float32_only, measure
from trust_tta.methods.registry import create_method
from trust_tta.models.base import ScanNetwork
from trust_tta.models.ss2d import SS2D
from trust_tta.models.typed import create_model
from trust_tta.models.vmamba import VMamba
from trust_tta.ops.functional import grouped_scan
from trust_tta.ops.selfcheck import check_backend
from trust_tta.progress import SILENT, Progress
from trust_tta.results import canonical_json
from trust_tta.schema import Count, Natural, Rate, Schema

SCHEMA_VERSION = 1
TRUST_ORDERS = 6  # by default
NATIVE = {"cpu": "cpu", "cuda": "triton"}  # the backend that "auto" takes on a device
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}

STARTUP_METHODS = ("model", "tent", "trust", "tide")  # on a CPU, TRUST and Tent compile nothing of their own

Step: TypeAlias = tuple[str, dict[str, Any]]
"""A method and its options; the name "" stands for the network itself."""


class SpeedSettings(Schema):
    """The network and the sizes of a run; scans are measured at the largest batch size.

    `size` None: that of the network's preprocessing. `startup`: also time imports and first batches in new processes.
    Each row is repeated `repeats` times at least and for `seconds` at least, after at most `warmups` calls.
    """

    model: str | None
    batches: Annotated[tuple[Count, ...], Field(min_length=1)]
    size: Annotated[int, Field(ge=16)] | None
    dtypes: Annotated[tuple[Literal["float32", "bf16"], ...], Field(min_length=1)]
    checkpoint: str | None = None
    classes: Count | None = None  # outputs of a network without a checkpoint
    startup: bool = False
    repeats: Count = 3
    seconds: Rate = 1.0
    warmups: Natural = 6


def measure_speed(
    settings: SpeedSettings,
    *,
    device: torch.device,
    keep: Callable[[dict[str, Any]], None] = lambda record: None,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Measure everything and return the record; `keep` receives it after every row: a stopped run leaves a part."""
    begun = time.perf_counter()
    torch.manual_seed(0)
    model = create_model(settings.model, checkpoint=settings.checkpoint, num_classes=settings.classes).to(device).eval()
    if settings.size is None:
        preprocessing = getattr(model, "preprocessing", None)
        settings = settings.changed(size=preprocessing.size if preprocessing else 224)
    checks = {name: check_backend(name, str(device)) for name in ("reference", NATIVE[device.type])}
    config = canonical_json(settings.model_dump())
    provenance = collect_provenance(device=device, dtype=",".join(settings.dtypes), config=config)
    parameters = sum(p.numel() for p in model.parameters())
    record: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "facts": {**asdict(provenance), "started": now()},
        "settings": settings.model_dump(),
        "parity": {name: {**asdict(check), "passed": check.passed} for name, check in checks.items()},
        "network": {"name": settings.model or settings.checkpoint, "parameters": parameters},
    }
    rows: list[Timing] = []

    def add(row: Timing) -> None:
        rows.append(row)
        progress.advance()
        record["rows"] = [asdict(row) for row in rows]
        record["over_reference"] = over_reference(rows)
        record["seconds"] = time.perf_counter() - begun
        keep(record)

    with float32_only(device):
        cases = make_cases(settings, model, device=device)
        progress.start(len(cases), "measuring")
        for case in cases:
            check = checks[case.timing.backend]
            refused = f"refused: the backend's error is {check.error:.1e} ({check.where})"
            add(measure(case, device) if check.passed else replace(case.timing, failed=refused))
        progress.finish()
    if settings.startup:
        methods = ("model", "tide") if device.type == "cpu" else STARTUP_METHODS
        progress.start(2 + 2 * len(methods), "starting processes")
        for row in startup_timings(
            settings.model or "",
            methods,
            checkpoint=settings.checkpoint or "",
            device=str(device),
            backend=NATIVE[device.type],
            batch=max(settings.batches),
            size=settings.size or 0,
        ):
            add(row)
        progress.finish()
    record["facts"]["finished"] = now()
    keep(record)
    return record


def over_reference(rows: Sequence[Timing]) -> dict[str, float]:
    """Speedup of each piece of work over the reference scan."""

    def place(row: Timing) -> tuple[object, ...]:
        return row.part, row.work, row.batch, row.size, row.channels

    slow = {place(r): r.median_ms for r in rows if r.backend == "reference" and r.median_ms}
    fast = [r for r in rows if r.backend != "reference" and r.median_ms and r.dtype == "float32"]
    return {
        f"{r.part}: {r.work}, batch {r.batch}, size {r.size}": slow[place(r)] / r.median_ms  # type: ignore[operator]
        for r in fast
        if place(r) in slow
    }


def make_cases(settings: SpeedSettings, model: nn.Module, *, device: torch.device) -> list[Case]:
    """Steps of the network, some followed by the same with the reference scan, then the scan of each stage alone."""
    limits = TimingLimits(seconds=settings.seconds, min_repeats=settings.repeats, max_warmups=settings.warmups)
    largest, size = max(settings.batches), settings.size or 0
    brief = replace(limits, seconds=limits.seconds / 4)
    # Seconds per pass on a GPU: a few repeats tell the ratio, and a whole step of TRUST takes minutes at 224 pixels.
    few = replace(brief, min_repeats=min(2, limits.min_repeats), max_seconds=5.0)
    slow = ["forward", "forward and backward"]
    slow += [f"TRUST K={order_count(model)} sequential"] if device.type == "cpu" else []
    cases = []
    for batch in settings.batches:
        for dtype in settings.dtypes:
            for work, step in network_steps(model, batch=batch).items():
                row = Timing(
                    part="network", work=work, backend=NATIVE[device.type], dtype=dtype, batch=batch, size=size
                )
                cases.append(Case(timing=row, prepare=partial(network_step, model, row, step), limits=limits))
                if isinstance(model, ScanNetwork) and work in slow and (batch, dtype) == (largest, "float32"):
                    reference = replace(row, backend="reference")
                    prepare = partial(network_step, model, reference, step)
                    cases.append(
                        Case(timing=reference, prepare=prepare, limits=limits if device.type == "cpu" else few)
                    )
    if isinstance(model, VMamba) and any(type(module) is SS2D for module in model.modules()):
        for shape in stage_shapes(model, batch=largest, size=size):
            for backend, dtype in [*((NATIVE[device.type], d) for d in settings.dtypes), ("reference", "float32")]:
                cases += scan_cases(shape, backend=backend, dtype=dtype, device=device, limits=brief)
    return cases


# the network


def network_steps(model: nn.Module, *, batch: int) -> dict[str, Step]:
    """Steps to time, by name; a batch of one cannot be split among orders."""
    steps: dict[str, Step] = {
        "forward": ("", {}),
        "forward by the method 'source'": ("source", {}),
        "forward and backward": ("", {}),
        "Tent": ("tent", {}),
        "tide": ("tide", {}),
    }
    if orders := order_count(model):
        steps |= {
            "TRUST naive": ("trust_naive", {}),
            f"TRUST K={orders} sequential": ("trust", {"mode": "sequential"}),
            f"TRUST K={orders} parallel replicate": ("trust", {"mode": "replicate"}),
        }
        if batch > 1:
            steps[f"TRUST K={orders} parallel split"] = ("trust", {"mode": "split"})
    return steps


def order_count(model: nn.Module) -> int:
    """Number of scan orders that TRUST takes by default; 0 for networks that have none."""
    if not isinstance(model, ScanNetwork) or model.order_free:
        return 0
    return min(TRUST_ORDERS, len(model.scan_orders))


@contextmanager
def network_step(model: nn.Module, timing: Timing, step: Step) -> Iterator[Work]:
    method, options = step
    device = next(model.parameters()).device
    size = (timing.batch, 3, timing.size, timing.size)
    images = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(device)
    if isinstance(model, ScanNetwork):
        model.set_scan_backend(timing.backend)
    try:
        if method:
            adapted = create_method(method, model, **options)
            try:
                yield lambda: adapted(images)
            finally:
                adapted.reset()  # the method's weights are the network's own
        elif timing.work == "forward":
            model.eval()
            yield torch.no_grad()(lambda: model(images))
        else:  # the gradient of every parameter, as in training
            model.eval()
            labels = torch.zeros(timing.batch, dtype=torch.long, device=device)
            yield lambda: torch.autograd.grad(F.cross_entropy(model(images), labels), list(model.parameters()))
    finally:
        if isinstance(model, ScanNetwork):
            model.set_scan_backend("auto")


# the scan alone


@dataclass(frozen=True)
class Shape:
    """u (batch, 2, channels, length), each read forward and backward, with `state` states per channel."""

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


def scan_cases(shape: Shape, *, backend: str, dtype: str, device: torch.device, limits: TimingLimits) -> list[Case]:
    """Forward and backward of one scan."""

    @contextmanager
    def prepare(work: str) -> Iterator[Work]:
        inputs = scan_inputs(shape, DTYPES[dtype], device)
        if work == "forward":
            yield torch.no_grad()(lambda: grouped_scan(*inputs, backend=backend))
            return
        leaves = [t.requires_grad_() for t in inputs]
        y = grouped_scan(*leaves, backend=backend)
        dy = torch.ones_like(y)
        yield lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)

    b, c, length = shape.batch, shape.channels, shape.length
    timing = Timing(part="scan", work="", backend=backend, dtype=dtype, batch=b, size=length, channels=c)
    return [
        Case(timing=replace(timing, work=work), prepare=partial(prepare, work), limits=limits)
        for work in ("forward", "backward")
    ]


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
