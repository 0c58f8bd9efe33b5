"""The plan of an experiment (its cells and their keys), its data and networks, and the ranking of scan orders."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from trust_tta.bench.config import ARRAY, CLEAN_DATA_OPTIONS, MethodConfig, ModelConfig, RunConfig
from trust_tta.bench.data import ExperimentData
from trust_tta.bench.environment import autocast, choose_device
from trust_tta.config_io import read_class_names
from trust_tta.data.dataset import Dataset, align_classes
from trust_tta.data.file_io import hash_array, hash_strings
from trust_tta.data.registry import find_spec
from trust_tta.data.streams import Domain
from trust_tta.errors import ConfigError, TrustError
from trust_tta.methods.ranking import rank_orders
from trust_tta.models.checkpoint import Checkpoint
from trust_tta.models.networks import require_ours
from trust_tta.preprocessing import Preprocessing
from trust_tta.progress import SILENT, Progress
from trust_tta.results.display import BASELINES
from trust_tta.results.order_records import EntropyByOrder
from trust_tta.results.record import CellKey

WARM_UP_IMAGES = 2  # kernels are compiled for the shape of an image, whatever the batch size
SHORT_STREAM = 4  # batches, too few to learn from
CLEAN_IMAGES = 256  # from which methods compute statistics of clean data
_WITHOUT_CLASS_NAMES = (ARRAY, "array-c")  # data sets that may lack some of the network's classes

# Time of a batch relative to one forward pass, where the number of passes does not predict it; measured on an H200
# (docs/results/method_costs_h200.json).
MEASURED_COSTS = {
    "sar": 7, "shot": 6, "deyo": 9, "roid": 17, "cmf": 16, "rotta": 48, "cotta": 594, "lame": 4, "neo": 3, "tide": 8,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class CellSequence:
    """Cells that a method runs without a reset in between; a single cell if each domain begins with a reset."""

    method: MethodConfig
    batch_size: int
    seed: int
    positions: tuple[int, ...]  # positions of the domains in the stream
    keys: tuple[CellKey, ...]
    batches: tuple[int, ...]  # of each cell
    cost: int  # of a batch, in forward passes


@dataclass(frozen=True, eq=False)
class ExperimentPlan:
    """All sequences of an experiment, in the order they run, and the networks of its domains."""

    config: RunConfig
    sequences: tuple[CellSequence, ...]
    checkpoints: dict[str, Checkpoint]  # by domain
    preprocessing: dict[str, Preprocessing]  # by domain
    warnings: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[CellKey, ...]:
        return tuple(key for sequence in self.sequences for key in sequence.keys)

    @property
    def labels(self) -> dict[CellKey, str]:
        return {key: sequence.method.display_name for sequence in self.sequences for key in sequence.keys}

    @cached_property
    def baselines(self) -> dict[CellKey, CellKey]:
        """The cell of the first baseline method on the same stream, by cell."""
        present = {sequence.method.name for sequence in self.sequences}
        baseline = next((name for name in BASELINES if name in present), None)
        found: dict[CellKey, CellKey] = {}
        of_stream = {(s.batch_size, s.seed, s.positions): s.keys for s in self.sequences if s.method.name == baseline}
        for s in self.sequences:
            if baseline is not None and s.method.name != baseline:
                found |= zip(s.keys, of_stream[s.batch_size, s.seed, s.positions], strict=True)
        return found

    def prepare(self, domain: Domain, *, target: str | None = None) -> Domain:
        """The domain with preprocessing and class indices of its network, or of that for the domain `target`."""
        target = target or domain.dataset.domain
        network = self.checkpoints[target]
        dataset, _ = align_classes(domain.dataset, network.classes, outputs=network.num_classes, source=network.origin)
        batches = replace(domain.batches, dataset=dataset, preprocessing=self.preprocessing[target])
        return replace(domain, batches=batches)


def make_plan(config: RunConfig, data: ExperimentData | None = None) -> ExperimentPlan:
    """Plan a cell sequence of every method for each batch size, seed and run of domains between two resets."""
    data = data or ExperimentData(config.data)
    plan = ExperimentPlan(config, (), {}, {})
    sequences: list[CellSequence] = []
    warnings: dict[str, None] = {}
    for batch_size in config.stream.batch_size:
        for seed in config.stream.seeds:
            domains = data.stream(config.stream, batch_size=batch_size, seed=seed, workers=0)
            for dataset in [domain.dataset for domain in domains]:
                if dataset.domain not in plan.checkpoints:
                    shared = None if config.model.per_domain else next(iter(plan.checkpoints.values()), None)
                    checkpoint = shared or find_checkpoint(config.model, domain=dataset.domain)
                    plan.checkpoints[dataset.domain] = checkpoint
                    plan.preprocessing[dataset.domain] = checkpoint.preprocessing.for_layout(data.layout)
                    _, warning = align_classes(
                        dataset, checkpoint.classes, outputs=checkpoint.num_classes, source=checkpoint.origin
                    )
                    warnings[warning] = None
            starts = [i for i, domain in enumerate(domains) if domain.reset_before or domain.reset_each_batch]
            for start, end in zip(starts, [*starts[1:], len(domains)], strict=True):
                cells = [plan.prepare(domain) for domain in domains[start:end]]
                positions, prints = tuple(range(start, end)), list(fingerprints(plan, cells))
                for method in config.methods:
                    keys = _keys(plan, method, cells, prints, seed=seed)
                    batches = tuple(len(cell.batches) for cell in cells)
                    cost = estimate_cost(method)
                    sequences.append(CellSequence(method, batch_size, seed, positions, keys, batches, cost))
    named = not config.data.corrupts and not find_spec(config.data.dataset).class_names  # by folders or an object
    shown = [text for text in warnings if text and named]
    longest = max(sum(sequence.batches) for sequence in sequences)
    if longest <= SHORT_STREAM and any("lr" in method.all_options() for method in config.methods):
        shown.append(
            f"too few batches between two resets to learn from ({longest}): methods will hardly differ from bn; use "
            "smaller batches, more images or the setting continual"
        )
    return replace(plan, sequences=tuple(sequences), warnings=tuple(shown))


def estimate_cost(method: MethodConfig) -> int:
    """Estimated time of a batch, in forward passes."""
    options = method.all_options()
    if method.name in MEASURED_COSTS:
        return MEASURED_COSTS[method.name] * int(options.get("steps") or 1)
    if "lr" not in options:
        return max(1, int(options.get("population") or 1))
    orders = options.get("orders")
    updates = len(orders) if isinstance(orders, list) and orders else int(options.get("k") or 1)
    return 1 + 3 * updates * int(options.get("steps") or 1)  # a backward pass costs two forward passes


def find_checkpoint(model: ModelConfig, *, domain: str) -> Checkpoint:
    found = Checkpoint.open(
        None if model.checkpoint is None else model.checkpoint.replace("{domain}", domain),
        variant=model.name,
        num_classes=model.num_classes,
        preprocessing=model.preprocessing,
        classes=None if model.classes is None else read_class_names(model.classes),
        fields=model.overrides,
    )
    return found.release() if model.per_domain else found  # so that not all networks are in memory at once


def fingerprints(plan: ExperimentPlan, cells: list[Domain]) -> Iterator[str]:
    """Hashes of the input up to the end of each cell: pixels, order, preprocessing."""
    before = ""
    for domain in cells:
        dataset, batches = domain.dataset, domain.batches
        mask = dataset.class_mask if plan.config.data.class_mask else None
        before = hash_strings(
            (
                before,
                dataset.fingerprint,
                hash_array(batches.order[: batches.images]),
                repr(plan.preprocessing[dataset.domain]),
                "" if mask is None else hash_array(mask),
                plan.config.dtype,
            )
        )
        yield before


def _keys(
    plan: ExperimentPlan, method: MethodConfig, cells: list[Domain], fingerprints: list[str], *, seed: int
) -> tuple[CellKey, ...]:
    config, options = plan.config, method.all_options()
    origin = f" of {config.data.clean}" if config.data.clean else ""  # of statistics computed before the method runs
    options |= {name: f"{CLEAN_IMAGES} clean images{origin}" for name in CLEAN_DATA_OPTIONS & options.keys()}
    return tuple(
        CellKey(
            experiment=config.experiment,
            dataset=domain.dataset.name,
            domain=domain.name,
            severity=domain.dataset.severity,
            method=method.name,
            options=json.dumps(options),
            setting=config.stream.setting,
            batch_size=domain.batches.batch_size,
            seed=seed,
            checkpoint=plan.checkpoints[domain.dataset.domain].sha256,
            fingerprint=fingerprint,
            limit=config.data.limit,
        )
        for domain, fingerprint in zip(cells, fingerprints, strict=True)
    )


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
        """The domains of the first batch size and seed, preprocessed."""
        stream = self.config.stream
        return [self.plan.prepare(domain) for domain in self._open_stream(stream.batch_size[0], stream.seeds[0])]

    def domains_of(self, sequence: CellSequence) -> list[Domain]:
        """The domains of a sequence, preprocessed."""
        stream = self._open_stream(sequence.batch_size, sequence.seed)
        return [self.plan.prepare(stream[position]) for position in sequence.positions]

    def clean(self, sequence: CellSequence, *, limit: int | None) -> Domain:
        """At most `limit` clean images, the same for all cells, preprocessed for the sequence's network."""
        target = self._open_stream(sequence.batch_size, sequence.seed)[sequence.positions[0]].dataset.domain
        domain = self.data.clean_stream(target, batch_size=sequence.batch_size, limit=limit, workers=self.workers)
        return self.plan.prepare(domain, target=target)

    def network(self, domain: Domain) -> nn.Module:
        """The network of a domain, after one forward and backward pass, so that compiling is not timed."""
        checkpoint = self.plan.checkpoints[domain.dataset.domain]
        if self._network is None or self._network[0] != checkpoint.sha256:
            self._network = None  # freed before the next is made
            model = load_network(checkpoint, dataset=domain.dataset, device=self.device)
            images = domain.batches.load(0).images[:WARM_UP_IMAGES].to(self.device)
            try:
                with torch.enable_grad(), autocast(self.device, self.config.dtype):
                    loss = model(images).square().sum()
                torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
            except TrustError:  # the user's mistake
                raise
            except Exception:  # a cell with the same problem will report it
                pass
            self._network = checkpoint.sha256, model
        return self._network[1]

    def _open_stream(self, batch_size: int, seed: int) -> list[Domain]:
        if self._stream is None or self._stream[0] != (batch_size, seed):
            domains = self.data.stream(self.config.stream, batch_size=batch_size, seed=seed, workers=self.workers)
            self._stream = (batch_size, seed), domains
        return self._stream[1]


