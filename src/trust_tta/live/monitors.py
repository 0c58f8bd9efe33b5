"""Label-free statistics of a stream: sums over sliding windows of the last images. Nothing here decides."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trust_tta.errors import StateError
from trust_tta.methods.base import Method
from trust_tta.ops.segmentation_logits import CoarseLogits, Logits, resized_chunks
from trust_tta.schema import show

Values: TypeAlias = NDArray[np.float64]
Predictions: TypeAlias = NDArray[np.float32]

TINY = 1e-37  # a float32 whose logarithm is finite
INPUT_WINDOW = 32  # images over which input statistics are computed
LATEST_WINDOW = 16  # images that suffice to say that a drift is over
CLASS_WINDOW = 256  # images over which predictions and agreement are averaged
MAX_FEW_CLASSES = 0.5  # `trained_classes` below which images are of few classes
FEW_CLASSES_WINDOW = 64  # images that suffice to say that they are of few classes
MAX_ENTRIES = 4096  # batches of a window, in a snapshot
MAX_ROWS = 2**40  # images or pixels of a batch, in a snapshot
INPUTS = ("inputs", "latest", "drifted")  # windows of channel statistics (2, c)
DISTRIBUTIONS = ("served", "before")  # windows of probabilities (classes,)
MAX_PIXELS = 4096  # of a segmentation, which predicts each pixel


@dataclass(frozen=True)
class Reading:
    """Statistics of the last batches. None: unknown (no reference, or too few images so far).

    Of the last batch's predictions: mean `entropy` (nats) and `confidence`. Of the last images:
    `effective_classes`, exp of the entropy of the mean prediction, and `effective_classes_change`, its ratio to that of
    the window before; `input_distance`, symmetric KL divergence per channel of the input's statistics from the
    reference's; `class_shift`, total variation of the mean prediction from the reference's. Of the `probed` images,
    which the source network predicted too: `agreement`, weighted by the source's confidence; `probed_classes` and
    `source_classes`, effective numbers; `source_shift`, as `class_shift` but of the source's predictions.
    Of the last 64 of these, predicted by the source with the statistics of its training: `trained_classes`, the ratio
    of its effective number to that with the statistics of the batch; `trained_lead`, by how much it is surer so;
    `depth_ratio`, how much further the last norm's statistics are from the reference than a middle one's: above 1 where
    the classes changed, below where the images did. `weight_distance`: norm of what was learned over that of the
    source. `skipped`: updates that were not finite.
    """

    images: int
    entropy: float
    confidence: float
    effective_classes: float
    effective_classes_change: float
    input_distance: float | None = None
    class_shift: float | None = None
    probed: int = 0
    agreement: float | None = None
    probed_classes: float | None = None
    source_classes: float | None = None
    source_shift: float | None = None
    trained_classes: float | None = None
    trained_lead: float | None = None
    depth_ratio: float | None = None
    weight_distance: float = 0.0
    skipped: int = 0

    def as_dict(self) -> dict[str, float | int | None]:
        """Plain values for an event."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class StatisticsComparison:
    """The source's predictions (n, classes) with the BatchNorm statistics of training and with those of the batch.

    `depths`: channel statistics (2, c) of the inputs of a middle and of the last norm; none for networks of few norms.
    """

    trained: Predictions
    batch: Predictions
    depths: tuple[Values, ...]


@dataclass(frozen=True)
class NormReference:
    """Channel statistics (2, c) of clean images at a middle and at the last norm, and how far clean batches are off."""

    middle: Tensor
    last: Tensor
    units: tuple[float, float]

    def ratio(self, middle: Values, last: Values) -> float:
        """Distance of the last norm's input from the reference over that of the middle one, each in its unit."""
        return input_distance(last, self.last) / self.units[1] / max(self.of_middle(middle), TINY)

    def of_middle(self, middle: Values) -> float:
        """Distance of the middle norm's input from the reference, in units of clean batches."""
        return input_distance(middle, self.middle) / self.units[0]


