"""Figures 2, 9, 12 and 13 of the paper: loss around adapted networks, memory by number of orders, norms of weights.

    python -m benchmarks.order_analysis surface configs/paper/table1.toml --small --out runs/orders
    python -m benchmarks.order_analysis norms configs/paper/table1.toml --dataset cifar10-c --out runs/orders
    python -m benchmarks.order_analysis memory configs/paper/table1.toml --dataset imagenet-c --out runs/orders

Each looks at the first domain of the experiment and writes KIND-DOMAIN.json and KIND-DOMAIN.pdf. Memory needs a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from trust_tta.atomic import write_whole
from trust_tta.bench.config import RunConfig
from trust_tta.bench.experiment import Experiment
from trust_tta.bench.parsing import read_parts
from trust_tta.cli.rank import with_limit
from trust_tta.data.streams import Domain
from trust_tta.errors import BackendError, ConfigError, DataError
from trust_tta.methods import merging
from trust_tta.methods.registry import create_method
from trust_tta.methods.trust import Trust
from trust_tta.methods.trust_options import TrustOptions
from trust_tta.models.base import ScanNetwork
from trust_tta.models.networks import require_ours
from trust_tta.optional import require
from trust_tta.orders import PAPER_ORDERS, VMAMBA_SCAN_ORDERS, ScanOrder, find_order

MEMORY_COUNTS = (1, 2, 4, 6, 8)
POINTS, SMALL_POINTS = 11, 7  # of a loss surface in each direction


@dataclass(frozen=True)
class SurfacePoint:
    """A network on a loss surface and its loss."""

    name: str
    x: float
    y: float
    loss: float


@dataclass(frozen=True)
class LossSurface:
    """The loss on the plane through three networks: `loss[i][j]` is at (x[j], y[i])."""

    title: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    loss: tuple[tuple[float, ...], ...]
    adapted: tuple[SurfacePoint, ...]
    mean: SurfacePoint


@dataclass(frozen=True)
class WeightNorms:
    """For each adapted tensor: L2 norm averaged over orders, and mean deviation of its elements over orders."""

    title: str
    names: tuple[str, ...]
    mean: tuple[float, ...]
    deviation: tuple[float, ...]


@dataclass(frozen=True)
class MemoryByK:
    """Peak memory in bytes by number of orders, and of the network alone."""

    title: str
    k: tuple[int, ...]
    peak: tuple[int, ...]
    baseline: int


@dataclass(frozen=True, eq=False)
class Plane:
    """The plane through three sets of weights: an origin and two orthonormal directions."""

    origin: Tensor
    right: Tensor
    up: Tensor
    corners: tuple[tuple[float, float], ...]  # coordinates of the three sets

    def at(self, x: float, y: float) -> Tensor:
        """The weights at a point, computed in float64."""
        return (self.origin.double() + x * self.right + y * self.up).to(self.origin)


@dataclass(frozen=True, eq=False)
class Adapted:
    """A method, the weights that each of its orders led to on the last batch, and all batches of the domain."""

    method: Trust
    weights: list[Tensor]  # snapshots
    batches: list[tuple[Tensor, Tensor]]

    def loss(self, weights: Tensor) -> float:
        """The cross-entropy over all images with these weights, in the order of evaluation."""
        self.method.weights.load(weights)
        total = 0.0
        with torch.no_grad():
            for images, labels in self.batches:
                logits = self.method.model(images, order=self.method.evaluate_order)
                total += float(F.cross_entropy(logits.double(), labels, reduction="sum"))
        return total / sum(len(labels) for _, labels in self.batches)


def adapt_under_orders(experiment: Experiment, domain: Domain, orders: Sequence[ScanOrder | str]) -> Adapted:
    """Adapt to the domain online as TRUST does, and stop on the last batch before the weights are averaged."""
    options = {**trust_options(experiment.config), "orders": [str(order) for order in orders]}
    method = cast(Trust, create_method("trust", _network(experiment, domain), **options))
    device = experiment.device
    batches = [(batch.images.to(device), batch.labels.to(device)) for batch in domain.batches]
    for images, _ in batches[:-1]:
        method(images)
    steps = method.adapt_under_orders(batches[-1][0])
    if not all(step.made for step in steps):
        raise DataError(f"an update on {domain.name} was not finite, so not every order has weights; lower the lr")
    return Adapted(method, [step.weights for step in steps], batches)


def trust_options(config: RunConfig) -> dict[str, Any]:
    """The options of the experiment's first TRUST, or none."""
    return next((dict(method.options) for method in config.methods if method.name == "trust"), {})


