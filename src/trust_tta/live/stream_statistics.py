"""Statistics of a stream: of its images and predictions, sums over sliding windows, and distances."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trust_tta.errors import StateError
from trust_tta.live.snapshots import check_number
from trust_tta.methods.base import Method
from trust_tta.ops.segmentation_logits import CoarseLogits, Logits, resized_chunks

Values: TypeAlias = NDArray[np.float64]
ImageStats: TypeAlias = NDArray[np.float32]  # (3, n, channels): minimum, maximum and sum of each channel of each image
Mask: TypeAlias = NDArray[np.bool_]

MAX_MAGNITUDE = 1e6  # values beyond this ruin the statistics of a whole batch
MAX_BLANK_CONTRAST = 1e-3  # contrast of a blank image, relative to its largest value
TINY = 1e-37  # a float32 whose logarithm is finite
MAX_ENTRIES = 4096  # batches of a window, in a snapshot
MAX_ROWS = 2**40  # images or pixels of a batch, in a snapshot
MAX_PIXELS = 4096  # of a batch of segmentation maps


@dataclass(frozen=True)
class Reading:
    """State of the guard after a batch. None: unknown so far.

    Of the last batch's predictions: mean `entropy` (nats), `confidence`, and `effective_classes`, exp of the entropy of
    the mean prediction. Of the last `compared` images, which the source predicted too: `agreement`, the share of equal
    predictions, and `evidence` for harm (log of a ratio; negative: adaptation helps). `weight`: of the adapted network
    in what is served. `certainty` that adaptation harms, 1 - p of the test; `e_value`: its present value.
    `leading_since`: the batch since which the source has had more weight. `cost`: passes that the guard adds, over
    those of the method alone. `weight_distance`: norm of what was learned over that of the source. `skipped`:
    updates that were not finite.
    """

    images: int
    entropy: float
    confidence: float
    effective_classes: float
    compared: int = 0
    agreement: float | None = None
    evidence: float | None = None
    weight: float = 1.0
    certainty: float = 0.0
    e_value: float = 1.0
    leading_since: int | None = None
    cost: float = 0.0
    weight_distance: float = 0.0
    skipped: int = 0

    def as_dict(self) -> dict[str, float | int | None]:
        """The values that are known."""
        return {name: value for name, value in vars(self).items() if value is not None}


class Window:
    """The sum of an array over the last batches that make up `size` images."""

    def __init__(self, size: int) -> None:
        self.size, self.images = size, 0
        self.entries: deque[tuple[int, Values]] = deque()  # number of images and sum of every batch
        self._mean: Values | None = None

    def add(self, images: int, total: Tensor | Values) -> None:
        """Add the sum over `images` more, and drop the batches that are no longer needed."""
        total = np.asarray(total, dtype=np.float64)
        if self.entries and self.entries[-1][1].shape != total.shape:
            self.clear()  # of another network, or of images of another size
        self.entries.append((images, total))
        self.images += images
        while self.images - self.entries[0][0] >= self.size:
            self.images -= self.entries.popleft()[0]
        self._mean = None

    @property
    def mean(self) -> Values:
        """The mean per image; there must have been one."""
        if self._mean is None:  # computed anew: a running sum would differ in its last bits after a restart
            self._mean = reduce(np.add, [entry for _, entry in self.entries]) / self.images  # few and short ones
        return self._mean

    def clear(self) -> None:
        self.entries.clear()
        self.images, self._mean = 0, None

    def state(self) -> list[list[Any]]:
        return [[images, torch.from_numpy(total.copy())] for images, total in self.entries]

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
            check_number(images, f"window '{name}'", int, low=1, high=MAX_ROWS)
            if not isinstance(total, Tensor) or total.dtype != torch.float64 or not bool(total.isfinite().all()):
                raise StateError(f"the snapshot's window '{name}' has a sum that is not a finite float64 tensor")
            shapes.add(tuple(total.shape))
        if len(shapes) > 1:
            raise StateError(f"the snapshot's window '{name}' has sums of shape {', '.join(map(str, sorted(shapes)))}")


def image_stats(images: Tensor) -> ImageStats:
    """Minimum, maximum and sum of each channel of images (n, c, h, w), in one transfer from the device."""
    pixels = images.detach().float().flatten(2)
    stats = pixels.new_empty(3, *pixels.shape[:2])
    lowest, highest, sums = stats.unbind()
    torch.aminmax(pixels, dim=2, out=(lowest, highest))
    torch.sum(pixels, 2, out=sums)
    return stats.cpu().numpy()


def find_broken(stats: ImageStats) -> tuple[Mask, Mask, bool]:
    """Masks (n,) of images not finite or beyond MAX_MAGNITUDE, and of blank ones; and whether most are repeated.

    Repeated images, as of a frozen camera, have equal sums.
    """
    magnitude = np.abs(stats[:2]).max((0, 2))
    ruined = ~(magnitude <= MAX_MAGNITUDE)  # NaN compares as false
    lowest, highest, _ = np.where(ruined[:, None], 0, stats)
    blank = ~ruined & ((highest - lowest).max(1) <= MAX_BLANK_CONTRAST * np.maximum(magnitude, 1e-6))
    sums = [] if ruined.any() else stats[2].sum(1).tolist()
    return ruined, blank, len(sums) > 2 and 2 * len(set(sums)) < len(sums)


def probability_rows(output: Logits, *, probabilities: bool = False) -> Tensor:
    """Predictions (rows, classes) in float32: a row for each image, or for some pixels of each map, evenly spread."""
    output = output.detach()
    if isinstance(output, CoarseLogits) or output.dim() > 2:
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
        output = torch.cat(found)[places.to(found[0].device)]
    output = output.float()
    return output if probabilities else output.softmax(1)


def effective_classes(mean: Tensor | Values) -> float:
    """exp of the entropy of a mean prediction (classes,): n when n classes are predicted equally often."""
    shares = np.asarray(mean, dtype=np.float64)
    shares = shares / shares.sum()
    return math.exp(-float(shares @ np.log(np.maximum(shares, TINY))))


def input_distance(a: Tensor | Values, b: Tensor | Values) -> float:
    """Symmetric KL divergence of Gaussian channels, given by mean and mean square (2, c); averaged over channels."""
    (mean_a, square_a), (mean_b, square_b) = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    var_b = square_b - mean_b * mean_b
    # The floor keeps images without any contrast from being infinitely far.
    floor = 1e-3 * max(float(var_b.mean()), 1e-12)
    var_a, var_b = np.maximum(square_a - mean_a * mean_a, floor), np.maximum(var_b, floor)
    gap = (mean_a - mean_b) ** 2
    return float(((var_a + gap) / var_b + (var_b + gap) / var_a).mean() / 2 - 1)


def weight_distance(method: Method) -> float:
    """Norm of the difference from the source over the norm of the source, of all adapted weights."""
    if not method.adapted:
        return 0.0
    source = list(method.weights.source.values())
    learned = torch._foreach_sub([w.detach() for w in method.adapted.values()], source)
    norms = torch._foreach_norm([*learned, *source], dtype=torch.float32)  # few kernels for all of them
    distance, size = torch.stack(norms).view(2, -1).norm(dim=1).tolist()
    return float(distance / max(size, 1e-12))
