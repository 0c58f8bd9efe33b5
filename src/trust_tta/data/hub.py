"""Data sets of Hugging Face's `datasets` with a column of images and one of labels: "hf:NAME", or from Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trust_tta.data.dataset import Dataset, python_dataset
from trust_tta.errors import ConfigError, DataError, reason_of
from trust_tta.optional import require
from trust_tta.schema import did_you_mean, show


class Columns:
    """A `datasets.Dataset` as images, labels, class names and domains; images are decoded when they are asked for."""

    def __init__(self, rows: Any, *, image: str, label: str, domain: str | None = None) -> None:
        for column in (image, label, *([domain] if domain else [])):
            if column not in rows.column_names:
                raise ConfigError(f"the data have no column '{column}'; {did_you_mean(column, rows.column_names)}")
        self.images: Sequence[Any] = rows.select_columns([image]).with_format(None)[image]
        self.labels, self.class_names = _labels(rows, label)
        if domain:
            values, names = _column(rows, domain)
            self.domains = [str(value if names is None else names[value]) for value in values]


def dataset(name: str) -> Callable[..., Columns]:
    """A factory of the data set `name`: a folder written by `save_to_disk`, or a name on the Hugging Face hub."""

    def make(
        root: Path,
        *,
        split: str = "test",
        image: str = "image",
        label: str = "label",
        domain: str | None = None,
        subset: str | None = None,
        revision: str | None = None,
    ) -> Columns:
        rows = _load(name, root, split=split, subset=subset, revision=revision)
        return Columns(rows, image=image, label=label, domain=domain)

    return make


def from_datasets(
    rows: Any, *, image: str = "image", label: str = "label", name: str = "datasets", domain: str = "all"
) -> Dataset:
    """A `datasets.Dataset` as one domain of a data set of ours."""
    columns = Columns(rows, image=image, label=label)
    return python_dataset(columns, np.arange(len(columns.labels)), name=name, domain=domain)


def _load(name: str, root: Path, *, split: str, subset: str | None, revision: str | None) -> Any:
    library: Any = require("datasets", extra="hub")
    folders = [folder for folder in (Path(name), root / name) if folder.is_dir()]
    for folder in folders:
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            found = library.load_from_disk(str(folder))
            if not isinstance(found, dict):
                return found  # one split was saved
            if split not in found:
                raise ConfigError(f"'{name}' has no split '{split}'; {did_you_mean(split, list(found))}")
            return found[split]
    try:
        path = str(folders[0]) if folders else name
        return library.load_dataset(path, subset, split=split, revision=revision)
    except Exception as error:  # the library raises many types
        raise DataError(f"the data set 'hf:{name}' cannot be loaded: {reason_of(error)}") from error


def _labels(rows: Any, column: str) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Labels from 0 and the names of the classes: as the column states them, or the sorted values."""
    values, stated = _column(rows, column)
    if stated is not None:
        labels = np.asarray(values)
        if labels.dtype.kind != "i" or labels.min(initial=0) < 0:
            raise DataError(f"the column '{column}' holds rows without a label; choose another split")
        return labels.astype(np.int64), tuple(stated)
    if all(isinstance(value, int) for value in values):
        count = max(values, default=-1) + 1
        return np.asarray(values, np.int64), tuple(str(number) for number in range(count))
    if not all(isinstance(value, str) for value in values):
        raise DataError(f"the column '{column}' holds {show(values[0])}; give integers, names or class labels")
    names, labels = np.unique(values, return_inverse=True)
    return labels.astype(np.int64), tuple(names.tolist())


def _column(rows: Any, column: str) -> tuple[list[Any], list[str] | None]:
    """The values of a column, and the names that it states for them."""
    return rows.with_format(None)[column][:], getattr(rows.features[column], "names", None)
