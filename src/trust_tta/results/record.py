"""One cell of a benchmark: its key, result and provenance."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from trust_tta.errors import ConfigError, DataError
from trust_tta.results.codec import canonical_json, encode

BINS = 15


@dataclass(frozen=True, kw_only=True)
class CellKey:
    """Everything that determines the numbers of a cell: one method on one domain with one seed."""

    experiment: str
    dataset: str
    domain: str
    severity: int | None = None
    method: str
    options: str = "{}"  # JSON object of the method's options, made canonical
    setting: str = "online"
    batch_size: int
    seed: int
    checkpoint: str  # sha256 of the weights, or a name we know
    fingerprint: str  # of the data
    limit: int | None = None  # maximum number of images; None: all

    def __post_init__(self) -> None:
        try:
            values = json.loads(self.options)
            if not isinstance(values, dict):
                raise ValueError("not an object")
            object.__setattr__(self, "options", canonical_json(values))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"options {self.options!r} are not a JSON object ({error}); give one such as '{{\"k\": 6}}'"
            ) from error
        if self.batch_size < 1:
            raise ConfigError(f"batch size {self.batch_size} is not positive; give 1 or more")
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit {self.limit} is not positive; give 1 or more, or None for all images")

    @property
    def digest(self) -> str:
        """The sha256 that identifies this cell."""
        return hashlib.sha256(canonical_json(encode(self)).encode("ascii")).hexdigest()

    @property
    def option_values(self) -> Mapping[str, Any]:
        values: dict[str, Any] = json.loads(self.options)
        return values


@dataclass(frozen=True, kw_only=True)
class History:
    """Values per batch along the stream; every tuple has one entry per batch."""

    samples: tuple[int, ...] = ()
    accuracy: tuple[float, ...] = ()  # after the update
    accuracy_before: tuple[float, ...] | None = None
    entropy: tuple[float, ...] = ()
    seconds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        columns = (self.accuracy, self.entropy, self.seconds, self.accuracy_before)
        lengths = {len(self.samples)} | {len(column) for column in columns if column is not None}
        if len(lengths) > 1:
            raise DataError(f"the columns of a history have lengths {sorted(lengths)}; give one entry per batch")


@dataclass(frozen=True, kw_only=True)
class Reliability:
    """Confidence and correctness in 15 bins; bin i holds confidences in (i/15, (i+1)/15]."""

    count: tuple[int, ...] = (0,) * BINS
    confidence: tuple[float, ...] = (0.0,) * BINS  # sum over the bin
    correct: tuple[int, ...] = (0,) * BINS

    def __post_init__(self) -> None:
        lengths = [len(self.count), len(self.confidence), len(self.correct)]
        if lengths != [BINS] * 3:
            raise DataError(f"reliability bins have lengths {lengths}; give {BINS} of each")

    @classmethod
    def total(cls, bins: Iterable[Reliability]) -> Reliability:
        every = list(bins)
        return cls(
            count=tuple(sum(each.count[i] for each in every) for i in range(BINS)),
            confidence=tuple(math.fsum(each.confidence[i] for each in every) for i in range(BINS)),
            correct=tuple(sum(each.correct[i] for each in every) for i in range(BINS)),
        )

    @property
    def ece(self) -> float:
        """Expected calibration error: the mean gap between confidence and accuracy; NaN without samples."""
        gaps = (abs(right - sure) for right, sure in zip(self.correct, self.confidence, strict=True))
        return math.fsum(gaps) / sum(self.count) if sum(self.count) else math.nan


@dataclass(frozen=True, kw_only=True)
class SamplePrediction:
    """Label of one image and the classes predicted before and after the update."""

    index: int  # in the data set
    label: int
    before: int | None
    after: int  # -1: the output held a NaN; also for `before`
    confidence: float  # in `after`
    confidence_before: float | None = None


@dataclass(frozen=True, kw_only=True)
class MaskSample:
    """True and predicted masks of one image, as PNGs in the class colors."""

    index: int  # in the data set
    truth: bytes
    before: bytes | None
    after: bytes


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """The result of a cell. Entropy and NLL in nats, Brier summed over classes (0 to 2), means over samples."""

    samples: int
    accuracy: float  # of the prediction after the update, 0 to 1
    accuracy_before: float | None  # of the prediction before the update on the same batch
    entropy: float
    nll: float
    ece: float
    brier: float
    broken: int = 0  # samples whose output held a NaN; they count as wrong
    forwards: int  # passes over a batch, summed over the batches
    backwards: int
    updates: int
    skipped_updates: int
    seconds_median: float  # per batch
    seconds_mean: float
    seconds_total: float
    peak_memory: int | None = None  # bytes
    clean_accuracy: float | None = None  # on clean images after the domain (forgetting)
    history: History = field(metadata={"stored": "course"})
    reliability: Reliability
    confusion: tuple[tuple[int, ...], ...] | None = None  # [label][prediction]
    predictions: tuple[SamplePrediction, ...] = ()
    # One bit per image in stream order, most significant first: 1 if correct after the update; empty if not kept.
    # Cells with the same fingerprint have the same images in the same order.
    correct: bytes = b""
    # Segmentation: correct, predicted and labeled pixels of each class. The accuracies are then mean IoU over
    # classes, and the other means are over labeled pixels.
    pixels: tuple[tuple[int, ...], ...] | None = None
    masks: tuple[MaskSample, ...] = ()
    # Where the data has some of the network's classes: accuracy of the choice among all outputs, not among those.
    accuracy_all_outputs: float | None = None

    @property
    def mean_dice(self) -> float | None:
        """Mean Dice score over classes; None for classification."""
        if self.pixels is None:
            return None
        dices = [2 * right / (predicted + labeled) for right, predicted, labeled in self.pixels if predicted + labeled]
        return math.fsum(dices) / len(dices) if dices else math.nan

    @property
    def pixel_accuracy(self) -> float | None:
        """Fraction of labeled pixels that are correct; None for classification."""
        if self.pixels is None:
            return None
        labeled = sum(row[2] for row in self.pixels)
        return sum(row[0] for row in self.pixels) / labeled if labeled else math.nan

    def __post_init__(self) -> None:
        if self.correct and len(self.correct) != -(-self.samples // 8):
            n = len(self.correct)
            raise DataError(f"`correct` has {n} bytes for {self.samples} images; give one bit per image")


_NO_NUMBERS = ("history", "reliability", "confusion", "predictions", "correct", "pixels", "masks")
VALUES = tuple(f.name for f in fields(CellResult) if f.name not in _NO_NUMBERS)  # columns of flat files and the page


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Software, hardware, configuration and times of a run; not part of the cell's identity."""

    STORED_KIND: ClassVar[str] = "Facts"

    trust_tta: str
    torch: str
    numpy: str
    triton: str | None
    python: str
    platform: str
    device: str
    dtype: str
    threads: int
    commit: str | None
    config: str
    started: str  # UTC, ISO 8601
    finished: str


@dataclass(frozen=True)
class Cell:
    """A finished cell; `label` is the name of its method in tables."""

    key: CellKey
    result: CellResult
    provenance: Provenance
    label: str = ""

    def __post_init__(self) -> None:
        if not self.label:
            object.__setattr__(self, "label", self.key.method)

    @property
    def batches(self) -> int:
        return len(self.result.history.samples) or max(1, -(-self.result.samples // self.key.batch_size))


def discordant(one: Cell, other: Cell) -> tuple[int, int] | None:
    """The numbers of images that only `one` and only `other` classified correctly, for McNemar's test.

    None if the cells have different images, or did not keep which were correct.
    """
    same = one.key.fingerprint == other.key.fingerprint and one.result.samples == other.result.samples
    if not same or not one.result.correct or not other.result.correct:
        return None
    first, second = (int.from_bytes(cell.result.correct, "big") for cell in (one, other))
    return (first & ~second).bit_count(), (second & ~first).bit_count()
