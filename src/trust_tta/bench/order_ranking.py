"""The scan orders of a network by the entropy of its predictions: the offline phase of TRUST."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from trust_tta.bench.config import RunConfig
from trust_tta.bench.experiment import Experiment
from trust_tta.data.streams import Domain
from trust_tta.methods.ranking import rank_orders
from trust_tta.models.networks import require_ours
from trust_tta.progress import SILENT, Progress
from trust_tta.results.order_records import EntropyByOrder


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

    def mean_record(self, k: int, *, title: str) -> EntropyByOrder:
        """The mean over the domains; the first `k` orders are chosen."""
        return EntropyByOrder(title=title, orders=tuple(self.mean), entropy=tuple(self.mean.values()), k=k)

    def domain_records(self, k: int) -> dict[str, EntropyByOrder]:
        """A record for each domain, by its name."""
        return {
            domain: EntropyByOrder(title=domain, orders=tuple(values), entropy=tuple(values.values()), k=k)
            for domain, values in self.domains.items()
        }


def rank_domains(config: RunConfig, *, progress: Progress = SILENT) -> Ranking:
    """Rank the orders on each domain of an experiment."""
    experiment = Experiment(config)
    domains = experiment.domains
    progress.start(sum(len(domain.batches) for domain in domains), "batches")

    def images(domain: Domain) -> Iterator[Tensor]:
        for batch in domain.batches:
            yield batch.images.to(experiment.device)
            progress.advance()

    found: dict[str, dict[str, float]] = {}
    for domain in domains:
        network = require_ours(experiment.network(domain), by="a ranking of scan orders")
        found[domain.name] = {str(order): value for order, value in rank_orders(network, images(domain))}
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