def trust_orders(config: RunConfig, scan_orders: Sequence[str] = VMAMBA_SCAN_ORDERS) -> list[ScanOrder | str]:
    """The orders that the experiment's first TRUST uses on a network with these scan orders."""
    return TrustOptions(**trust_options(config)).chosen(scan_orders)


def take_orders(k: int, scan_orders: Sequence[str] = VMAMBA_SCAN_ORDERS) -> list[ScanOrder | str]:
    """The first `k` orders of a network: the paper's six, if it has them, then the others."""
    orders = [find_order(name, scan_orders) for name in scan_orders]
    papers = [order for order in PAPER_ORDERS if order in orders]
    return [*papers, *(order for order in orders if order not in papers)][:k]


def loss_surface(experiment: Experiment, domain: Domain, *, points: int) -> LossSurface:
    """The loss on a grid of `points` x `points` around the networks of the first three orders and their mean."""
    orders = trust_orders(experiment.config, _network(experiment, domain).scan_orders)[:3]
    if len(orders) < 3:
        raise ConfigError(f"a plane goes through three networks and TRUST has {len(orders)} orders here; give k=3")
    adapted = adapt_under_orders(experiment, domain, orders)
    try:
        plane = span_plane(adapted.weights)
        x, y = _grid(plane.corners, points)
        loss = tuple(tuple(adapted.loss(plane.at(across, height)) for across in x) for height in y)
        networks = tuple(
            SurfacePoint(name=str(order), x=place[0], y=place[1], loss=adapted.loss(weights))
            for order, place, weights in zip(orders, plane.corners, adapted.weights, strict=True)
        )
        center = [math.fsum(place[i] for place in plane.corners) / 3 for i in (0, 1)]
        mean_loss = adapted.loss(merging.mean(adapted.weights))
    finally:
        adapted.method.reset()
    return LossSurface(
        title=_title(domain),
        x=x,
        y=y,
        loss=loss,
        adapted=networks,
        mean=SurfacePoint(name="mean", x=center[0], y=center[1], loss=mean_loss),
    )


def span_plane(weights: Sequence[Tensor]) -> Plane:
    """The plane through three sets of weights (n,); distances on it are those between the weights."""
    origin, second, third = (each.double() for each in weights)
    right = second - origin
    width = float(right.norm())
    right = right / width if width else right
    slope = third - origin
    along = float(slope @ right)
    up = slope - along * right
    height = float(up.norm())
    if not width or height < 1e-9 * max(1.0, float(slope.norm())):
        raise DataError("the three adapted networks lie on a line, so there is no plane through them; raise the lr")
    return Plane(weights[0], right, up / height, ((0.0, 0.0), (width, 0.0), (along, height)))


def weight_norms(experiment: Experiment, domain: Domain) -> dict[str, WeightNorms]:
    """Norms over orders of the SS2D tensors, separately for weights and biases."""
    network = _network(experiment, domain)
    adapted = adapt_under_orders(experiment, domain, trust_orders(experiment.config, network.scan_orders))
    roles = network.parameter_roles()
    layers = [adapted.method.weights.unflatten(weights) for weights in adapted.weights]
    adapted.method.reset()
    rows: dict[str, list[tuple[str, float, float]]] = {"weights": [], "biases": []}
    for name in layers[0]:
        tensors = [each[name] for each in layers]
        if roles[name].kind in ("scan", "projection"):
            stacked = torch.stack(tensors).double().flatten(1)
            deviation = float(stacked.std(0).mean()) if len(tensors) > 1 else 0.0
            row = name, float(stacked.norm(dim=1).mean()), deviation
            rows["biases" if name.endswith("bias") else "weights"].append(row)
    return {
        kind: WeightNorms(title=_title(domain, f"SS2D {kind}"), names=names, mean=mean, deviation=deviation)
        for kind, listed in rows.items()
        if listed
        for names, mean, deviation in [tuple(zip(*listed, strict=True))]
    }


