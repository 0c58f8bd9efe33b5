"""The domains and networks of an experiment, for what is not a sweep of cells."""

from __future__ import annotations

import torch
from torch import nn

from trust_tta.bench.config import ARRAY, RunConfig
from trust_tta.bench.environment import choose_device
from trust_tta.bench.plan import make_plan
from trust_tta.bench.sources import DataSource, prepare
from trust_tta.data.dataset import Dataset
from trust_tta.data.streams import Domain
from trust_tta.errors import ConfigError
from trust_tta.models.checkpoint import Checkpoint
from trust_tta.models.networks import require_vmamba
from trust_tta.models.vmamba import VMamba

_BARE_LABELS = (ARRAY, "array-c")  # numbers without names, of which not all need occur


def load_network(checkpoint: Checkpoint, *, dataset: Dataset, device: torch.device) -> nn.Module:
    """The network in evaluation mode; one with other classes than the data set is refused."""
    classes = len(dataset.class_names)
    outputs = classes if checkpoint.num_classes is None else checkpoint.num_classes
    fits = outputs >= classes if dataset.name in _BARE_LABELS else outputs == classes
    if not fits:
        raise ConfigError(
            f"{checkpoint.origin} tells {outputs} classes apart and {dataset.name} has {classes}; "
            "give a checkpoint that was trained or fine-tuned on these classes"
        )
    return checkpoint.load(device=device, num_classes=outputs)


class Experiment:
    """The stream of the first batch size and seed, as network input; a network is loaded when it is asked for."""

    def __init__(self, config: RunConfig) -> None:
        source = DataSource(config.data)
        self.config, self.device, self.plan = config, choose_device(config.device), make_plan(config, source)
        stream = source.stream(
            config.stream, batch_size=config.stream.batch_size[0], seed=config.stream.seeds[0], workers=0
        )
        self.domains = [prepare(domain, self.plan.preprocessing[domain.dataset.domain]) for domain in stream]
        self._network: tuple[str, VMamba] | None = None

    def network(self, domain: Domain) -> VMamba:
        """The network of this domain; the one before is let go where it is another."""
        checkpoint = self.plan.checkpoints[domain.dataset.domain]
        if self._network is None or self._network[0] != checkpoint.sha256:
            model = load_network(checkpoint, dataset=domain.dataset, device=self.device)
            self._network = checkpoint.sha256, require_vmamba(model, by="an analysis of traversal orders")
        return self._network[1]

    def images(self, domain: Domain) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """All batches of the domain on the device: images (n, c, h, w) and labels (n,)."""
        return [(batch.images.to(self.device), batch.labels.to(self.device)) for batch in domain.batches]
