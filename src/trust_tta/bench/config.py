"""One experiment as a typed record."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from trust_tta.methods.registry import method_options
from trust_tta.preprocessing import Preprocessing
from trust_tta.results.codec import canonical_json
from trust_tta.results.display import make_label

SAMPLE, ARRAY = "sample", "array"  # data that is corrupted as it is read
CLEAN = "clean"
SOURCE_STATISTICS = "source_statistics"  # an option that nobody writes: clean images give it
DTYPES = ("float32", "bf16")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network. `checkpoint`: a file or a known name, in which {domain} stands for the domain being run."""

    checkpoint: str
    name: str | None = None  # of the variant; None: as the checkpoint says
    num_classes: int | None = None  # None: as the checkpoint or the data say
    overrides: Mapping[str, Any] = field(default_factory=dict)
    preprocessing: Preprocessing | None = None  # None: as the checkpoint says


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The images: a data set under `root`, the shipped "sample", or an "array" of files `images` and `labels`."""

    dataset: str
    root: str = "data"
    images: str | None = None
    labels: str | None = None
    domains: tuple[str, ...] | None = None  # None: all targets that are there
    severity: int = 5
    limit: int | None = None
    class_mask: bool = True  # score ImageNet-R among its 200 classes

    @property
    def corrupts(self) -> bool:
        """Whether the images are corrupted as they are read."""
        return self.dataset in (SAMPLE, ARRAY)


@dataclass(frozen=True, kw_only=True)
class StreamPlan:
    """In which order, and how many at a time, the images come; one stream for each batch size and seed."""

    setting: str = "online"
    batch_sizes: tuple[int, ...] = (128,)
    seeds: tuple[int, ...] = (0,)
    shuffle: bool = True
    drop_last: bool = False
    gamma: float = 0.1


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """A method with the options stated for it; `label` is its name wherever results are shown."""

    name: str
    label: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def all_options(self) -> dict[str, Any]:
        """Every option, defaults included, as values that JSON has."""
        values = {**method_options(self.name), **self.options}
        return _plain(values)

    @property
    def shown(self) -> str:
        """The label that was given, else the name with the options that differ from the method's defaults."""
        usual, stated = _plain(method_options(self.name)), _plain(self.options)
        return self.label or make_label(self.name, {n: v for n, v in stated.items() if v != usual[n]})


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that one experiment is."""

    experiment: str
    model: ModelConfig
    data: DataConfig
    stream: StreamPlan
    methods: tuple[MethodConfig, ...]
    device: str = "auto"
    dtype: str = "float32"
    store: str
    clean_after: bool = False  # measure the accuracy on clean images after each domain
    keep_samples: int = 0  # keep the predictions of so many images of each domain
    confusion: bool = False

    def to_json(self) -> str:
        """The configuration as it is recorded beside the results."""
        methods = [{**asdict(method), "options": _plain(method.options)} for method in self.methods]
        content = {**asdict(self), "methods": methods}
        if self.model.preprocessing is not None:
            content["model"]["preprocessing"] = self.model.preprocessing.model_dump()
        return canonical_json(content)


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as values that JSON has; it has no infinity."""

    def fits(value: object) -> bool:
        if isinstance(value, float):
            return math.isfinite(value)
        return value is None or isinstance(value, bool | int | str | list)

    return {name: value if fits(value) else str(value) for name, value in options.items()}
