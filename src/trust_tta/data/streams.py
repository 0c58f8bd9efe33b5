"""Streams: the domains of a data set in the order a network meets them, with the moments it is reset."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trust_tta.data.dataset import Dataset, join_datasets
from trust_tta.data.loading import Batches
from trust_tta.data.settings import Setting, parse_setting
from trust_tta.errors import ConfigError
from trust_tta.preprocessing import Preprocessing

MIXED = "mixed"
_MOST_SLOTS = 100


@dataclass(frozen=True)
class StreamConfig:
    """One stream. `gamma` is the concentration of the Dirichlet draw: the smaller, the longer runs of one class.

    `limit` takes so many images of each domain, drawn by the seed.
    """

    setting: str = "online"
    batch_size: int = 128
    seed: int = 0
    shuffle: bool = True
    limit: int | None = None
    drop_last: bool = False
    gamma: float = 0.1

    def __post_init__(self) -> None:
        parse_setting(self.setting)
        if self.batch_size < 1:
            raise ConfigError(f"batch_size is {self.batch_size}; it must be at least 1")
        if self.seed < 0:
            raise ConfigError(f"seed is {self.seed}; it must not be negative")
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit is {self.limit}; it must be a positive number of images, or None for all")
        if not self.gamma > 0:
            raise ConfigError(f"gamma is {self.gamma}; it must be above zero")

    @cached_property
    def parsed(self) -> Setting:
        """The setting's meaning."""
        return parse_setting(self.setting)


@dataclass(frozen=True, eq=False)
class Domain:
    """One stretch of a stream: reset the network before it, or before each of its batches, where it says so."""

    name: str
    batches: Batches
    reset_before: bool
    reset_each_batch: bool

    @property
    def dataset(self) -> Dataset:
        return self.batches.dataset


def stream_datasets(
    datasets: Iterable[Dataset],
    config: StreamConfig,
    *,
    preprocessing: Preprocessing | None = None,
    workers: int | None = None,
) -> Iterator[Domain]:
    """The stream of `datasets` in this order; a change of domain is a shift, a change of severity alone is not."""
    if workers is None:
        workers = min(4, os.cpu_count() or 1)
    reset, gradual = config.parsed.reset, config.parsed.gradual
    groups = [tuple(datasets)] if config.parsed.mixed else ((dataset,) for dataset in datasets)
    previous: Dataset | None = None
    for parts in groups:
        dataset = join_datasets(parts, domain=MIXED) if len(parts) > 1 else parts[0]
        batches = Batches(
            dataset=dataset,
            order=presentation_order(parts, dataset.labels, config),
            batch_size=config.batch_size,
            drop_last=config.drop_last,
            preprocessing=preprocessing,
            workers=workers,
        )
        shift = previous is not None and previous.domain != dataset.domain
        yield Domain(
            name=_gradual_name(dataset, previous) if gradual else dataset.domain,
            batches=batches,
            reset_before=previous is None or (shift and reset == "domain"),
            reset_each_batch=reset == "batch",
        )
        previous = dataset


def presentation_order(parts: Sequence[Dataset], labels: NDArray[np.int64], config: StreamConfig) -> NDArray[np.int64]:
    """The indices into the joined `parts` in the order of the stream, int64 (n,); each at most once.

    A domain is drawn by the seed and its name alone, so that it comes out the same in whichever company it runs.
    """
    chosen, offset = [], 0
    for part in parts:
        chosen.append(offset + _choose(len(part), config.limit, _generator(config.seed, part.domain, "limit")))
        offset += len(part)
    indices = np.concatenate(chosen)
    generator = _generator(config.seed, parts[0].domain if len(parts) == 1 else MIXED, "order")
    if config.parsed.correlated:
        return indices[correlated_order(labels[indices], gamma=config.gamma, generator=generator)]
    if config.shuffle or len(parts) > 1:
        return generator.permutation(indices)
    return indices


def correlated_order(labels: NDArray[np.int64], *, gamma: float, generator: np.random.Generator) -> NDArray[np.int64]:
    """An order of `labels` (n,) in which classes come in runs: each class is shared out over slots by a Dirichlet draw.

    There are as many slots as classes, at most 100; within a slot the classes follow each other in a drawn order.
    """
    classes = np.unique(labels)
    slots = min(len(classes), _MOST_SLOTS)
    shares: list[list[NDArray[np.int64]]] = []
    for label in classes:
        members = generator.permutation(np.flatnonzero(labels == label))
        cuts = np.cumsum(generator.dirichlet(np.full(slots, gamma)))[:-1] * len(members)
        shares.append(np.split(members, np.round(cuts).astype(np.int64)))
    return np.concatenate([shares[k][slot] for slot in range(slots) for k in generator.permutation(len(classes))])


def _choose(count: int, limit: int | None, generator: np.random.Generator) -> NDArray[np.int64]:
    """At most `limit` of `count` indices, drawn at random, in ascending order."""
    if limit is None or limit >= count:
        return np.arange(count, dtype=np.int64)
    return np.sort(generator.choice(count, size=limit, replace=False)).astype(np.int64)


def _generator(seed: int, *words: str) -> np.random.Generator:
    return np.random.default_rng([seed, *(zlib.crc32(word.encode()) for word in words)])


def _gradual_name(dataset: Dataset, previous: Dataset | None) -> str:
    """`fog/3` while the severity rises, `fog/3-falling` when it comes back."""
    same = previous is not None and previous.domain == dataset.domain
    falling = same and previous is not None and (previous.severity or 0) > (dataset.severity or 0)
    return f"{dataset.domain}/{dataset.severity}{'-falling' if falling else ''}"
