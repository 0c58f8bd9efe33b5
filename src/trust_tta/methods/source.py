"""The network as it is: with its running statistics, or with those of the batch."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from trust_tta.methods.base import Method, MethodOptions
from trust_tta.methods.statistics import StatisticsKind
from trust_tta.ops.segmentation_logits import Logits


class SourceOptions(MethodOptions):
    statistics: StatisticsKind = "source"


class Source(Method):
    """No adaptation: the network as it was trained."""

    Options: ClassVar[type[MethodOptions]] = SourceOptions

    @property
    def stateless(self) -> bool:
        changes = self.adapted or self.state_spec() or self.options.statistics != "source"
        return not (changes or self.probabilities)  # these are not what `evaluate` gives

    def adapt(self, images: Tensor) -> Logits:
        self.prediction_before = self.predict(images)
        return self.prediction_before


class BatchStatistics(Source):
    """Normalize with the statistics of the test batch; the paper's "source only". No weight changes."""

    name = "bn"
    Options = MethodOptions
