"""What can be seen of a stream without labels: cheap sums over the last images.

Everything here measures; nothing decides. `Monitors` takes each batch once and returns a `Reading`.
"""

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

from trust_tta.methods.base import Method
from trust_tta.ops.segmentation_logits import Logits, Pixels, bands_at

# Sums are a few numbers each, on the host, where NumPy takes a third of PyTorch's time.
Values: TypeAlias = NDArray[np.float64]
Predictions: TypeAlias = NDArray[np.float32]

TINY = 1e-37  # a float32 whose logarithm is finite
INPUT_WINDOW = 32  # images over which input statistics are computed
LATEST_WINDOW = 16  # images that suffice to say that a drift is over
CLASS_WINDOW = 256  # images over which predictions and agreement are averaged
FEW = 0.5  # `trained_classes` below which images are of few classes
OPINION_WINDOW = 64  # images that suffice to say that they are of few classes
MOST_PIXELS = 4096  # of a segmentation, which predicts each pixel


@dataclass(frozen=True)
class Reading:
    """The stream as of its last batches. None: unknown (no reference, or too few images so far).

    Of the predictions since the last reading: their mean `entropy` (nats) and `confidence`. Of the last images:
    `effective_classes`, exp of the entropy of the mean prediction, and `effective_classes_change`, its ratio to that of
    the window before; `input_distance`, symmetric KL divergence per channel of the input's statistics from the
    reference's; `class_shift`, total variation of the mean prediction from the reference's. Of the `probed` images,
    which the source network saw too: `agreement`, weighted by the source's confidence; `probed_classes` and
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
class Opinion:
    """The source's predictions (n, classes) with the statistics of training and of the batch; inputs at two depths.

    These are statistics (2, c) at a middle and at the last norm; there are none for networks of few norms.
    """

    trained: Predictions
    batch: Predictions
    depths: tuple[Values, ...]


@dataclass(frozen=True)
class Depths:
    """The reference of an opinion's two depths, (2, c) each, and how far clean batches are from it."""

    middle: Tensor
    last: Tensor
    units: tuple[float, float]

    def ratio(self, middle: Values, last: Values) -> float:
        """How much further, in its unit, the last norm is from the reference than the middle one."""
        return input_distance(last, self.last) / self.units[1] / max(self.of_middle(middle), TINY)

    def of_middle(self, middle: Values) -> float:
        """How far the middle norm is from the reference, in its unit."""
        return input_distance(middle, self.middle) / self.units[0]


class Window:
    """The sum of an array over the last batches that make up `size` images."""

    def __init__(self, size: int) -> None:
        self.size, self.images = size, 0
        self._entries: deque[tuple[int, Values]] = deque()
        self._mean: Values | None = None

    def add(self, images: int, total: Tensor | Values) -> None:
        """Add the sum over `images` more, and drop the batches that are no longer needed."""
        self._entries.append((images, np.asarray(total, dtype=np.float64)))
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


