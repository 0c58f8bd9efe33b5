"""Batches of a data set in a given order, decoded ahead of their use."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from trust_tta.data.dataset import ArrayImages, Dataset
from trust_tta.data.transforms import preprocess
from trust_tta.errors import DataError
from trust_tta.preprocessing import Preprocessing


@dataclass(frozen=True, eq=False)
class Batch:
    """`images`: float32 (n, 3, size, size), or uint8 (n, h, w, 3) where there is no preprocessing.

    `labels`, and `indices` into the data set: int64 (n,).
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
        return self._ahead() if self.workers else (self.load(k) for k in range(len(self)))

    def load(self, k: int) -> Batch:
        """Batch number `k`."""
        indices = self.order[k * self.batch_size : (k + 1) * self.batch_size]
        images = _read(self.dataset, indices)
        tensor = preprocess(images, self.preprocessing) if self.preprocessing else _stack(self.dataset, images)
        return Batch(tensor, torch.from_numpy(self.dataset.labels[indices]), torch.from_numpy(indices.copy()))

    def _ahead(self) -> Iterator[Batch]:
        pending: deque[Future[Batch]] = deque()
        executor = ThreadPoolExecutor(self.workers, thread_name_prefix="decode")
        try:
            for k in range(len(self)):
                pending.append(executor.submit(self.load, k))
                if len(pending) > self.workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            executor.shutdown(wait=True, cancel_futures=True)


def _read(dataset: Dataset, indices: NDArray[np.int64]) -> NDArray[np.uint8] | list[NDArray[np.uint8]]:
    if isinstance(dataset.images, ArrayImages):
        return np.asarray(dataset.images.array[indices])
    return [dataset.image(int(i)) for i in indices]


def _stack(dataset: Dataset, images: NDArray[np.uint8] | list[NDArray[np.uint8]]) -> torch.Tensor:
    if isinstance(images, list):
        sizes = sorted({image.shape[:2] for image in images})
        if len(sizes) > 1:
            raise DataError(
                f"{dataset.name}/{dataset.domain} has images of {len(sizes)} sizes, as {sizes[0]} and {sizes[-1]}; "
                "give a preprocessing that brings them to one"
            )
        images = np.stack(images)
    return torch.from_numpy(np.require(images, requirements=["C", "W"]))
