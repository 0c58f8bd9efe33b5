"""From an experiment to its cells, each with everything that determines its numbers."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from trust_tta.bench.config import FROM_CLEAN, MethodConfig, ModelConfig, RunConfig
from trust_tta.bench.data import ExperimentData, align, prepare
from trust_tta.data.file_io import hash_array, hash_strings
from trust_tta.data.streams import Domain
from trust_tta.models.checkpoint import Checkpoint
from trust_tta.preprocessing import Preprocessing
from trust_tta.results.display import BASELINES
from trust_tta.results.record import CellKey
from trust_tta.results.store import ResultStore

MEASURES = ("clean_after", "keep_samples", "confusion")  # measured in addition, and not part of a cell's key
CLEAN_IMAGES = 256  # from which methods gather statistics of clean data


@dataclass(frozen=True, eq=False)
class Chain:
    """Cells that a method goes through without a reset in between; a single one where every domain resets."""

    method: MethodConfig
    batch_size: int
    seed: int
    places: tuple[int, ...]  # positions of the domains in the stream
    keys: tuple[CellKey, ...]
    batches: tuple[int, ...]  # of each cell
    measures: dict[str, int]  # requested amount of each of MEASURES
    cost: int  # estimated passes of the network per batch

    @property
    def passes(self) -> int:
        return self.cost * sum(self.batches)


@dataclass(frozen=True, eq=False)
class Plan:
    """All chains of an experiment, in the order they run, and the networks of its domains."""

    chains: tuple[Chain, ...]
    checkpoints: dict[str, Checkpoint]  # by domain
    preprocessing: dict[str, Preprocessing]  # by domain
    warnings: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[CellKey, ...]:
        return tuple(key for chain in self.chains for key in chain.keys)

    @property
    def labels(self) -> dict[CellKey, str]:
        """The label of each cell's method, wherever results are shown."""
        return {key: chain.method.shown for chain in self.chains for key in chain.keys}

    @cached_property
    def baselines(self) -> dict[CellKey, CellKey]:
        """For each cell, the cell that its gain is measured against: that of the first baseline among the methods."""
        present = {chain.method.name for chain in self.chains}
        name = next((name for name in BASELINES if name in present), None)
        found = {(c.batch_size, c.seed, c.places): c.keys for c in self.chains if c.method.name == name}
        return {
            key: base
            for chain in self.chains
            if name is not None and chain.method.name != name
            for key, base in zip(chain.keys, found[chain.batch_size, chain.seed, chain.places], strict=True)
        }


def make_plan(config: RunConfig, data: ExperimentData | None = None) -> Plan:
    """All cells: for each batch size and seed, for each stretch between two resets, every method."""
    data = data or ExperimentData(config.data)
    chains: list[Chain] = []
    checkpoints: dict[str, Checkpoint] = {}
    preprocessing: dict[str, Preprocessing] = {}
    warnings: dict[str, None] = {}
    for batch_size in config.stream.batch_size:
        for seed in config.stream.seeds:
            domains = data.stream(config.stream, batch_size=batch_size, seed=seed, workers=0)
            for domain in domains:
                base = domain.dataset.domain
                if base not in checkpoints:
                    checkpoints[base] = _find(config, base, checkpoints)
                    preprocessing[base] = checkpoints[base].preprocessing.for_layout(data.layout)
                    warnings |= {align(domain.dataset, checkpoints[base])[1]: None}
            domains = [prepare(d, preprocessing[d.dataset.domain], checkpoints[d.dataset.domain]) for d in domains]
            for places in stretches(domains):
                cells = [domains[place] for place in places]
                prints = list(fingerprints(config, cells, preprocessing))
                chains += [
                    _chain(config, method, cells, prints, places, seed=seed, checkpoints=checkpoints)
                    for method in config.methods
                ]
    shown = tuple(filter(None, warnings)) if data.names_classes else ()
    return Plan(tuple(chains), checkpoints, preprocessing, shown)


