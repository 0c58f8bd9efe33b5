"""The scan orders of a network by the entropy of its predictions: the offline phase of TRUST."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from torch import Tensor

from trust_tta.bench.config import RunConfig
from trust_tta.bench.experiment import Experiment
from trust_tta.data.streams import Domain
from trust_tta.methods.ranking import rank_orders
from trust_tta.models.networks import require_ours
from trust_tta.progress import SILENT, Progress
from trust_tta.results.order_records import EntropyByOrder


def rank_domains(
    config: RunConfig, *, k: int, progress: Progress = SILENT
) -> tuple[EntropyByOrder, list[EntropyByOrder]]:
    """The orders by mean entropy over the domains, and by the entropy on each, ascending; the first `k` are chosen."""
    experiment = Experiment(config)
    domains = experiment.domains
    progress.start(sum(len(domain.batches) for domain in domains), "batches")

    def images(domain: Domain) -> Iterator[Tensor]:
        for batch in domain.batches:
            yield batch.images.to(experiment.device)
            progress.advance()

    records = []
    for domain in domains:
        network = require_ours(experiment.network(domain), by="a ranking of scan orders")
        orders, values = zip(*rank_orders(network, images(domain)), strict=True)
        records.append(EntropyByOrder(title=domain.name, orders=tuple(map(str, orders)), entropy=values, k=k))
    progress.finish()
    found = [record.by_order for record in records]
    means = sorted((fmean(values[order] for values in found), order) for order in found[0])
    first = domains[0].dataset
    level = f" at severity {first.severity}" if first.severity else ""
    title = f"{first.name}{level}, {sum(domain.batches.images for domain in domains)} images"
    entropies, names = zip(*means, strict=True)
    return EntropyByOrder(title=title, orders=names, entropy=entropies, k=k), records
