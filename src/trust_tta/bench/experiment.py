"""A running experiment: its data, streams and networks, each opened when it is needed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trust_tta.bench.config import ARRAY, RunConfig
from trust_tta.bench.data import ExperimentData, prepare
from trust_tta.bench.environment import autocast, choose_device
from trust_tta.bench.plan import CellSequence, ExperimentPlan, make_plan
from trust_tta.data.dataset import Dataset
from trust_tta.data.streams import Domain
from trust_tta.errors import ConfigError, TrustError
from trust_tta.models.checkpoint import Checkpoint

WARM_UP_IMAGES = 2  # kernels are compiled for the shape of an image, whatever the batch size
_BARE_LABELS = (ARRAY, "array-c")  # numbers without names, not all of which need to occur


class Experiment:
    """The data and networks of a plan; only the last stream and the last network are kept."""

    def __init__(self, config: RunConfig, *, plan: ExperimentPlan | None = None) -> None:
        self.config = config
        self.device = choose_device(config.device)
        self.data = ExperimentData(config.data)
        self.plan = plan or make_plan(config, self.data)
        self.workers = 0 if self.device.type == "cpu" else 4  # decoding threads would disturb timings on a CPU
        self._network: tuple[str, nn.Module] | None = None
        self._stream: tuple[tuple[int, int], list[Domain]] | None = None

    @property
    def domains(self) -> list[Domain]:
        """The stream of the first batch size and seed, as network input."""
        stream = self.config.stream
        return [self.prepare(domain) for domain in self._open_stream(stream.batch_size[0], stream.seeds[0])]

    def domains_of(self, sequence: CellSequence) -> list[Domain]:
        """The domains of a sequence, as network input."""
        stream = self._open_stream(sequence.batch_size, sequence.seed)
        return [self.prepare(stream[position]) for position in sequence.positions]

    def prepare(self, domain: Domain) -> Domain:
        base = domain.dataset.domain
        return prepare(domain, self.plan.preprocessing[base], self.plan.checkpoints[base])

    def clean(self, sequence: CellSequence, *, limit: int | None) -> Domain:
        """At most `limit` clean images, the same for all cells, as input of the sequence's network."""
        target = self._open_stream(sequence.batch_size, sequence.seed)[sequence.positions[0]].dataset.domain
        domain = self.data.clean_stream(target, batch_size=sequence.batch_size, limit=limit, workers=self.workers)
        return prepare(domain, self.plan.preprocessing[target], self.plan.checkpoints[target])

    def network(self, domain: Domain) -> nn.Module:
        """The network of this domain; a new one runs forward and backward once, so that no cell pays for compiling."""
        checkpoint = self.plan.checkpoints[domain.dataset.domain]
        if self._network is None or self._network[0] != checkpoint.sha256:
            self._network = None  # freed before the next is made
            model = load_network(checkpoint, dataset=domain.dataset, device=self.device)
            warm_up(model, domain.batches.load(0).images[:WARM_UP_IMAGES].to(self.device), dtype=self.config.dtype)
            self._network = checkpoint.sha256, model
        return self._network[1]

    def images(self, domain: Domain) -> list[tuple[Tensor, Tensor]]:
        """All batches of the domain on the device: images (n, c, h, w) and labels (n,)."""
        return [(batch.images.to(self.device), batch.labels.to(self.device)) for batch in domain.batches]

    def _open_stream(self, batch_size: int, seed: int) -> list[Domain]:
        if self._stream is None or self._stream[0] != (batch_size, seed):
            domains = self.data.stream(self.config.stream, batch_size=batch_size, seed=seed, workers=self.workers)
            self._stream = (batch_size, seed), domains
        return self._stream[1]


def load_network(checkpoint: Checkpoint, *, dataset: Dataset, device: torch.device) -> nn.Module:
    """The network in evaluation mode; a number of classes that does not fit the data set is refused."""
    classes = len(dataset.class_names)
    outputs = classes if checkpoint.num_classes is None else checkpoint.num_classes
    fits = outputs >= classes if dataset.name in _BARE_LABELS else outputs == classes
    if not fits:
        raise ConfigError(
            f"{checkpoint.origin} outputs {outputs} classes, but {dataset.name} has {classes}; "
            "pass --classes FILE with the names of the outputs, or a network that was trained on these classes"
        )
    return checkpoint.load(device=device, num_classes=outputs)


def warm_up(model: nn.Module, images: Tensor, *, dtype: str) -> None:
    """Try one pass forward and backward over images (n, c, h, w), which changes nothing."""
    try:
        with torch.enable_grad(), autocast(images.device, dtype):
            loss = model(images).square().sum()
        torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
    except TrustError:  # the user's mistake
        raise
    except Exception:  # a cell with the same problem will report it
        return
