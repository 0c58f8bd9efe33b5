"""Running all cells of an experiment into a store: resumable, shareable, and through failures of single cells."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from trust_tta.bench.config import SOURCE_STATISTICS, RunConfig
from trust_tta.bench.environment import choose_device, collect_facts, now
from trust_tta.bench.experiment import load_network
from trust_tta.bench.pictures import kept_pictures, spoken_names
from trust_tta.bench.plan import CLEAN_IMAGES, Chain, Plan, make_plan
from trust_tta.bench.runner import Conditions, run_stream
from trust_tta.bench.sources import DataSource, prepare
from trust_tta.data.streams import Domain
from trust_tta.errors import ConfigError, TrustError
from trust_tta.methods.base import Method
from trust_tta.methods.foa import gather_source_statistics
from trust_tta.methods.registry import create_method, method_options
from trust_tta.results.record import CellKey, CellResult, Facts
from trust_tta.results.store import ResultStore

WARM_UP_IMAGES = 2  # kernels are compiled for the shape of an image, whatever the batch
POLL_SECONDS = 1.0  # between looks at cells that another process holds


class Observer:
    """What a caller may want to hear of while a sweep runs; these do nothing."""

    def start(self, keys: tuple[CellKey, ...], batches: int) -> None:
        """`keys` are still to be run, in so many batches."""

    def advance(self, batches: int) -> None:
        """So many more batches are done."""

    def finished(self, key: CellKey, result: CellResult) -> None:
        """A cell is done and recorded."""

    def failed(self, key: CellKey, message: str) -> None:
        """A cell ended in an error."""

    def waiting(self, cells: int) -> None:
        """Nothing is left but cells that other processes hold."""


@dataclass(frozen=True)
class Outcome:
    """How the cells of an experiment stand after a sweep."""

    keys: tuple[CellKey, ...]
    done: int
    failed: int


def sweep(config: RunConfig, store: ResultStore, *, observer: Observer, retry: bool = False) -> Outcome:
    """Run what is not finished, wait for what others run, and say how it ended; `retry` tries failed cells again."""
    source = DataSource(config.data)
    plan = make_plan(config, source)
    if retry:
        retry_failed(plan, store)
    bench = Bench(config, source, plan, store, observer)
    left = unsettled(plan.chains, store)
    if left:  # a checkpoint that does not fit or data that is missing is the user's mistake, not a cell's failure
        bench.check(left[0])
    store.plan(plan.keys, labels=plan.labels)
    observer.start(tuple(key for chain in left for key in chain.keys), sum(sum(chain.batches) for chain in left))
    bench.run_all(left, wait=True)
    return standing(plan, store)


def retry_failed(plan: Plan, store: ResultStore) -> None:
    """Make the failed cells of a plan free again."""
    digests = {key.digest for key in plan.keys}
    store.retry_failed(lambda key: key.digest in digests)


def unsettled(chains: Sequence[Chain], store: ResultStore) -> list[Chain]:
    """Those of the chains that are neither finished nor cut short by a failure."""
    _refuse_lacking(chains, store)
    done, failed = _ended(store)
    return [chain for chain in chains if not _is_settled(chain, done, failed)]


def _refuse_lacking(chains: Sequence[Chain], store: ResultStore) -> None:
    """A finished cell is not run again, so one that was run without a measure that is wanted now never gets it."""
    wanted = {key.digest: chain.measures for chain in chains if any(chain.measures.values()) for key in chain.keys}
    if not wanted:
        return
    cells, lacking = 0, set[str]()
    for cell in store.results(lambda key: key.digest in wanted, course=False):
        had = json.loads(cell.facts.config)
        missing = {name for name, amount in wanted[cell.key.digest].items() if amount > had.get(name, 0)}
        cells += bool(missing)
        lacking |= missing
    if lacking:
        raise ConfigError(
            f"of the cells in '{store.path}', {cells} finished without this {' or '.join(sorted(lacking))}, "
            "and no finished cell is run again; give another store, or leave it out"
        )


def standing(plan: Plan, store: ResultStore) -> Outcome:
    """How the cells of a plan stand."""
    digests = {key.digest for key in plan.keys}
    done, failed = _ended(store)
    return Outcome(plan.keys, len(done & digests), len(failed & digests))


@dataclass(frozen=True)
class _Found:
    """A cell that was run, with what the store keeps of it."""

    key: CellKey
    result: CellResult
    facts: Facts
    pictures: Mapping[int, bytes]
    class_names: tuple[str, ...]


class _OutsideError(Exception):
    """Carries an error of the store or the observer out of a cell that it interrupted but that did not fail."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Bench:
    """The network, the data and the store that all chains of a sweep share; each is opened when it is needed."""

    def __init__(
        self, config: RunConfig, source: DataSource, plan: Plan, store: ResultStore, observer: Observer
    ) -> None:
        self.config, self.source, self.plan, self.store, self.observer = config, source, plan, store, observer
        self.device = choose_device(config.device)
        self.workers = 0 if self.device.type == "cpu" else 4  # threads that decode would disturb times on a CPU
        self.facts = collect_facts(device=self.device, dtype=config.dtype, config=config.to_json())
        self._network: tuple[str, nn.Module] | None = None
        self._stream: tuple[tuple[int, int], list[Domain]] | None = None

    def check(self, chain: Chain) -> None:
        """Open what the cells need, so that an error comes before the first of them."""
        gathers = any(SOURCE_STATISTICS in method_options(method.name) for method in self.config.methods)
        if self.config.clean_after or gathers:
            self.source.clean(self._open_domains(chain)[0].dataset.domain)
        self._open_network(chain)

    def run_all(self, chains: Sequence[Chain], *, wait: bool) -> None:
        """Run each chain that is free; with `wait`, go on until those that others hold are settled as well."""
        left = list(chains)
        while left:
            held = [chain for chain in left if not self.run(chain)]
            if not wait:
                return
            left = unsettled(held, self.store)
            if left and len(left) == len(held):
                self.observer.waiting(sum(len(chain.keys) for chain in left))
                time.sleep(POLL_SECONDS)

    def run(self, chain: Chain) -> bool:
        """Run a chain where it is free; False where another process holds it.

        An error of a cell is recorded, not raised; one of the store ends the run.
        """
        wanted = self.store.claim_all(chain.keys)
        if not wanted:
            return False
        unfinished = list(wanted)
        results = self._results(chain)
        while True:
            try:
                found = next(results, None)
            except _OutsideError as outside:
                raise outside.error from outside.error.__cause__
            except Exception as error:  # whatever it is, the other cells are still worth running
                for key in unfinished:
                    self.store.fail(key, message := _one_line(error))
                    self.observer.failed(key, message)
                return True
            if found is None:
                return True
            if found.key in unfinished:  # the others were recorded before, and run again only to get here
                if found.pictures:
                    self.store.keep_pictures(found.key, found.pictures, class_names=found.class_names)
                self.store.finish(found.key, found.result, found.facts)
                unfinished.remove(found.key)
                self.observer.finished(found.key, found.result)

    def _results(self, chain: Chain) -> Iterator[_Found]:
        domains = self._open_domains(chain)
        model = self._open_network(chain)
        method = self._create(chain, model)
        conditions = Conditions(
            device=self.device,
            dtype=self.config.dtype,
            class_mask=self.config.data.class_mask,
            clean=self._clean(chain, limit=self.config.data.limit) if self.config.clean_after else None,
            keep_samples=self.config.keep_samples,
            confusion=self.config.confusion,
        )
        started = now()
        results = run_stream(method, domains, conditions, beat=self._beat)
        for key, domain, result in zip(chain.keys, domains, results, strict=True):
            finished = now()
            facts = replace(self.facts, started=started, finished=finished)
            pictures = kept_pictures(domain.dataset, result.predictions)
            yield _Found(key, result, facts, pictures, spoken_names(domain.dataset))
            started = finished

    def _create(self, chain: Chain, model: nn.Module) -> Method:
        options = dict(chain.method.options)
        defaults = method_options(chain.method.name)
        if SOURCE_STATISTICS in defaults:
            batches = (batch.images.to(self.device) for batch in self._clean(chain, limit=CLEAN_IMAGES).batches)
            own = {**defaults, **options}["statistics"]
            options[SOURCE_STATISTICS] = gather_source_statistics(model, batches, statistics=own)
        return create_method(chain.method.name, model, **options)

    def _clean(self, chain: Chain, *, limit: int | None) -> Domain:
        """At most `limit` clean images, drawn once for all cells, as the chain's network takes them."""
        target = self._open_stream(chain.batch_size, chain.seed)[chain.places[0]].dataset.domain
        domain = self.source.clean_stream(target, batch_size=chain.batch_size, limit=limit, workers=self.workers)
        return prepare(domain, self.plan.preprocessing[target])

    def _open_domains(self, chain: Chain) -> list[Domain]:
        stream = self._open_stream(chain.batch_size, chain.seed)
        domains = [stream[place] for place in chain.places]
        return [prepare(domain, self.plan.preprocessing[domain.dataset.domain]) for domain in domains]

    def _open_stream(self, batch_size: int, seed: int) -> list[Domain]:
        """The stream of this batch size and seed; the one before is let go, and the images made for it."""
        if self._stream is None or self._stream[0] != (batch_size, seed):
            domains = self.source.stream(self.config.stream, batch_size=batch_size, seed=seed, workers=self.workers)
            self._stream = (batch_size, seed), domains
        return self._stream[1]

    def _open_network(self, chain: Chain) -> nn.Module:
        """The chain's network; a new one first does one pass each way, so that no cell pays for compiling."""
        first = self._open_domains(chain)[0]
        checkpoint = self.plan.checkpoints[first.dataset.domain]
        if self._network is None or self._network[0] != checkpoint.sha256:
            model = load_network(checkpoint, dataset=first.dataset, device=self.device)
            warm_up(model, first.batches.load(0).images[:WARM_UP_IMAGES].to(self.device), dtype=self.config.dtype)
            self._network = checkpoint.sha256, model
        return self._network[1]

    def _beat(self, batches: int) -> None:
        try:
            self.store.heartbeat()
            self.observer.advance(batches)
        except Exception as error:
            raise _OutsideError(error) from error


def warm_up(model: nn.Module, images: Tensor, *, dtype: str) -> None:
    """One pass forward and backward over images (n, c, h, w) that changes nothing, in so far as it succeeds."""
    try:
        with torch.enable_grad(), torch.autocast(images.device.type, torch.bfloat16, enabled=dtype == "bf16"):
            loss = model(images).square().sum()
        torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
    except TrustError:  # the user's mistake
        raise
    except Exception:  # a cell that meets the same says so itself
        return


def _ended(store: ResultStore) -> tuple[set[str], set[str]]:
    """The digests of the finished and of the failed cells."""
    return {key.digest for key in store.keys("done")}, {key.digest for key in store.keys("failed")}


def _is_settled(chain: Chain, done: set[str], failed: set[str]) -> bool:
    digests = [key.digest for key in chain.keys]
    return all(digest in done for digest in digests) or any(digest in failed for digest in digests)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, TrustError) else f"{type(error).__name__}: {text}"