class Window:
    """The sum of an array over the last batches that make up `size` images."""

    def __init__(self, size: int) -> None:
        self.size, self.images = size, 0
        self._entries: deque[tuple[int, Values]] = deque()
        self._mean: Values | None = None

    def add(self, images: int, total: Tensor | Values) -> None:
        """Add the sum over `images` more, and drop the batches that are no longer needed."""
        total = np.asarray(total, dtype=np.float64)
        if self._entries and self._entries[-1][1].shape != total.shape:
            self.clear()  # of another network, or of images of another size
        self._entries.append((images, total))
        self.images += images
        while self.images - self._entries[0][0] >= self.size:
            self.images -= self._entries.popleft()[0]
        self._mean = None

    @property
    def full(self) -> bool:
        return self.images >= self.size

    @property
    def batches(self) -> int:
        return len(self._entries)

    @property
    def mean(self) -> Values:
        """The mean per image; there must have been one."""
        if not self._entries:
            raise ValueError("the window is empty")
        if self._mean is None:  # computed anew: a running sum would differ in its last bits after a restart
            self._mean = reduce(np.add, [entry for _, entry in self._entries]) / self.images  # few and short ones
        return self._mean

    @property
    def last(self) -> Values:
        """The mean per image of the last batch."""
        images, total = self._entries[-1]
        return total / images

    def clear(self) -> None:
        self._entries.clear()
        self.images, self._mean = 0, None

    def replace(self, other: Window) -> None:
        """Copy the content of another window."""
        self.clear()
        for images, total in other._entries:
            self.add(images, total)

    def state(self) -> list[list[Any]]:
        return [[images, torch.from_numpy(total.copy())] for images, total in self._entries]

    def load(self, state: list[list[Any]]) -> None:
        self.clear()
        for images, total in state:
            self.add(images, total)

    @staticmethod
    def check_state(name: str, state: Any) -> None:
        """Refuse what `state` cannot have returned."""
        if not isinstance(state, list) or len(state) > MAX_ENTRIES:
            raise StateError(f"the snapshot's window '{name}' is not a list of at most {MAX_ENTRIES} batches")
        shapes = set()
        for entry in state:
            if not isinstance(entry, (list, tuple)) or len(entry) != 2:
                raise StateError(f"the snapshot's window '{name}' has an entry that is not a count and a sum")
            images, total = entry
            if type(images) is not int or not 1 <= images <= MAX_ROWS:
                raise StateError(f"the snapshot's window '{name}' has a count of {show(images)}")
            if not isinstance(total, Tensor) or total.dtype != torch.float64 or not bool(total.isfinite().all()):
                raise StateError(f"the snapshot's window '{name}' has a sum that is not a finite float64 tensor")
            shapes.add(tuple(total.shape))
            if name in DISTRIBUTIONS and not (bool((total >= 0).all()) and 0.9 < float(total.sum()) / images < 1.1):
                raise StateError(f"the snapshot's window '{name}' has a sum that is not one of distributions")
        if len(shapes) > 1 or (shapes and len(next(iter(shapes))) != (2 if name in INPUTS else 1)):
            raise StateError(f"the snapshot's window '{name}' has sums of shape {', '.join(map(str, sorted(shapes)))}")


