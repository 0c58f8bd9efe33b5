"""`trust-tta speed`: a network, Tent, TRUST in each mode and the scan alone, timed in one run as one record."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from trust_tta.bench.environment import collect_provenance, now
from trust_tta.bench.startup import startup_timings
from trust_tta.bench.timing import Case, Timing, TimingLimits, Work, copy_bandwidth, float32_only, measure, refuse
from trust_tta.errors import ConfigError, TrustError
from trust_tta.methods import merging
from trust_tta.methods.parameters import ParameterSet, select
from trust_tta.methods.ranking import rank_orders
from trust_tta.methods.registry import create_method
from trust_tta.models.factory import create_model
from trust_tta.models.vmamba import VMamba
from trust_tta.ops.functional import grouped_scan
from trust_tta.ops.selfcheck import BackendCheck, check_backend
from trust_tta.orders import PAPER_ORDERS, VMAMBA_SCAN_ORDERS, ScanOrder, find_order
from trust_tta.progress import SILENT, Progress
from trust_tta.results import canonical_json

SCHEMA_VERSION = 1


def measure_speed(
    settings: SpeedSettings,
    *,
    device: torch.device,
    keep: Callable[[dict[str, Any]], None] = lambda record: None,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Measure everything and return the record; `keep` gets it after every row, so that a stopped run leaves a part."""
    begun = time.perf_counter()
    torch.manual_seed(0)
    model = create_model(settings.model, checkpoint=settings.checkpoint, num_classes=settings.classes).to(device).eval()
    if settings.size is None:
        preprocessing = getattr(model, "preprocessing", None)
        settings = replace(settings, size=preprocessing.size if preprocessing else 224)
    checks = {name: check_backend(name, str(device)) for name in ("reference", NATIVE[device.type])}
    rows: list[Timing] = []
    with float32_only(device):
        record = _describe(settings, model, device, checks)
        cases = make_cases(settings, model, grouped_scan, device=device, bandwidth=record["copy_bytes_per_second"])
        progress.start(len(cases), "measuring")
        for case in cases:
            check = checks[case.timing.backend]
            if check.passed:
                rows.append(measure(case, device))
            else:
                rows.append(refuse(case, f"the backend's error is {check.error:.1e} ({check.where})"))
            progress.advance()
            record |= _conclude(rows) | {"seconds": time.perf_counter() - begun}
            keep(record)
        progress.finish()
    if settings.startup:
        rows += _startup(settings, device, progress)
        record |= _conclude(rows) | {"seconds": time.perf_counter() - begun}
    record["facts"]["finished"] = now()
    keep(record)
    return record


def _startup(settings: SpeedSettings, device: torch.device, progress: Progress) -> list[Timing]:
    """First-call times; of TRUST and Tent on a GPU only, where their kernels are compiled."""
    methods = ("model", "tide") if device.type == "cpu" else ("model", "tent", "trust", "tide")
    progress.start(2 + 2 * len(methods), "starting processes")
    rows = []
    for row in startup_timings(
        settings.model or "",
        methods,
        checkpoint=settings.checkpoint or "",
        device=str(device),
        backend=NATIVE[device.type],
        batch=max(settings.batches),
        size=settings.size or 0,
    ):
        rows.append(row)
        progress.advance()
    progress.finish()
    return rows


def failed_backends(record: dict[str, Any]) -> list[str]:
    """The backends of a record that did not agree with the reference."""
    return [name for name, check in record["parity"].items() if not check["passed"]]


def _describe(
    settings: SpeedSettings, model: nn.Module, device: torch.device, checks: dict[str, BackendCheck]
) -> dict[str, Any]:
    """The record before its rows: environment, checks, counts, the speed of a copy."""
    config = canonical_json(asdict(settings))
    provenance = collect_provenance(device=device, dtype=",".join(settings.dtypes), config=config)
    brief = replace(settings.limits, seconds=settings.limits.seconds / 4)
    return {
        "schema_version": SCHEMA_VERSION,
        "facts": {**asdict(provenance), "started": now()},
        "settings": asdict(settings),
        "parity": {name: {**asdict(check), "passed": check.passed} for name, check in checks.items()},
        "copy_bytes_per_second": copy_bandwidth(device, limits=brief),
        "network": {"name": settings.model or settings.checkpoint, **asdict(count(model, size=settings.size or 0))},
    }


def _conclude(rows: list[Timing]) -> dict[str, Any]:
    """The rows and their summary."""
    return {
        "rows": [asdict(row) for row in rows],
        "over_reference": over_reference(rows),
        "memory_over_one_order": memory_over_one(rows),
    }


# what one run measures

