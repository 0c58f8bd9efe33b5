"""The offline phase on the data of an experiment: the entropy of each traversal order, domain by domain."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from trust_tta.bench.config import RunConfig
from trust_tta.bench.experiment import Experiment
from trust_tta.data.streams import Domain
from trust_tta.methods.ranking import rank_orders
from trust_tta.results.order_records import EntropyByOrder


@dataclass(frozen=True)
class Ranking:
    """Mean entropy in nats of each order, by letters: on each domain, and over them, which `mean` holds ascending."""

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


def rank_domains(config: RunConfig, *, start: Callable[[int], None], beat: Callable[[], None]) -> Ranking:
    """Rank the orders on each domain; `start` hears the number of batches, `beat` each one."""
    experiment = Experiment(config)
    start(sum(len(domain.batches) for domain in experiment.domains))
    found: dict[str, dict[str, float]] = {}
    for domain in experiment.domains:
        ranked = rank_orders(experiment.network(domain), _images(domain, experiment.device, beat))
        found[domain.name] = {str(order): value for order, value in ranked}
    means = {order: sum(by[order] for by in found.values()) / len(found) for order in next(iter(found.values()))}
    first = experiment.domains[0].dataset
    return Ranking(
        dataset=first.name,
        severity=first.severity,
        images=sum(domain.batches.images for domain in experiment.domains),
        domains=found,
        mean=dict(sorted(means.items(), key=lambda pair: (pair[1], pair[0]))),
    )


def _images(domain: Domain, device: torch.device, beat: Callable[[], None]) -> Iterator[Tensor]:
    for batch in domain.batches:
        yield batch.images.to(device)
        beat()
