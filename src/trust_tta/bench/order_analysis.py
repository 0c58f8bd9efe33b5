"""Analyses of scan orders: entropy, loss around adapted networks, weight norms, memory."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from trust_tta.bench.config import RunConfig
from trust_tta.bench.experiment import Experiment
from trust_tta.data.streams import Domain
from trust_tta.errors import BackendError, ConfigError, DataError
from trust_tta.methods import merging
from trust_tta.methods.ranking import rank_orders
from trust_tta.methods.registry import create_method
from trust_tta.methods.trust import Trust
from trust_tta.methods.trust_options import TrustOptions
from trust_tta.models.base import ScanNetwork
from trust_tta.models.networks import require_ours
from trust_tta.orders import PAPER_ORDERS, VMAMBA_SCAN_ORDERS, ScanOrder, find_order
from trust_tta.progress import SILENT, Progress
from trust_tta.results.order_records import EntropyByOrder, LossSurface, MemoryByK, SurfacePoint, WeightNorms

MEMORY_COUNTS = (1, 2, 4, 6, 8)


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
    batches = experiment.images(domain)
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


def loss_surface(experiment: Experiment, domain: Domain, *, points: int, progress: Progress = SILENT) -> LossSurface:
    """The loss on a grid of `points` x `points` around the networks of the first three orders and their mean."""
    orders = trust_orders(experiment.config, _network(experiment, domain).scan_orders)[:3]
    if len(orders) < 3:
        raise ConfigError(f"a plane goes through three networks and TRUST has {len(orders)} orders here; give k=3")
    progress.start(points * points, "points")
    adapted = adapt_under_orders(experiment, domain, orders)
    try:
        plane = span_plane(adapted.weights)
        x, y = _grid(plane.corners, points)
        loss = []
        for height in y:
            line = []
            for across in x:
                line.append(adapted.loss(plane.at(across, height)))
                progress.advance()
            loss.append(tuple(line))
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
        loss=tuple(loss),
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
    model, batch = _network(experiment, domain), experiment.images(domain)[0][0][:images]
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


@dataclass(frozen=True)
class Ranking:
    """Mean entropy in nats of each order: on each domain, and in `mean`, ascending, over all of them."""

    dataset: str
    severity: int | None
    images: int
    domains: dict[str, dict[str, float]]
    mean: dict[str, float]

    @property
    def title(self) -> str:
        level = f" at severity {self.severity}" if self.severity else ""
        return f"{self.dataset}{level}, {self.images} images"

    def best(self, k: int) -> list[str]:
        """The `k` orders of lowest mean entropy."""
        return list(self.mean)[:k]

    def mean_record(self, k: int, *, title: str) -> EntropyByOrder:
        """The mean over the domains."""
        return EntropyByOrder(title=title, orders=tuple(self.mean), entropy=tuple(self.mean.values()), k=k)

    def domain_records(self, k: int) -> dict[str, EntropyByOrder]:
        """A record for each domain, by its name."""
        return {
            domain: EntropyByOrder(title=domain, orders=tuple(values), entropy=tuple(values.values()), k=k)
            for domain, values in self.domains.items()
        }


def rank_domains(config: RunConfig, *, progress: Progress = SILENT) -> Ranking:
    """Rank the orders on each domain."""
    experiment = Experiment(config)
    domains = experiment.domains
    progress.start(sum(len(domain.batches) for domain in domains), "batches")
    found: dict[str, dict[str, float]] = {}
    for domain in domains:
        ranked = rank_orders(_network(experiment, domain), _images(domain, experiment.device, progress))
        found[domain.name] = {str(order): value for order, value in ranked}
    progress.finish()
    means = {order: sum(by[order] for by in found.values()) / len(found) for order in next(iter(found.values()))}
    first = domains[0].dataset
    return Ranking(
        dataset=first.name,
        severity=first.severity,
        images=sum(domain.batches.images for domain in domains),
        domains=found,
        mean=dict(sorted(means.items(), key=lambda pair: (pair[1], pair[0]))),
    )


def _images(domain: Domain, device: torch.device, progress: Progress) -> Iterator[Tensor]:
    for batch in domain.batches:
        yield batch.images.to(device)
        progress.advance()


def _network(experiment: Experiment, domain: Domain) -> ScanNetwork:
    return require_ours(experiment.network(domain), by="an analysis of scan orders")