def memory_by_k(
    experiment: Experiment, domain: Domain, *, images: int | None = None, counts: Sequence[int] = MEMORY_COUNTS
) -> MemoryByK:
    """Peak memory of one batch with K orders in the parallel mode, next to one forward pass of the network.

    `images`: at most so many of the batch; the paper uses one.
    """
    device = experiment.device
    if device.type != "cuda":
        raise BackendError(
            f"peak memory needs a CUDA device and this run is on '{device}'; run it on a machine with a GPU"
        )
    model, batch = _network(experiment, domain), domain.batches.load(0).images[:images].to(experiment.device)
    options = {**trust_options(experiment.config), "mode": "replicate"}
    counts = [k for k in counts if k <= len(model.scan_orders)]

    def forward() -> None:
        with torch.no_grad():
            model(batch)

    def adapt(k: int) -> None:
        method = create_method("trust", model, **{**options, "orders": take_orders(k, model.scan_orders)})
        method(batch)
        method.reset()

    return MemoryByK(
        title=_title(domain, f"batch {len(batch)}", "parallel mode"),
        k=tuple(counts),
        peak=tuple(_peak(lambda k=k: adapt(k), device) for k in counts),  # type: ignore[misc]
        baseline=_peak(forward, device),
    )


def _peak(work: Callable[[], None], device: torch.device) -> int:
    """Peak bytes of tensors; a first run compiles kernels and fills caches."""
    work()
    gc.collect()  # a method's network refers to itself, so that its tensors would outlive it
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def _grid(corners: Sequence[tuple[float, float]], points: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Grid coordinates of a square around the corners, twice as wide as they need."""
    columns = list(zip(*corners, strict=True))
    middles = [(min(column) + max(column)) / 2 for column in columns]
    reach = max(max(column) - min(column) for column in columns)
    steps = [2 * i / (points - 1) - 1 for i in range(points)]
    x, y = (tuple(middle + reach * step for step in steps) for middle in middles)
    return x, y


def _title(domain: Domain, *more: str) -> str:
    return ", ".join((domain.dataset.name, domain.name, *more))


def _network(experiment: Experiment, domain: Domain) -> ScanNetwork:
    return require_ours(experiment.network(domain), by="an analysis of scan orders")


def draw(record: LossSurface | WeightNorms | MemoryByK, path: Path) -> None:
    """The record as a figure."""
    figure = require("matplotlib.figure", extra="figures").Figure(figsize=(5.2, 3.6), layout="constrained")
    axes = figure.add_subplot(title=record.title)
    if isinstance(record, LossSurface):
        figure.colorbar(
            axes.pcolormesh(record.x, record.y, record.loss, cmap="Blues_r", shading="nearest"), label="loss"
        )
        axes.plot([p.x for p in record.adapted], [p.y for p in record.adapted], "o", label="adapted")
        axes.plot([record.mean.x], [record.mean.y], "*", label="mean")
        axes.legend()
    elif isinstance(record, WeightNorms):
        figure.set_figheight(0.25 * len(record.names) + 1.2)
        axes.errorbar(record.mean, record.names, xerr=record.deviation, fmt="o")
        axes.set_xlabel("mean L2 norm over orders, with the deviation of the elements")
    else:
        axes.plot(record.k, [peak / record.baseline for peak in record.peak], "o-")
        axes.set(xlabel="orders", ylabel="peak memory, one forward pass = 1")
    figure.savefig(path)


def analyse(kind: str, config: RunConfig, *, points: int) -> dict[str, LossSurface | WeightNorms | MemoryByK]:
    """The records of one kind for the first domain, by the name of their file."""
    experiment = Experiment(with_limit(config))
    domain = experiment.domains[0]
    if kind == "surface":
        return {f"surface-{domain.name}": loss_surface(experiment, domain, points=points)}
    if kind == "norms":
        found = weight_norms(experiment, domain)
        return {f"norms-{which}-{domain.name}": record for which, record in found.items()}
    names = {1: f"memory-{domain.name}-one-image", None: f"memory-{domain.name}"}  # as in the paper, and a whole batch
    return {name: memory_by_k(experiment, domain, images=images) for images, name in names.items()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.order_analysis", description="Figures 2, 9, 12 and 13 of the paper"
    )
    parser.add_argument("kind", choices=("surface", "norms", "memory"))
    parser.add_argument("config", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--dataset", help="the part of the configuration")
    parser.add_argument("--root", default="data")
    parser.add_argument("--points", type=int, help=f"of a surface in each direction ({POINTS}, --small {SMALL_POINTS})")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(argv)
    data = {"root": arguments.root} | ({"dataset": arguments.dataset} if arguments.dataset else {})
    config = read_parts(arguments.config, {"data": data}, small=arguments.small)[0]
    points = arguments.points or (SMALL_POINTS if arguments.small else POINTS)
    for name, record in analyse(arguments.kind, config, points=points).items():
        write_whole(arguments.out / f"{name}.json", json.dumps(asdict(record), indent=1) + "\n")
        draw(record, arguments.out / f"{name}.pdf")
        print(arguments.out / f"{name}.json")


if __name__ == "__main__":
    main()