class Monitors:
    """Sliding windows over the last images: a few vectors, which `state` returns and `load` restores."""

    def __init__(
        self,
        *,
        input_reference: Tensor | None = None,
        class_reference: Tensor | None = None,
        depths: NormReference | None = None,
    ) -> None:
        self.depths = depths
        self.input_reference = None if input_reference is None else input_reference.double().cpu().numpy()
        self.class_reference = None if class_reference is None else class_reference.double().cpu().numpy()
        self._inputs, self._served, self._before = Window(INPUT_WINDOW), Window(CLASS_WINDOW), Window(CLASS_WINDOW)
        self._probes, self._comparisons = Window(CLASS_WINDOW), Window(FEW_CLASSES_WINDOW)
        self._latest, self._drifted = Window(LATEST_WINDOW), Window(CLASS_WINDOW)
        self.returned = False  # whether the last images are like the reference again
        self._entropy = self._confidence = self._effective = 0.0
        self._changes: tuple[float, float | None] = (1.0, None)
        self._probe: dict[str, Any] = {}  # results of the last one

    def add_inputs(self, images: int, statistics: Values, *, drift_limit: float | None = None) -> None:
        """Take the statistics (2, c) of a batch; during a drift, with the limit of the input distance."""
        total = statistics * images
        self._inputs.add(images, total)
        self._latest.add(images, total)
        self.returned = drift_limit is not None and self._has_returned(drift_limit)
        if drift_limit is not None:
            self._drifted.add(images, total)

    def _has_returned(self, limit: float) -> bool:
        """Whether the last images are like the reference rather than the drift, or the drift has faded away."""
        reference = self._comparable_reference
        if reference is None or not self._latest.full or not self._drifted.images:
            return False
        if self._drifted.mean.shape != self._latest.mean.shape:
            return False
        distance = input_distance(self._latest.mean, reference)
        nearer = distance <= limit and 2 * distance < input_distance(self._latest.mean, self._drifted.mean)
        faded = self._drifted.full and input_distance(self._drifted.mean, reference) <= limit / 2
        return nearer or (faded and distance <= 2 * limit)

    def begin_drift(self) -> None:
        """Record that the last images are the first of a drift."""
        self._drifted.replace(self._inputs)

    @property
    def drifted_long(self) -> bool:
        """Whether the current drift is more than a batch that differed by chance."""
        return self._drifted.batches > 2 and self._drifted.images >= 2 * INPUT_WINDOW

    def end_drift(self) -> None:
        """Forget the drift, and everything before its end."""
        self.returned = False
        self._drifted.clear()
        self._inputs.replace(self._latest)

    def add_predictions(self, values: Predictions) -> None:
        """Take the served probabilities (rows, classes) of a batch."""
        rows = len(values)
        self._entropy = -float((values * np.log(np.maximum(values, TINY))).sum()) / rows
        self._confidence = float(values.max(1).mean())
        if self._served.full:
            self._before.add(rows, self._served.mean * rows)
        self._served.add(rows, values.sum(0, dtype=np.float64))
        self._effective = effective_classes(self._served.mean)
        before = effective_classes(self._before.mean) if self._before.full else self._effective
        shift = None
        if self.class_reference is not None and self._served.full:
            shift = total_variation(self._served.mean, self.class_reference)
        self._changes = self._effective / before, shift

    def add_probe(self, served: Tensor, source: Tensor, comparison: StatisticsComparison | None = None) -> None:
        """Take predictions (rows, classes) for the same images by the adapted network and by the source.

        `comparison`: what the source says of them with the statistics of its training.
        """
        ours, theirs = served.cpu().numpy(), source.cpu().numpy()
        weights, agree = theirs.max(1).astype(np.float64), ours.argmax(1) == theirs.argmax(1)
        sums = [ours.sum(0, dtype=np.float64), theirs.sum(0, dtype=np.float64)]
        self._probes.add(len(ours), np.concatenate([[weights.sum(), weights[agree].sum()], *sums]))
        if comparison is not None:
            self._comparisons.add(len(theirs), _sums(comparison))
        self._probe = self._read_probes()

    def suggests_few_classes(self) -> bool:
        """Whether the last comparison alone says that its images are of few classes."""
        if not self._comparisons.images:
            return False
        return bool(self._read_comparisons(self._comparisons.last)["trained_classes"] < MAX_FEW_CLASSES)

    @property
    def classes(self) -> int | None:
        """The number of classes, once the network has predicted."""
        return len(self._served.mean) if self._served.images else None

    def changes(self) -> tuple[float, float | None]:
        """`effective_classes_change` and `class_shift` of what is served."""
        return self._changes

    def forget_predictions(self) -> None:
        """Forget predictions, since the state is another one now; the images are still the same."""
        for window in (self._served, self._before, self._probes):
            window.clear()
        self._probe = {}

    def read(self, images: int, *, weight_distance: float, skipped: int) -> Reading:
        change, shift = self._changes
        return Reading(
            images=images,
            entropy=self._entropy,
            confidence=self._confidence,
            effective_classes=self._effective,
            effective_classes_change=change,
            input_distance=self.input_distance(),
            class_shift=shift,
            weight_distance=weight_distance,
            skipped=skipped,
            **self._probe,
        )

    def input_distance(self) -> float | None:
        """The distance of the last images from the reference; None without one, or with too few images so far."""
        reference = self._comparable_reference
        return input_distance(self._inputs.mean, reference) if reference is not None and self._inputs.full else None

    @property
    def knows_inputs(self) -> bool:
        """Whether a drift would be noticed."""
        return self._comparable_reference is not None

    @property
    def _comparable_reference(self) -> Values | None:
        """None if there is none, or if BatchNorm's statistics are of another layer than the first one reached."""
        reference = self.input_reference
        alike = reference is not None and self._inputs.images and self._inputs.mean.shape == reference.shape
        return reference if alike else None

    def _read_probes(self) -> dict[str, Any]:
        if self._probes.images == 0:
            return {}
        (weight, agreeing), rest = self._probes.mean[:2].tolist(), self._probes.mean[2:]
        served, source = np.split(rest, 2)
        shift = None
        if self.class_reference is not None and self._probes.full:
            shift = total_variation(source, self.class_reference)
        return {
            "probed": self._probes.images,
            "agreement": agreeing / weight,
            "probed_classes": effective_classes(served),
            "source_classes": effective_classes(source),
            "source_shift": shift,
        } | (self._read_comparisons(self._comparisons.mean) if self._comparisons.full else {})

    def _read_comparisons(self, sums: Values) -> dict[str, Any]:
        (confidence, before), rest = sums[:2].tolist(), sums[2:]
        size = len(self._probes.mean) // 2 - 1
        depths = rest[2 * size :]
        ratio = None
        if self.depths is not None and len(depths):
            middle = 2 * self.depths.middle.shape[1]
            ratio = self.depths.ratio(depths[:middle].reshape(2, -1), depths[middle:].reshape(2, -1))
        return {
            "trained_classes": effective_classes(rest[:size]) / effective_classes(rest[size : 2 * size]),
            "trained_lead": confidence - before,
            "depth_ratio": ratio,
        }

    def state(self) -> dict[str, Any]:
        return {name: window.state() for name, window in self._windows().items()}

    def check_state(self, state: Any) -> None:
        """Refuse what `state` cannot have returned; snapshots of earlier versions have fewer windows."""
        windows = self._windows()
        if not isinstance(state, Mapping) or not set(state) <= set(windows):
            raise StateError(f"the snapshot's monitors are not a dict of the windows {', '.join(windows)}")
        for name, window in state.items():
            Window.check_state(name, window)
        probes, comparisons = state.get("probes", []), state.get("opinions", [])
        for _, total in probes:
            fits = len(total) >= 4 and len(total) % 2 == 0 and bool((total >= 0).all())
            if not fits or not float(total[0]) > 0 or not all(float(half.sum()) > 0 for half in total[2:].chunk(2)):
                raise StateError("the snapshot's window 'probes' has a sum that is not one of probes")
        classes = len(probes[0][1]) // 2 - 1 if probes else 0
        for _, total in comparisons if probes else ():
            trained, batch = total[2 : 2 + classes], total[2 + classes : 2 + 2 * classes]
            if not float(trained.sum()) > 0 or not float(batch.sum()) > 0 or bool((total[: 2 + 2 * classes] < 0).any()):
                raise StateError("the snapshot's window 'opinions' does not fit its window 'probes'")

    def load(self, state: Mapping[str, Any]) -> None:
        for name, window in self._windows().items():
            window.load(state.get(name, []))  # snapshots of earlier versions have fewer
        self._probe = self._read_probes()

    def _windows(self) -> dict[str, Window]:
        return {
            "inputs": self._inputs,
            "latest": self._latest,
            "drifted": self._drifted,
            "served": self._served,
            "before": self._before,
            "probes": self._probes,
            "opinions": self._comparisons,
        }