NATIVE = {"cpu": "cpu", "cuda": "triton"}  # the backend that "auto" takes on a device


@dataclass(frozen=True, kw_only=True)
class SpeedSettings:
    """The network and the sizes of a run; scans are measured at the largest batch size.

    `size` None: that of the network's preprocessing. `startup`: also time imports and first batches in new processes.
    """

    model: str | None
    batches: tuple[int, ...]
    size: int | None
    dtypes: tuple[str, ...]
    orders: tuple[int, ...] = (1, 2, 4, 6, 8)
    checkpoint: str | None = None
    classes: int | None = None  # outputs of a network without a checkpoint
    startup: bool = False
    memory: bool = False  # also measure the parallel mode by the number of orders, at the smallest batch size
    limits: TimingLimits = TimingLimits()

    def __post_init__(self) -> None:
        many = len(ScanOrder.all())
        checks = (
            ("batch", self.batches, all(b >= 1 for b in self.batches), "whole numbers from 1 on"),
            ("size", self.size, self.size is None or self.size >= 16, "at least 16 pixels"),
            ("dtype", self.dtypes, all(d in DTYPES for d in self.dtypes), f"some of {', '.join(DTYPES)}"),
            ("orders", self.orders, all(1 <= k <= many for k in self.orders), f"numbers from 1 to {many}"),
            ("repeats", self.limits.min_repeats, self.limits.min_repeats >= 1, "at least 1"),
            ("seconds", self.limits.seconds, self.limits.seconds >= 0, "at least 0"),
        )
        wrong = [
            f"--{name} is {value} but must be {case}" for name, value, fits, case in checks if not fits or value == ()
        ]
        if wrong:
            raise ConfigError("; ".join(wrong))


def default_settings(device: torch.device) -> SpeedSettings:
    """The defaults of each device: the paper's network on a GPU, the shipped one on a CPU."""
    if device.type == "cuda":
        return SpeedSettings(
            model="vmamba_tiny_s1l8_bn",
            batches=(128, 1),
            size=224,
            dtypes=("float32", "bf16"),
            memory=True,
            startup=True,
        )
    return SpeedSettings(model="vmamba_nano", batches=(64,), size=32, dtypes=("float32",), startup=True)


def quick(settings: SpeedSettings) -> SpeedSettings:
    """A run of a few seconds that exercises every part once; its numbers mean nothing."""
    limits = TimingLimits(seconds=0.0, min_repeats=1, max_warmups=0)
    return replace(
        settings, model="vmamba_nano", batches=(8,), size=16, orders=(1, 2), memory=True, startup=False, limits=limits
    )


def make_cases(
    settings: SpeedSettings, model: nn.Module, scan: Scan, *, device: torch.device, bandwidth: float
) -> list[Case]:
    """Networks, each next to the same with the reference scan; memory by orders, growth, the scan alone."""
    limits, largest = settings.limits, max(settings.batches)
    brief = replace(limits, seconds=limits.seconds / 4)
    at = TimingSetup(NATIVE[device.type], "float32", batch=largest, size=settings.size or 0, limits=limits)
    cases = [
        case
        for batch in settings.batches
        for dtype in settings.dtypes
        for case in network_cases(model, replace(at, batch=batch, dtype=dtype))
    ]
    if not isinstance(model, VMamba):
        return cases
    # Seconds per pass on a GPU: a few repeats tell the ratio.
    reference = (
        limits if device.type == "cpu" else replace(brief, min_repeats=min(2, limits.min_repeats), max_seconds=5.0)
    )
    slow = reference_cases(model, replace(at, backend="reference", limits=reference), whole_step=device.type == "cpu")
    cases = [case for fast in cases for case in (fast, *(s for s in slow if _is_twin(s.timing, fast.timing)))]
    at = replace(at, limits=brief)
    if settings.memory:
        cases += order_cases(model, settings.orders, replace(at, batch=min(settings.batches)))
    # The scans come last: recording a graph that fails can leave the device's random numbers unusable.
    for shape in stage_shapes(model, batch=largest, size=at.size):
        for name, dtype in [*((at.backend, d) for d in settings.dtypes), ("reference", "float32")]:
            cases += scan_cases(
                scan, shape, backend=name, dtype=dtype, device=device, bandwidth=bandwidth, limits=brief
            )
    return cases


def _is_twin(slow: Timing, fast: Timing) -> bool:
    """Whether two rows differ only in their backend: such pairs are timed one right after the other."""
    return replace(slow, backend=fast.backend) == fast