class Monitors:
    """Sums over the last images: a few vectors, which `state` returns and `load` restores."""

    def __init__(
        self,
        *,
        input_reference: Tensor | None = None,
        class_reference: Tensor | None = None,
        depths: Depths | None = None,
    ) -> None:
        self.depths = depths
        self.input_reference = None if input_reference is None else input_reference.double().cpu().numpy()
        self.class_reference = None if class_reference is None else class_reference.double().cpu().numpy()
        self._channels = None if self.input_reference is None else _channels(self.input_reference)
        self._inputs, self._served, self._before = Window(INPUT_WINDOW), Window(CLASS_WINDOW), Window(CLASS_WINDOW)
        self._probes, self._opinions = Window(CLASS_WINDOW), Window(OPINION_WINDOW)
        self._latest, self._drifted = Window(LATEST_WINDOW), Window(CLASS_WINDOW)
        self.returned = False  # whether the last images are like the reference again
        self._entropy = self._confidence = self._effective = 0.0
        self._changes: tuple[float, float | None] = (1.0, None)
        self._distance: float | None = None  # of the inputs, once it is asked for
        self._probe: dict[str, Any] = {}  # results of the last one

    def see_inputs(self, images: int, statistics: Values, *, drift_limit: float | None = None) -> None:
        """Take the statistics (2, c) of a batch; during a drift, with the limit of the input distance."""
        total, self._distance = statistics * images, None
        self._inputs.add(images, total)
        self._latest.add(images, total)
        self.returned = drift_limit is not None and self._has_returned(drift_limit)
        if drift_limit is not None:
            self._drifted.add(images, total)

    def _has_returned(self, limit: float) -> bool:
        """Whether the last images are like the reference rather than the drift, or the drift has faded away."""
        if self._comparable_reference is None or not self._latest.full or not self._drifted.images:
            return False
        distance = self._distance_of(self._latest)
        if distance > 2 * limit:
            return False  # the usual case
        nearer = distance <= limit and 2 * distance < input_distance(self._latest.mean, self._drifted.mean)
        return nearer or (self._drifted.full and self._distance_of(self._drifted) <= limit / 2)

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
        self._distance = None

    def see_predictions(self, values: Predictions) -> None:
        """Take what was served, (rows, classes), in one batch or in several that are looked at together."""
        surprise, rows = np.log(np.maximum(values, TINY)), len(values)
        self._entropy = -float(np.vdot(values.T, surprise.T)) / rows  # as they lie in memory
        self._confidence = float(values.max(1).sum()) / rows
        if self._served.full:
            self._before.add(rows, self._served.mean * rows)
        self._served.add(rows, values.sum(0, dtype=np.float64))
        self._effective = effective_classes(self._served.mean)
        before = effective_classes(self._before.mean) if self._before.full else self._effective
        self._changes = self._effective / before, _shift(self._served, self.class_reference)

    def see_probe(self, served: Tensor, source: Tensor, opinion: Opinion | None = None) -> None:
        """Take predictions (rows, classes) for the same images by the adapted network and by the source.

        `opinion`: what the source says of them with the statistics of its training.
        """
        ours, theirs = served.cpu().numpy(), source.cpu().numpy()
        weights, agree = theirs.max(1).astype(np.float64), ours.argmax(1) == theirs.argmax(1)
        sums = [ours.sum(0, dtype=np.float64), theirs.sum(0, dtype=np.float64)]
        self._probes.add(len(ours), np.concatenate([[weights.sum(), weights[agree].sum()], *sums]))
        if opinion is not None:
            self._opinions.add(len(theirs), _sums(opinion))
        self._probe = self._read_probes()

    def opinions_differ(self) -> bool:
        """Whether the last opinion alone says that its images are of few classes."""
        return bool(self._opinions.images) and self._read_opinions(self._opinions.last)["trained_classes"] < FEW

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
        if self._distance is None and self._comparable_reference is not None and self._inputs.full:
            self._distance = self._distance_of(self._inputs)
        return self._distance

    def _distance_of(self, window: Window) -> float:
        """The distance of a window from the reference; there must be one."""
        if self._channels is None:
            raise ValueError("there is no reference")
        return float(_distances(window.mean, self._channels))

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
        } | (self._read_opinions(self._opinions.mean) if self._opinions.full else {})

    def _read_opinions(self, sums: Values) -> dict[str, Any]:
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

    def load(self, state: Mapping[str, Any]) -> None:
        for name, window in self._windows().items():
            window.load(state.get(name, []))  # snapshots of earlier versions have fewer
        self._distance = None
        self._probe = self._read_probes()

    def _windows(self) -> dict[str, Window]:
        return {
            "inputs": self._inputs,
            "latest": self._latest,
            "drifted": self._drifted,
            "served": self._served,
            "before": self._before,
            "probes": self._probes,
            "opinions": self._opinions,
        }


def _sums(opinion: Opinion) -> Values:
    """Over the images: both confidences, both predictions, and the statistics."""
    both = opinion.trained, opinion.batch
    confidences, sums = [float(p.max(1).sum()) for p in both], [p.sum(0, dtype=np.float64) for p in both]
    return np.concatenate([confidences, *sums, *(len(both[0]) * d.ravel() for d in opinion.depths)])


def rows_of(output: Logits, *, probabilities: bool = False) -> Tensor:
    """Predictions (rows, classes) in float32: a row for each image, or for some pixels of each map."""
    if isinstance(output, Pixels) or output.dim() > 2:
        output = _some_pixels(output.detach())
    output = output.detach().float()
    return output if probabilities else output.softmax(1)


def host_rows(output: Tensor, *, probabilities: bool = False) -> Predictions:
    """The same on the host, where NumPy takes less time than the device would for few of them."""
    if output.dim() > 2:
        return rows_of(output, probabilities=probabilities).cpu().numpy()
    values: Predictions = output.detach().cpu().float().numpy()
    if probabilities:
        return values
    shares: Predictions = np.ascontiguousarray(values.T)  # over rows NumPy reduces several times faster
    shares = np.exp(shares - shares.max(0))
    shares /= shares.sum(0)
    return shares.T


def _some_pixels(output: Logits) -> Tensor:
    """At most MOST_PIXELS of a batch of maps (n, classes, h, w), evenly spread."""
    n, _, height, width = output.shape
    count, found = n * height * width, list[Tensor]()
    chosen = torch.arange(0, count, -(-count // MOST_PIXELS))
    image, row, column = chosen // (height * width), chosen // width % height, chosen % width
    places = torch.empty_like(chosen)
    for rows, band in bands_at(output, (height, width)):
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
    return _distances(a, _channels(b))


def _channels(b: Values) -> tuple[Values, Values, float]:
    """Means and variances (c,) of channels, and the least variance that others are taken to have."""
    mean, square = b
    variance = square - mean * mean
    # The floor keeps images without any contrast from being infinitely far.
    floor = 1e-3 * max(float(variance.mean()), 1e-12)
    return mean, np.maximum(variance, floor), floor


def _distances(a: Values, b: tuple[Values, Values, float]) -> Values:
    mean_a, (mean_b, var_b, floor) = a[..., 0, :], b
    var_a = np.maximum(a[..., 1, :] - mean_a * mean_a, floor)
    gap = mean_a - mean_b
    gap *= gap
    distances: Values = ((var_a + gap) / var_b + (var_b + gap) / var_a).sum(-1) / (2 * len(mean_b)) - 1
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


def _shift(window: Window, reference: Values | None) -> float | None:
    return None if reference is None or not window.full else total_variation(window.mean, reference)