def _sums(comparison: StatisticsComparison) -> Values:
    """Over the images: both confidences, both predictions, and the statistics."""
    both = comparison.trained, comparison.batch
    confidences, sums = [float(p.max(1).sum()) for p in both], [p.sum(0, dtype=np.float64) for p in both]
    return np.concatenate([confidences, *sums, *(len(both[0]) * d.ravel() for d in comparison.depths)])


def probability_rows(output: Logits, *, probabilities: bool = False) -> Tensor:
    """Predictions (rows, classes) in float32: a row for each image, or for some pixels of each map."""
    if isinstance(output, CoarseLogits) or output.dim() > 2:
        output = _some_pixels(output.detach())
    output = output.detach().float()
    return output if probabilities else output.softmax(1)


def _some_pixels(output: Logits) -> Tensor:
    """At most MAX_PIXELS of a batch of maps (n, classes, h, w), evenly spread."""
    n, _, height, width = output.shape
    count, found = n * height * width, list[Tensor]()
    chosen = torch.arange(0, count, -(-count // MAX_PIXELS))
    image, row, column = chosen // (height * width), chosen // width % height, chosen % width
    places = torch.empty_like(chosen)
    for rows, band in resized_chunks(output, (height, width)):
        inside = ((row >= rows.start) & (row < rows.stop)).nonzero()[:, 0]
        places[inside] = torch.arange(len(inside)) + sum(map(len, found))
        where = [index[inside].to(band.device) for index in (image, row - rows.start, column)]
        found.append(band[where[0], :, where[1], where[2]])
    return torch.cat(found)[places.to(found[0].device)]


def effective_classes(mean: Tensor | Values) -> float:
    """exp of the entropy of a mean prediction (classes,): n when n classes are predicted equally often."""
    shares = np.asarray(mean, dtype=np.float64)
    shares = shares / shares.sum()
    return math.exp(-float(shares @ np.log(np.maximum(shares, TINY))))


def total_variation(a: Tensor | Values, b: Tensor | Values) -> float:
    """Half the sum of differences of two distributions (classes,): the share of predictions that changed class."""
    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    return float(np.abs(first / first.sum() - second / second.sum()).sum() / 2)


def input_distance(a: Tensor | Values, b: Tensor | Values) -> float:
    """Symmetric KL divergence of two sets of normal channels, given as mean and mean square (2, c); mean over c."""
    return float(input_distances(np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)))


def input_distances(a: Values, b: Values) -> Values:
    """The same for many, (..., 2, c), against one, (2, c)."""
    mean_a, mean_b = a[..., 0, :], b[0]
    var_b = b[1] - mean_b * mean_b
    # The floor keeps images without any contrast from being infinitely far.
    floor = 1e-3 * max(float(var_b.mean()), 1e-12)
    var_a, var_b = np.maximum(a[..., 1, :] - mean_a * mean_a, floor), np.maximum(var_b, floor)
    gap = (mean_a - mean_b) ** 2
    distances: Values = ((var_a + gap) / var_b + (var_b + gap) / var_a).mean(-1) / 2 - 1
    return distances


def weight_distance(method: Method) -> float:
    """Norm of the difference from the source over the norm of the source, of all adapted weights."""
    if not method.adapted:
        return 0.0
    source = list(method.weights.source.values())
    learned = torch._foreach_sub([w.detach() for w in method.adapted.values()], source)
    norms = torch._foreach_norm([*learned, *source], dtype=torch.float32)  # few kernels for all of them
    distance, size = torch.stack(norms).view(2, -1).norm(dim=1).tolist()
    return float(distance / max(size, 1e-12))
