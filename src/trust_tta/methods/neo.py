"""NEO: features of the stream re-centered at zero before the classifier; no backward pass, no second forward.

Murphy et al., "NEO: No-Optimization Test-Time Adaptation through Latent Re-Centering", ICLR 2026.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trust_tta.errors import StateError
from trust_tta.methods.base import MethodOptions
from trust_tta.methods.features import FeatureMethod, classify, wide_dtype
from trust_tta.methods.state import Array, Number, Spec
from trust_tta.methods.statistics import StatisticsKind
from trust_tta.schema import Fraction


class NeoOptions(MethodOptions):
    """`alpha`: weight of a batch in the moving mean of features, which starts at zero; None: the mean of all images."""

    statistics: StatisticsKind = "source"
    alpha: Fraction | None = None


class Neo(FeatureMethod):
    """Features shifted to zero mean, around which the classifier was trained.

    The mean is over the stream, the present batch included.
    """

    name = "neo"
    Options = NeoOptions
    options: NeoOptions
    mean_features: Tensor | None

    def reset_state(self) -> None:
        super().reset_state()
        self.images = 0

    def state_spec(self) -> dict[str, Spec]:
        return {"mean_features": Array((None,)), "images": Number(int, least=0, most=2.0**53)}

    def classify(self, features: Tensor) -> Tensor:
        return classify(self.model, (features - self._mean(features)).to(features.dtype))

    def update(self, features: Tensor) -> None:
        self.images += len(features)
        weight = len(features) / self.images if self.options.alpha is None else self.options.alpha
        self.mean_features = (1 - weight) * self._mean(features) + weight * features.to(wide_dtype(features)).mean(0)

    def _mean(self, features: Tensor) -> Tensor:
        """The mean (d,) in at least float32: in half precision a small update would be lost."""
        kept = torch.zeros_like(features[0]) if self.mean_features is None else self.mean_features
        mean = kept.to(features.device, wide_dtype(features))
        if len(mean) != features.shape[1]:
            raise StateError(f"the state is of {len(mean)} features and there are {features.shape[1]}")
        return mean
