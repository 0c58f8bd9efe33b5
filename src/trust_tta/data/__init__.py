"""Data: opening, checking, fetching, streaming and corrupting.

The public names are imported when they are first used, so that corrupting and checking never wait for PyTorch.
"""

from trust_tta.optional import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(  # typed in __init__.pyi
    __name__,
    {
        "check_root": "trust_tta.data.check",
        "match_classes": "trust_tta.data.class_matching",
        "imagenet_classes": "trust_tta.data.class_names",
        "corrupt_array": "trust_tta.data.corrupt_dataset",
        "corrupt_folder": "trust_tta.data.corrupt_dataset",
        "corrupt": "trust_tta.data.corruptions.apply",
        "Dataset": "trust_tta.data.dataset",
        "align_classes": "trust_tta.data.dataset",
        "array_dataset": "trust_tta.data.dataset",
        "join_datasets": "trust_tta.data.dataset",
        "load_sample": "trust_tta.data.sample",
        "fetch_cifar10": "trust_tta.data.fetch",
        "read_image": "trust_tta.data.images",
        "available_domains": "trust_tta.data.loading",
        "open_dataset": "trust_tta.data.loading",
        "StreamConfig": "trust_tta.data.streams",
        "stream_datasets": "trust_tta.data.streams",
    },
)