def load_network(checkpoint: Checkpoint, *, dataset: Dataset, device: torch.device) -> nn.Module:
    """Load the network in evaluation mode and check its number of classes against the data set."""
    classes = len(dataset.class_names)
    outputs = classes if checkpoint.num_classes is None else checkpoint.num_classes
    fits = outputs >= classes if dataset.name in _WITHOUT_CLASS_NAMES else outputs == classes
    if not fits:
        raise ConfigError(
            f"{checkpoint.origin} outputs {outputs} classes, but {dataset.name} has {classes}; "
            "pass --classes FILE with the names of the outputs, or a network that was trained on these classes"
        )
    return checkpoint.load(device=device, num_classes=outputs)


def rank_domains(
    config: RunConfig, *, k: int, progress: Progress = SILENT
) -> tuple[EntropyByOrder, list[EntropyByOrder]]:
    """Rank the scan orders by entropy, ascending: by the mean over the domains, and on each domain."""
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
    means = sorted((statistics.fmean(values[order] for values in found), order) for order in found[0])
    first = domains[0].dataset
    level = f" at severity {first.severity}" if first.severity else ""
    title = f"{first.name}{level}, {sum(domain.batches.images for domain in domains)} images"
    entropies, names = zip(*means, strict=True)
    return EntropyByOrder(title=title, orders=names, entropy=entropies, k=k), records
