"""The network as it is: with its running statistics, or with those of the batch."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from trust_tta.methods.base import Method, MethodOptions
from trust_tta.methods.statistics import StatisticsKind
from trust_tta.ops.segmentation_logits import Logits


class SourceOptions(MethodOptions):
    statistics: StatisticsKind = "source"


class Source(Method):
    """No adaptation: what the network was trained to do."""

    Options: ClassVar[type[MethodOptions]] = SourceOptions

    @property
    def fixed(self) -> bool:
        moves = self.adapted or self.moving() or self.options.statistics != "source"
        return not (moves or self.probabilities)  # these are not what `evaluate` gives

    def adapt(self, images: Tensor) -> Logits:
        with torch.no_grad():
            logits: Logits = self.predict.coarse(images)
        self.coarse_before = logits
        return logits


class BatchStatistics(Source):
    """Normalize with the statistics of the test batch; the paper's "source only". No weight changes."""

    name = "bn"
    Options = MethodOptions
