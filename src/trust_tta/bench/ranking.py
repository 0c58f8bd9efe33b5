"""The offline phase on the data of an experiment: the entropy of each traversal order, domain by domain."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from trust_tta.bench.config import RunConfig
from trust_tta.bench.environment import choose_device
from trust_tta.bench.network import load_network
from trust_tta.bench.plan import make_plan
from trust_tta.bench.sources import DataSource, prepare
from trust_tta.data.streams import Domain
from trust_tta.methods.ranking import rank_orders


@dataclass(frozen=True)
class Ranking:
    """Mean entropy in nats of each order, by letters: on each domain, and over them, which `mean` holds ascending."""

    dataset: str
    severity: int | None
    images: int
    checkpoint: str
    domains: dict[str, dict[str, float]]
    mean: dict[str, float]

    def best(self, k: int) -> list[str]:
        """The `k` orders of lowest mean entropy."""
        return list(self.mean)[:k]


def rank_domains(config: RunConfig, *, start: Callable[[int], None], beat: Callable[[], None]) -> Ranking:
    """Rank the orders on each domain; `start` hears the number of batches, `beat` each one."""
    source = DataSource(config.data)
    plan = make_plan(config, source)
    device = choose_device(config.device)
    batch_size, seed = config.stream.batch_sizes[0], config.stream.seeds[0]
    stream = source.stream(config.stream, batch_size=batch_size, seed=seed, workers=0)
    domains = [prepare(domain, plan.preprocessing[domain.dataset.domain]) for domain in stream]
    start(sum(len(domain.batches) for domain in domains))
    found: dict[str, dict[str, float]] = {}
    model, loaded = None, ""
    for domain in domains:
        checkpoint = plan.checkpoints[domain.dataset.domain]
        if model is None or loaded != checkpoint.digest:
            model, loaded = (
                load_network(config.model, checkpoint, dataset=domain.dataset, device=device),
                checkpoint.digest,
            )
        ranked = rank_orders(model, _images(domain, device, beat))
        found[domain.name] = {str(order): value for order, value in ranked}
    means = {order: sum(by[order] for by in found.values()) / len(found) for order in next(iter(found.values()))}
    first = domains[0].dataset
    return Ranking(
        dataset=first.name,
        severity=first.severity,
        images=sum(domain.batches.images for domain in domains),
        checkpoint=loaded,
        domains=found,
        mean=dict(sorted(means.items(), key=lambda pair: (pair[1], pair[0]))),
    )


def _images(domain: Domain, device: torch.device, beat: Callable[[], None]) -> Iterator[Tensor]:
    for batch in domain.batches:
        yield batch.images.to(device)
        beat()