def over_reference(rows: Sequence[Timing]) -> dict[str, float]:
    """Speedup of each piece of work over the reference scan."""
    slow = {_place(r): r.median_ms for r in rows if r.backend == "reference" and r.median_ms}
    fast = [r for r in rows if r.backend != "reference" and r.median_ms and r.dtype == "float32"]
    return {
        f"{r.part}: {r.work}, batch {r.batch}, size {r.size}": slow[_place(r)] / r.median_ms  # type: ignore[operator]
        for r in fast
        if _place(r) in slow
    }


def memory_over_one(rows: Iterable[Timing]) -> dict[int, float]:
    """Peak memory of the parallel mode with K orders over that with one."""
    peaks = {r.k: r.peak_bytes for r in rows if r.part == "orders" and r.peak_bytes and r.k}
    return {k: peak / peaks[1] for k, peak in peaks.items()} if 1 in peaks else {}


def _place(row: Timing) -> tuple[object, ...]:
    return row.part, row.work, row.batch, row.size, row.channels


# the network

ORDERS = 6  # of TRUST by default, as in the paper
SCAN_FLOPS = 9  # for each state, position and direction, as VMamba's authors count; D u adds one per channel

Maker: TypeAlias = Callable[[nn.Module, Tensor], Iterator[Work]]


class SpeedStep(NamedTuple):
    """A piece of work on a network; `k`: the number of orders, where it has any."""

    name: str
    k: int | None
    maker: Maker


@dataclass(frozen=True)
class TimingSetup:
    """Backend, number format, sizes and limits of a timing."""

    backend: str
    dtype: str
    batch: int
    size: int
    limits: TimingLimits


@dataclass(frozen=True, kw_only=True)
class NetworkCounts:
    """Parameters, those that Tent and TRUST adapt, and floating-point operations of one image's forward pass."""

    parameters: int
    adapted_by_tent: int
    adapted_by_trust: int
    flops_products: int  # matrix products and convolutions, a multiplication and an addition counted as two
    flops_scan: int


def count(model: nn.Module, *, size: int) -> NetworkCounts:
    """NetworkCounts for images of `size` x `size` pixels."""
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    sets: tuple[ParameterSet, ...] = ("bn", "ss2d")
    adapted = dict.fromkeys(sets, 0)
    for each in sets:
        with suppress(TrustError):  # a network without norms or scans
            adapted[each] = sum(sizes[n] for n in select(model, each))
    scans = 0
    if isinstance(model, VMamba):
        model.set_scan_backend("reference")  # whose products are known to PyTorch's counter
        shapes = stage_shapes(model, batch=1, size=size)
        scans = sum(
            depth * 4 * s.channels * s.length * (SCAN_FLOPS * s.state + 1)
            for depth, s in zip(model.config.depths, shapes, strict=True)
        )
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.eval()(torch.zeros(1, 3, size, size, device=next(model.parameters()).device))
    if isinstance(model, VMamba):
        model.set_scan_backend("auto")
    return NetworkCounts(
        parameters=sum(sizes.values()),
        adapted_by_tent=adapted["bn"],
        adapted_by_trust=adapted["ss2d"],
        flops_products=counter.get_total_flops(),
        flops_scan=scans,
    )


def network_cases(model: nn.Module, at: TimingSetup) -> list[Case]:
    """All steps at one batch size: of any network, and of a VMamba; a batch of one cannot be split among orders."""
    steps = [
        SpeedStep("forward", None, _forward),
        SpeedStep("forward by the method 'source'", None, _source),
        SpeedStep("forward and backward", None, _forward_and_backward),
        SpeedStep("Tent", None, _method("tent")),
        SpeedStep("tide", None, _method("tide")),
    ]
    if isinstance(model, VMamba):
        steps += [
            NAIVE,
            *trust_modes(split=at.batch > 1),
            SpeedStep(f"averaging the weights of {ORDERS} orders", ORDERS, _averaging),
            SpeedStep("offline ranking of all orders", len(model.scan_orders), _ranking),
        ]
    return [_case(model, "network", step, at) for step in steps]


def trust_modes(*, split: bool) -> list[SpeedStep]:
    orders = take_orders(ORDERS)
    modes = {"sequential": "sequential", "replicate": "parallel replicate", "split": "parallel split"}
    steps = [
        SpeedStep(f"TRUST K={ORDERS} {name}", ORDERS, _method("trust", orders=orders, mode=mode))
        for mode, name in modes.items()
    ]
    return steps if split else steps[:-1]


def reference_cases(model: VMamba, at: TimingSetup, *, whole_step: bool) -> list[Case]:
    """The same network with the reference scan; a whole step of TRUST takes minutes at 224 pixels."""
    steps = [SpeedStep("forward", None, _forward), SpeedStep("forward and backward", None, _forward_and_backward)]
    steps += trust_modes(split=False)[:1] if whole_step else []
    return [_case(model, "network", step, at) for step in steps]


