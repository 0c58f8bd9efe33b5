"""A data set as the rest of the package sees it: images by index, labels, classes, a fingerprint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from trust_tta.data.class_matching import are_numeric, match_classes
from trust_tta.data.file_io import hash_array, hash_file_sizes, hash_strings
from trust_tta.data.images import check_labels, check_pixels, read_image
from trust_tta.errors import DataError

_PROBES = 64  # images of a sequence that are hashed


class Images(Protocol):
    """Images by index, each uint8 (h, w, 3)."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> NDArray[np.uint8]: ...

    def digest(self) -> str: ...


@dataclass(frozen=True)
class ArrayImages:
    """Images in one array, uint8 (n, h, w, 3); it may be memory-mapped."""

    array: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.array)

    def read(self, index: int) -> NDArray[np.uint8]:
        return np.array(self.array[index])

    def digest(self) -> str:
        return hash_array(self.array)


@dataclass(frozen=True)
class FileImages:
    """Images in files below `folder`."""

    folder: Path
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)

    def read(self, index: int) -> NDArray[np.uint8]:
        return read_image(self.folder / self.names[index])

    def digest(self) -> str:
        return hash_file_sizes((name, (self.folder / name).stat().st_size) for name in self.names)


@dataclass(frozen=True)
class PythonImages:
    """The images at `indices` of any sequence of uint8 arrays (h, w, 3) or Pillow images."""

    items: Sequence[Any]
    indices: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int) -> NDArray[np.uint8]:
        item = self.items[int(self.indices[index])]
        image = np.array(item.convert("RGB") if hasattr(item, "convert") else item)
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[-1] != 3:
            raise DataError(f"image {self.indices[index]} is {image.dtype} {image.shape}; give uint8 (h, w, 3)")
        return image

    def digest(self) -> str:
        """Hash of the indices and some evenly spaced images; reading all of them might take hours."""
        some = range(0, len(self), -(-len(self) // _PROBES))
        return hash_strings((hash_array(self.indices), *(hash_array(self.read(index)) for index in some)))


@dataclass(frozen=True)
class PickedImages:
    """The images at `indices` (n,) of others."""

    images: Images
    indices: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int) -> NDArray[np.uint8]:
        return self.images.read(int(self.indices[index]))

    def digest(self) -> str:
        return hash_strings((self.images.digest(), hash_array(self.indices)))


@dataclass(frozen=True)
class JoinedImages:
    """The images of several data sets, one after the other."""

    joined: tuple[Images, ...]

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.cumsum([len(images) for images in self.joined])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, index: int) -> NDArray[np.uint8]:
        k = int(np.searchsorted(self._ends, index, side="right"))
        return self.joined[k].read(index - int(self._ends[k]) + len(self.joined[k]))

    def digest(self) -> str:
        return hash_strings(images.digest() for images in self.joined)


@dataclass(frozen=True, eq=False)
class Dataset:
    """One domain of one data set at one severity. `labels`: int64 (n,); `class_mask`: sorted labels scored, or None."""

    name: str
    domain: str
    images: Images
    labels: NDArray[np.int64]
    class_names: tuple[str, ...]
    severity: int | None = None
    class_mask: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        if len(self.images) != len(self.labels) or not len(self.labels):
            raise DataError(
                f"{self.name}/{self.domain} has {len(self.images)} images and {len(self.labels)} labels; "
                "there must be one label for each image, and at least one"
            )
        low, high = int(self.labels.min()), int(self.labels.max())
        if low < 0 or high >= len(self.class_names):
            raise DataError(
                f"the labels of {self.name}/{self.domain} run from {low} to {high}; "
                f"they must lie in 0..{len(self.class_names) - 1}"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int) -> NDArray[np.uint8]:
        """Image `index`, uint8 (h, w, 3)."""
        return self.images.read(index)

    def pick(self, indices: NDArray[np.int64]) -> Self:
        """The images at `indices` (n,)."""
        return replace(self, images=PickedImages(self.images, indices), labels=self.labels[indices])

    def renumber(self, outputs: NDArray[np.int64], names: tuple[str, ...]) -> Dataset:
        """The data set with label i as `outputs[i]`, under the class names of a network."""
        kept = outputs if self.class_mask is None else outputs[self.class_mask]
        mask = np.sort(kept) if len(kept) < len(names) else None
        return replace(self, labels=outputs[self.labels], class_names=names, class_mask=mask)

    @cached_property
    def fingerprint(self) -> str:
        """A sha256 over the labels and the pixels (arrays) or the names and sizes (files)."""
        return hash_strings((self.images.digest(), hash_array(self.labels)))


def array_dataset(
    images: NDArray[np.uint8],
    labels: NDArray[np.int64],
    class_names: Sequence[str],
    *,
    name: str,
    domain: str,
    severity: int | None = None,
) -> Dataset:
    """A data set from arrays in memory: images uint8 (n, h, w, 3), labels (n,)."""
    pixels = check_pixels(images, f"{name}/{domain} is")
    return Dataset(name, domain, ArrayImages(pixels), labels.astype(np.int64), tuple(class_names), severity)


def python_dataset(content: Any, indices: NDArray[np.int64], *, name: str, domain: str) -> Dataset:
    """The images at `indices` of an object with `images`, `labels` and `class_names`."""
    labels = check_labels(np.asarray(content.labels), f"the labels of {name} are", count=len(content.images))
    names, chosen = tuple(str(label) for label in content.class_names), labels[indices]
    if isinstance(content.images, np.ndarray):
        return array_dataset(content.images[indices], chosen, names, name=name, domain=domain)
    return Dataset(name, domain, PythonImages(content.images, indices), chosen, names)


def spread(count: int, limit: int | None) -> NDArray[np.int64]:
    """`limit` of `count` indices, evenly spaced, or all of them."""
    if limit is None or limit >= count:
        return np.arange(count, dtype=np.int64)
    return np.arange(limit, dtype=np.int64) * count // limit


def join_datasets(datasets: Sequence[Dataset], *, domain: str) -> Dataset:
    """Several domains as one, in the order given."""
    first = datasets[0]
    for other in datasets[1:]:
        if other.class_names != first.class_names:
            raise DataError(
                f"{first.name}/{first.domain} and {other.name}/{other.domain} have different classes; "
                "only domains of one set of classes can be joined"
            )
    severities = {dataset.severity for dataset in datasets}
    return Dataset(
        name=first.name,
        domain=domain,
        images=JoinedImages(tuple(dataset.images for dataset in datasets)),
        labels=np.concatenate([dataset.labels for dataset in datasets]),
        class_names=first.class_names,
        severity=first.severity if len(severities) == 1 else None,
        class_mask=first.class_mask,
    )


def align_classes(
    dataset: Dataset, network: Sequence[str] | None, *, outputs: int | None = None, source: str
) -> tuple[Dataset, str]:
    """The data set with its labels numbered as the outputs of a network, and a warning or "".

    `network`: the class names of the network, `outputs`: their number, where it has no names; `source` is its name in
    messages. Where the data has a subset of the classes, `class_mask` has their outputs.
    """
    match = match_classes(dataset.class_names, network, outputs=outputs, data=dataset.name, source=source)
    bare_labels = are_numeric(dataset.class_names) and not isinstance(dataset.images, FileImages)
    if match.is_identity and (bare_labels or not match.is_subset):  # bare labels need not use every class
        return dataset, match.warning
    warning = match.warning
    if match.is_subset:
        part = f"{dataset.name} has {len(match.outputs)} of the {len(match.names)} classes of {source}"
        warning = f"{part}; {warning}" if warning else part
    return dataset.renumber(match.outputs, match.names), warning
