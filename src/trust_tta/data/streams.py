"""Test streams: domains of a data set in order, batch by batch, with the points of reset."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import field_validator

from trust_tta.data.dataset import ArrayImages, Dataset, join_datasets
from trust_tta.data.parallel import map_in_order
from trust_tta.data.segmentation import SegmentationDataset
from trust_tta.errors import ConfigError, DataError
from trust_tta.preprocessing import Preprocessing
from trust_tta.schema import Count, Natural, Positive, Schema, did_you_mean

if TYPE_CHECKING:
    import torch

Reset: TypeAlias = Literal["domain", "never", "batch"]

GRADUAL_SEVERITIES = (1, 2, 3, 4, 5, 4, 3, 2, 1)
_RESETS: dict[str, Reset] = {"online": "domain", "continual": "never", "standard": "batch"}
_TRAITS = ("mixed", "correlated", "gradual", "sequence")
SETTINGS = (*_RESETS, *_TRAITS)


@dataclass(frozen=True)
class Setting:
    """When the method is reset, and the order of images."""

    reset: Reset
    mixed: bool = False
    correlated: bool = False
    gradual: bool = False
    sequence: bool = False

    @property
    def name(self) -> str:
        """The one spelling of this setting: `parse_setting(s.name) == s`."""
        traits = [trait for trait in _TRAITS if getattr(self, trait)]
        word = next(word for word, reset in _RESETS.items() if reset == self.reset)
        return "+".join(traits if traits and self.reset == "never" else [word, *traits])


def parse_setting(text: str) -> Setting:
    """A setting from its name, or from several joined by `+`, as "online+correlated".

    Mixed, correlated and gradual streams and sequences never reset unless one of the names says so.
    """
    words = text.replace(" ", "").split("+")
    resets = [_RESETS[word] for word in words if word in _RESETS]
    if not set(words) <= set(SETTINGS) or len(resets) > 1 or len(words) != len(set(words)):
        raise ConfigError(
            f"the setting {text!r} is not known; {did_you_mean(text, SETTINGS)} "
            f"({', '.join(SETTINGS)}, or several joined with '+', at most one of online, continual and standard)"
        )
    setting = Setting(resets[0] if resets else "never", **{trait: trait in words for trait in _TRAITS})
    if setting.mixed + setting.gradual + setting.sequence > 1:
        raise ConfigError(
            f"the setting {text!r} orders domains in several ways; choose one of mixed, gradual, sequence"
        )
    return setting


MIXED = "mixed"
MAX_SLOTS = 100


class StreamConfig(Schema):
    """One stream. `gamma` is the concentration of the Dirichlet draw: the smaller, the longer runs of one class.

    `limit` takes at most that many images of each domain, drawn by the seed.
    """

    setting: str = "online"
    batch_size: Count = 128
    seed: Natural = 0
    shuffle: bool = True
    limit: Count | None = None
    drop_last: bool = False
    gamma: Positive = 0.1

    @field_validator("setting")
    @classmethod
    def _is_known(cls, setting: str) -> str:
        return parse_setting(setting).name


@dataclass(frozen=True, eq=False)
class Domain:
    """One part of a stream, and whether the method is reset before it or before each of its batches."""

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
    """The stream of `datasets` in this order; a change of domain is a shift, a mere change of severity is not."""
    if workers is None:
        workers = min(4, os.cpu_count() or 1)
    setting = parse_setting(config.setting)
    groups = [tuple(datasets)] if setting.mixed else ((dataset,) for dataset in datasets)
    previous: Dataset | None = None
    for number, group in enumerate(groups, start=1):
        dataset = join_datasets(group, domain=MIXED) if len(group) > 1 else group[0]
        name = _name(dataset, previous, setting, number)
        batches = Batches(
            dataset=dataset,
            order=stream_order(group, dataset.labels, config, segment=name if setting.sequence else None),
            batch_size=config.batch_size,
            drop_last=config.drop_last,
            preprocessing=preprocessing,
            workers=workers,
        )
        shift = previous is None or setting.sequence or previous.domain != dataset.domain
        yield Domain(
            name=name,
            batches=batches,
            reset_before=previous is None or (shift and setting.reset == "domain"),
            reset_each_batch=setting.reset == "batch",
        )
        previous = dataset


def draw_sequence(pairs: Sequence[tuple[str, int]], *, count: int, seed: int) -> list[tuple[str, int]]:
    """The domain and severity of each of `count` segments of a sequence: all `pairs` in a drawn order, then again."""
    generator = _generator(seed, "sequence")
    drawn: list[tuple[str, int]] = []
    while len(drawn) < count:
        drawn += [pairs[k] for k in generator.permutation(len(pairs))]
    return drawn[:count]


def stream_order(
    datasets: Sequence[Dataset], labels: NDArray[np.int64], config: StreamConfig, *, segment: str | None = None
) -> NDArray[np.int64]:
    """The indices into the joined `datasets` in the order of the stream, int64 (n,); each at most once.

    The order of a domain depends on the seed and its name alone, not on the other domains. In a sequence it depends on
    the name of the `segment` instead, so that a domain that returns shows other images.
    """
    chosen, offset = [], 0
    for dataset in datasets:
        kept = np.arange(len(dataset), dtype=np.int64)
        if config.limit is not None and config.limit < len(dataset):
            draw = _generator(config.seed, segment or dataset.domain, "limit")
            kept = np.sort(draw.choice(len(dataset), size=config.limit, replace=False)).astype(np.int64)
        chosen.append(offset + kept)
        offset += len(dataset)
    indices = np.concatenate(chosen)
    generator = _generator(config.seed, segment or (datasets[0].domain if len(datasets) == 1 else MIXED), "order")
    if parse_setting(config.setting).correlated:
        return indices[correlated_order(labels[indices], gamma=config.gamma, generator=generator)]
    if config.shuffle or len(datasets) > 1:
        return generator.permutation(indices)
    return indices


def correlated_order(labels: NDArray[np.int64], *, gamma: float, generator: np.random.Generator) -> NDArray[np.int64]:
    """Indices (n,) that sort `labels` into runs of one class: a Dirichlet draw splits each class over time slots.

    There are as many slots as classes, at most 100; within a slot, the classes come in random order.
    """
    classes = np.unique(labels)
    slots = min(len(classes), MAX_SLOTS)
    shares: list[list[NDArray[np.int64]]] = []
    for label in classes:
        members = generator.permutation(np.flatnonzero(labels == label))
        cuts = np.cumsum(generator.dirichlet(np.full(slots, gamma)))[:-1] * len(members)
        shares.append(np.split(members, np.round(cuts).astype(np.int64)))
    return np.concatenate([shares[k][slot] for slot in range(slots) for k in generator.permutation(len(classes))])


def _generator(seed: int, *words: str) -> np.random.Generator:
    return np.random.default_rng([seed, *(zlib.crc32(word.encode()) for word in words)])


def _name(dataset: Dataset, previous: Dataset | None, setting: Setting, number: int) -> str:
    """`fog`; in gradual streams `fog/3`, and `fog/3-falling` on the way back; in sequences `007-fog/3`."""
    graded = dataset.domain if dataset.severity is None else f"{dataset.domain}/{dataset.severity}"
    if setting.sequence:
        return f"{number:03d}-{graded}"
    if not setting.gradual:
        return dataset.domain
    same = previous is not None and previous.domain == dataset.domain
    falling = same and previous is not None and (previous.severity or 0) > (dataset.severity or 0)
    return f"{graded}-falling" if falling else graded


@dataclass(frozen=True, eq=False)
class Batch:
    """`images`: float32 (n, 3, size, size), or uint8 (n, h, w, 3) where there is no preprocessing.

    `labels` and `indices` into the data set: int64 (n,); for segmentation, `labels` are masks, int64 (n, h, w).
    """

    images: torch.Tensor
    labels: torch.Tensor
    indices: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class Batches:
    """The batches of `dataset` in `order`, int64 (n,); every iteration gives the same ones.

    `workers` threads decode ahead; 0 decodes in the calling thread. The result does not depend on it.
    """

    dataset: Dataset
    order: NDArray[np.int64]
    batch_size: int
    drop_last: bool = False
    preprocessing: Preprocessing | None = None
    workers: int = 0

    def __len__(self) -> int:
        whole, rest = divmod(len(self.order), self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    @property
    def images(self) -> int:
        """The number of images in all batches."""
        return min(len(self.order), len(self) * self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        executor = ThreadPoolExecutor(self.workers, thread_name_prefix="decode") if self.workers else None
        try:
            yield from map_in_order(executor, self.load, range(len(self)), limit=self.workers + 1)
        finally:
            if executor is not None:
                executor.shutdown(cancel_futures=True)

    def load(self, k: int) -> Batch:
        """Batch number `k`."""
        import torch

        dataset, indices = self.dataset, self.order[k * self.batch_size : (k + 1) * self.batch_size]
        images: NDArray[np.uint8] | list[NDArray[np.uint8]]
        if isinstance(dataset.images, ArrayImages):
            images = np.asarray(dataset.images.array[indices])
        else:
            images = [dataset.image(int(i)) for i in indices]
        if isinstance(dataset, SegmentationDataset):  # images resized by the protocol of their data set already
            pixels = _stack(dataset, images)
            labels = _stack(dataset, [dataset.mask(int(i)) for i in indices]).long()
            tensor = self.preprocessing.normalize(pixels) if self.preprocessing else pixels
        else:
            labels = torch.from_numpy(dataset.labels[indices])
            tensor = self.preprocessing(images) if self.preprocessing else _stack(dataset, images)
        return Batch(tensor, labels, torch.from_numpy(indices.copy()))


def _stack(dataset: Dataset, images: NDArray[np.uint8] | list[NDArray[np.uint8]]) -> torch.Tensor:
    import torch

    if isinstance(images, list):
        sizes = sorted({image.shape[:2] for image in images})
        if len(sizes) > 1:
            raise DataError(
                f"{dataset.name}/{dataset.domain} has images of {len(sizes)} sizes, as {sizes[0]} and {sizes[-1]}; "
                "set a preprocessing that resizes them, or a batch size of 1"
            )
        images = np.stack(images)
    return torch.from_numpy(np.require(images, requirements=["C", "W"]))