def weigh(plan: Plan, store: ResultStore) -> Plan:
    """The plan with costs taken from finished cells of the same methods, where the store has any."""
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    wanted = {(chain.keys[0].method, chain.keys[0].options) for chain in plan.chains}
    for cell in store.results(lambda key: (key.method, key.options) in wanted, history=False):
        seconds[cell.key.method, cell.key.options].append(cell.result.seconds_total / max(1, cell.batches))
    known = {kind: statistics.median(found) for kind, found in seconds.items()}
    foreseen = {(chain.keys[0].method, chain.keys[0].options): chain.cost for chain in plan.chains}
    rates = [taken / foreseen[kind] for kind, taken in known.items() if taken > 0]
    if not rates:
        return plan
    usual, unit = statistics.median(rates), min(rates)  # seconds of one pass

    def cost(chain: Chain) -> int:
        taken = known.get((chain.keys[0].method, chain.keys[0].options), chain.cost * usual)
        return max(1, round(taken / unit))

    return replace(plan, chains=tuple(replace(chain, cost=cost(chain)) for chain in plan.chains))


def foreseen_passes(options: Mapping[str, Any]) -> int:
    """Estimated passes per batch of a method with these options; a backward pass counts as two."""
    if "lr" not in options:
        return max(1, int(options.get("population") or 1))
    orders = options.get("orders")
    views = len(orders) if isinstance(orders, list) and orders else int(options.get("k") or 1)
    return 1 + 3 * views * int(options.get("steps") or 1)


def stretches(domains: list[Domain]) -> Iterator[tuple[int, ...]]:
    """The positions of the domains between one reset and the next."""
    starts = [i for i, domain in enumerate(domains) if domain.reset_before or domain.reset_each_batch]
    for start, end in zip(starts, [*starts[1:], len(domains)], strict=True):
        yield tuple(range(start, end))


def _find(config: RunConfig, domain: str, found: dict[str, Checkpoint]) -> Checkpoint:
    if found and not config.model.per_domain:
        return next(iter(found.values()))
    return find_checkpoint(config.model, domain=domain)


def find_checkpoint(model: ModelConfig, *, domain: str) -> Checkpoint:
    """The checkpoint for `domain`, as the experiment describes it."""
    found = Checkpoint.open(
        None if model.checkpoint is None else model.checkpoint.replace("{domain}", domain),
        variant=model.name,
        num_classes=model.num_classes,
        preprocessing=model.preprocessing,
        fields=model.overrides,
    )
    return found.release() if model.per_domain else found  # so that not all networks are in memory at once


def fingerprints(config: RunConfig, cells: list[Domain], preprocessing: dict[str, Preprocessing]) -> Iterator[str]:
    """A fingerprint for each cell of all that the network has seen by its end: pixels, order, preprocessing."""
    before = ""
    for domain in cells:
        dataset, batches = domain.dataset, domain.batches
        mask = dataset.class_mask if config.data.class_mask else None
        before = hash_strings(
            (
                before,
                dataset.fingerprint,
                hash_array(batches.order[: batches.images]),
                repr(preprocessing[dataset.domain]),
                "" if mask is None else hash_array(mask),
                config.dtype,
            )
        )
        yield before


def _chain(
    config: RunConfig,
    method: MethodConfig,
    cells: list[Domain],
    fingerprints: list[str],
    places: tuple[int, ...],
    *,
    seed: int,
    checkpoints: dict[str, Checkpoint],
) -> Chain:
    batch_size = cells[0].batches.batch_size
    keys = tuple(
        CellKey(
            experiment=config.experiment,
            dataset=domain.dataset.name,
            domain=domain.name,
            severity=domain.dataset.severity,
            method=method.name,
            options=json.dumps(key_options(method)),
            setting=config.stream.setting,
            batch_size=batch_size,
            seed=seed,
            checkpoint=checkpoints[domain.dataset.domain].sha256,
            fingerprint=fingerprint,
            limit=config.data.limit,
        )
        for domain, fingerprint in zip(cells, fingerprints, strict=True)
    )
    return Chain(
        method=method,
        batch_size=batch_size,
        seed=seed,
        places=places,
        keys=keys,
        batches=tuple(len(domain.batches) for domain in cells),
        measures={name: int(getattr(config, name)) for name in MEASURES},
        cost=foreseen_passes(method.all_options()),
    )


def key_options(method: MethodConfig) -> dict[str, object]:
    """All options of the method; in place of statistics that the runner gathers, a note of how it gathers them."""
    options = method.all_options()
    options |= {name: f"{CLEAN_IMAGES} clean images" for name in FROM_CLEAN & options.keys()}
    return options