def order_cases(model: VMamba, counts: Sequence[int], at: TimingSetup) -> list[Case]:
    """The parallel mode with K orders, whose memory is compared with one, TRUST naive."""
    steps = [
        SpeedStep(f"TRUST K={k} parallel replicate", k, _method("trust", orders=take_orders(k), mode="replicate"))
        if k > 1
        else NAIVE
        for k in counts
    ]
    return [_case(model, "orders", step, at) for step in steps]


def take_orders(k: int, scan_orders: Sequence[str] = VMAMBA_SCAN_ORDERS) -> list[ScanOrder | str]:
    """The first `k` orders of a network: the paper's six, if it has them, then the others."""
    orders = [find_order(name, scan_orders) for name in scan_orders]
    papers = [order for order in PAPER_ORDERS if order in orders]
    return [*papers, *(order for order in orders if order not in papers)][:k]


def _case(model: nn.Module, part: str, step: SpeedStep, at: TimingSetup) -> Case:
    def prepare() -> Iterator[Work]:
        device = next(model.parameters()).device
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(at.batch, 3, at.size, at.size, generator=generator).to(device)
        if isinstance(model, VMamba):
            model.set_scan_backend(at.backend)
        try:
            yield from step.maker(model, images)
        finally:
            if isinstance(model, VMamba):
                model.set_scan_backend("auto")

    timing = Timing(
        part=part, work=step.name, backend=at.backend, dtype=at.dtype, batch=at.batch, size=at.size, k=step.k
    )
    return Case(timing=timing, prepare=contextmanager(prepare), limits=at.limits)


def _forward(model: nn.Module, images: Tensor) -> Iterator[Work]:
    model.eval()

    def work() -> Tensor:
        with torch.no_grad():
            logits: Tensor = model(images)
        return logits

    yield work


def _source(model: nn.Module, images: Tensor) -> Iterator[Work]:
    """Forward pass of the method `source`: on a GPU, a captured graph."""
    method = create_method("source", model)
    yield lambda: method(images)


def _forward_and_backward(model: nn.Module, images: Tensor) -> Iterator[Work]:
    """The gradient of every parameter, as in training."""
    model.eval()
    labels = torch.zeros(len(images), dtype=torch.long, device=images.device)
    yield lambda: torch.autograd.grad(F.cross_entropy(model(images), labels), list(model.parameters()))


def _averaging(model: nn.Module, images: Tensor) -> Iterator[Work]:
    """The average of the weights of all orders, as TRUST computes it after its last update."""
    del images
    method = create_method("trust", model, orders=take_orders(ORDERS))
    thetas = [method.weights.snapshot() for _ in range(ORDERS)]
    yield lambda: method.weights.load(merging.mean(thetas))


def _ranking(model: nn.Module, images: Tensor) -> Iterator[Work]:
    yield lambda: rank_orders(model, [images])


def _method(name: str, **options: Any) -> Maker:
    def maker(model: nn.Module, images: Tensor) -> Iterator[Work]:
        method = create_method(name, model, **options)
        try:
            yield lambda: method(images)
        finally:
            method.reset()  # the method's weights are the network's own

    return maker


NAIVE = SpeedStep("TRUST naive", 1, _method("trust_naive"))


# the scan alone

Scan: TypeAlias = Callable[..., Tensor]
"""`scan.grouped_scan`."""

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


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


def scan_cases(
    scan: Scan, shape: Shape, *, backend: str, dtype: str, device: torch.device, bandwidth: float, limits: TimingLimits
) -> list[Case]:
    """Forward and backward of one scan."""
    floors = floor_bytes(shape, dtype)
    cases = []
    for i, work in enumerate(("forward", "backward")):
        timing = Timing(
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

        cases.append(
            Case(
                timing=timing,
                prepare=contextmanager(prepare),
                limits=limits,
                on_device=device.type == "cuda" and backend != "reference",
                floor=floors[i] / bandwidth,
            )
        )
    return cases


def floor_bytes(shape: Shape, dtype: str) -> tuple[int, int]:
    """Bytes that forward and backward must move: each input read once, each output written once."""
    itemsize = DTYPES[dtype].itemsize
    u = 2 * shape.batch * shape.channels * shape.length * itemsize
    delta, rows = 2 * u, 2 * 4 * shape.batch * shape.state * shape.length * itemsize
    return 2 * u + delta + rows, 3 * u + 2 * (delta + rows)


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
    """The work as a CUDA graph, so that launching it from Python does not count; unchanged if recording fails."""
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
