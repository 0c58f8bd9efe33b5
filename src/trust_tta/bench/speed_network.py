"""A network's forward pass, Tent and TRUST in each mode, and how their cost grows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from trust_tta.bench.speed import Job, Limits, Row, Work
from trust_tta.bench.speed_scan import stage_shapes
from trust_tta.methods.parameters import ParameterSet, select
from trust_tta.methods.registry import create_method
from trust_tta.models.vmamba import VMamba
from trust_tta.orders import PAPER_ORDERS, ScanOrder

ORDERS = 6  # of TRUST where no number is asked for, as in the paper
SCAN_FLOPS = 9  # for each state, position and direction, as VMamba's authors count; D u adds one a channel

Maker: TypeAlias = Callable[[VMamba, Tensor], Iterator[Work]]


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Parameters, those that Tent and TRUST adapt, and floating-point operations of one image's forward pass."""

    parameters: int
    adapted_by_tent: int
    adapted_by_trust: int
    flops_products: int  # matrix products and convolutions, a multiplication and an addition counted as two
    flops_scan: int


def count(model: VMamba, *, size: int) -> Counts:
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    sets: tuple[ParameterSet, ...] = ("bn", "ss2d")
    adapted = {each: sum(sizes[n] for n in select(model, each)) for each in sets}
    device = next(model.parameters()).device
    model.set_scan_backend("reference")  # whose products are known to PyTorch's counter
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.eval()(torch.zeros(1, model.config.in_channels, size, size, device=device))
    model.set_scan_backend("auto")
    shapes = stage_shapes(model, batch=1, size=size)
    scans = sum(
        depth * 4 * s.channels * s.length * (SCAN_FLOPS * s.state + 1)
        for depth, s in zip(model.config.depths, shapes, strict=True)
    )
    return Counts(
        parameters=sum(sizes.values()),
        adapted_by_tent=adapted["bn"],
        adapted_by_trust=adapted["ss2d"],
        flops_products=counter.get_total_flops(),
        flops_scan=scans,
    )


def network_jobs(model: VMamba, *, backend: str, dtype: str, batch: int, size: int, limits: Limits) -> list[Job]:
    """Everything that is compared at one batch size; a batch of one cannot be split among orders."""
    works: list[tuple[str, int | None, Maker]] = [
        ("forward", None, _forward),
        ("forward by the method 'source'", None, _source),
        ("forward and backward", None, _forward_and_backward),
        ("Tent", None, _method("tent")),
        ("TRUST naive", 1, _method("trust_naive")),
        *trust_modes(split=batch > 1),
    ]
    return [
        _job(model, "network", work, maker, k=k, backend=backend, dtype=dtype, batch=batch, size=size, limits=limits)
        for work, k, maker in works
    ]


def trust_modes(*, split: bool) -> list[tuple[str, int | None, Maker]]:
    orders = take_orders(ORDERS)
    modes = [
        (f"TRUST K={ORDERS} sequential", ORDERS, _method("trust", orders=orders)),
        (f"TRUST K={ORDERS} parallel replicate", ORDERS, _method("trust", orders=orders, mode="replicate")),
    ]
    divided = _method("trust", orders=orders, mode="split")
    return [*modes, (f"TRUST K={ORDERS} parallel split", ORDERS, divided)] if split else [*modes]


def reference_jobs(model: VMamba, *, batch: int, size: int, whole_step: bool, limits: Limits) -> list[Job]:
    """The same network with the reference scan; a whole step of TRUST takes minutes at 224 pixels."""
    works: list[tuple[str, int | None, Maker]] = [
        ("forward", None, _forward),
        ("forward and backward", None, _forward_and_backward),
    ]
    if whole_step:
        works.append(trust_modes(split=False)[0])
    return [
        _job(model, "network", w, m, k=k, backend="reference", dtype="float32", batch=batch, size=size, limits=limits)
        for w, k, m in works
    ]


def order_jobs(
    model: VMamba, counts: Sequence[int], *, backend: str, dtype: str, batch: int, size: int, limits: Limits
) -> list[Job]:
    """The parallel mode with K orders: what they cost in memory over one, TRUST naive."""
    jobs = []
    place: dict[str, Any] = {"backend": backend, "dtype": dtype, "batch": batch, "size": size, "limits": limits}
    for k in counts:
        parallel = f"TRUST K={k} parallel replicate", _method("trust", orders=take_orders(k), mode="replicate")
        work, maker = parallel if k > 1 else ("TRUST naive", _method("trust_naive"))
        jobs.append(_job(model, "orders", work, maker, k=k, **place))
    return jobs


def scaling_jobs(model: VMamba, *, backend: str, batch: int, size: int, limits: Limits) -> list[Job]:
    """TRUST over three batch sizes and three image sizes in one order, and over K at a quarter of the batch."""
    naive = _method("trust_naive")
    place: dict[str, Any] = {"backend": backend, "dtype": "float32", "limits": limits}
    few = max(2, batch // 4)
    batches, sizes = (few, max(3, batch // 2), max(4, batch)), (size // 2, size * 3 // 4, size)
    jobs = [_job(model, "batch", "TRUST naive", naive, k=1, batch=b, size=size, **place) for b in batches]
    jobs += [_job(model, "pixels", "TRUST naive", naive, k=1, batch=batch, size=s, **place) for s in sizes]
    for k in (1, 2, 4, 6):
        maker = _method("trust", orders=take_orders(k))
        jobs.append(_job(model, "k", "TRUST sequential", maker, k=k, batch=few, size=size, **place))
    return jobs


def take_orders(k: int) -> list[ScanOrder]:
    """The paper's six orders, then the others as they come."""
    return [*PAPER_ORDERS, *(order for order in ScanOrder.all() if order not in PAPER_ORDERS)][:k]


def _job(
    model: VMamba,
    part: str,
    work: str,
    maker: Maker,
    *,
    k: int | None,
    backend: str,
    dtype: str,
    batch: int,
    size: int,
    limits: Limits,
) -> Job:
    def prepare() -> Iterator[Work]:
        device = next(model.parameters()).device
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(batch, model.config.in_channels, size, size, generator=generator).to(device)
        model.set_scan_backend(backend)
        try:
            yield from maker(model, images)
        finally:
            model.set_scan_backend("auto")

    row = Row(part=part, work=work, backend=backend, dtype=dtype, batch=batch, size=size, k=k)
    return Job(row=row, prepare=contextmanager(prepare), limits=limits)


def _forward(model: VMamba, images: Tensor) -> Iterator[Work]:
    model.eval()

    def work() -> Tensor:
        with torch.no_grad():
            logits: Tensor = model(images)
        return logits

    yield work


def _source(model: VMamba, images: Tensor) -> Iterator[Work]:
    """As the methods do it: on a GPU a recorded pass."""
    method = create_method("source", model)
    yield lambda: method(images)


def _forward_and_backward(model: VMamba, images: Tensor) -> Iterator[Work]:
    """The gradient of every parameter, as in training."""
    model.eval()
    labels = torch.zeros(len(images), dtype=torch.long, device=images.device)
    yield lambda: torch.autograd.grad(F.cross_entropy(model(images), labels), list(model.parameters()))


def _method(name: str, **options: Any) -> Maker:
    def maker(model: VMamba, images: Tensor) -> Iterator[Work]:
        method = create_method(name, model, **options)
        try:
            yield lambda: method(images)
        finally:
            method.reset()  # the method's weights are the network's own

    return maker
