"""Data: opening, checking, fetching, streaming and corrupting.

The public names are imported when they are first used, so that corrupting and checking never wait for PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trust_tta.data.check import check_root
    from trust_tta.data.classes import match_classes
    from trust_tta.data.corrupt_tree import corrupt_array, corrupt_folder
    from trust_tta.data.corruptions.apply import corrupt
    from trust_tta.data.dataset import Dataset, align_classes, array_dataset, join_datasets
    from trust_tta.data.embedded import load_sample
    from trust_tta.data.fetch import fetch_cifar10
    from trust_tta.data.images import read_image
    from trust_tta.data.reading import available_domains, open_dataset
    from trust_tta.data.streams import StreamConfig, stream_datasets

_MODULES = {
    "Dataset": "dataset",
    "StreamConfig": "streams",
    "align_classes": "dataset",
    "array_dataset": "dataset",
    "available_domains": "reading",
    "check_root": "check",
    "corrupt": "corruptions.apply",
    "corrupt_array": "corrupt_tree",
    "corrupt_folder": "corrupt_tree",
    "fetch_cifar10": "fetch",
    "join_datasets": "dataset",
    "load_sample": "embedded",
    "match_classes": "classes",
    "open_dataset": "reading",
    "read_image": "images",
    "stream_datasets": "streams",
}
__all__ = [
    "Dataset",
    "StreamConfig",
    "align_classes",
    "array_dataset",
    "available_domains",
    "check_root",
    "corrupt",
    "corrupt_array",
    "corrupt_folder",
    "fetch_cifar10",
    "join_datasets",
    "load_sample",
    "match_classes",
    "open_dataset",
    "read_image",
    "stream_datasets",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
