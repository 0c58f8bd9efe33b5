"""T3A: class prototypes of confident features in place of the classifier; no backward pass, no second forward.

Iwasawa and Matsuo, "Test-Time Classifier Adjustment Module for Model-Agnostic Domain Generalization", NeurIPS 2021.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trust_tta.errors import StateError
from trust_tta.methods.base import MethodOptions
from trust_tta.methods.features import FeatureMethod, class_rows, classify, linear_heads, wide_dtype
from trust_tta.methods.losses import entropy
from trust_tta.methods.state import Array, Spec
from trust_tta.methods.statistics import StatisticsKind
from trust_tta.schema import Natural


class T3aOptions(MethodOptions):
    """`supports`: features kept for each class, those of the lowest entropy; 0 keeps all."""

    statistics: StatisticsKind = "source"
    supports: Natural = 20


class T3a(FeatureMethod):
    """Each class is a prototype: the sum of the normalized features that were predicted as it, starting with its row of
    the classifier; `supports` of the lowest entropy are kept."""

    Options = T3aOptions
    options: T3aOptions
    kept: Tensor | None
    labels: Tensor | None
    entropies: Tensor | None

    def adapted_names(self, model: nn.Module) -> list[str]:
        linear_heads(model, by=self.name)
        return super().adapted_names(model)

    def state_spec(self) -> dict[str, Spec]:
        return {
            "kept": Array((None, None)),
            "labels": Array((None,), torch.int64, least=0),
            "entropies": Array((None,), least=-1e-3),
        }

    def classify(self, features: Tensor) -> Tensor:
        kept, labels, _ = self._supports(features)
        normal = F.normalize(kept, dim=1)  # under autocast on a GPU in float32
        prototypes = normal.new_zeros(len(class_rows(self.model)), features.shape[1]).index_add_(0, labels, normal)
        return features @ F.normalize(prototypes, dim=1).T

    def update(self, features: Tensor) -> None:
        old = self._supports(features)
        new = self._labeled(features)
        self.kept, self.labels, self.entropies = self._lowest_entropy(
            *(torch.cat(pair) for pair in zip(old, new, strict=True))
        )

    def _labeled(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Features (n, d) with the trained classifier's predictions (n,) and their entropies (n,)."""
        logits = classify(self.model, features)
        return features, logits.argmax(1), entropy(logits.to(wide_dtype(logits)))

    def _supports(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The kept features, labels and entropies; at first, the rows of the classifier."""
        if self.kept is None or self.labels is None or self.entropies is None:
            return self._lowest_entropy(*self._labeled(class_rows(self.model).to(features)))
        entropies = self.entropies.to(features.device, wide_dtype(features))
        return self.kept.to(features), self.labels.to(features.device), entropies

    def _lowest_entropy(self, kept: Tensor, labels: Tensor, entropies: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The `supports` features of each class with the lowest entropy, in their order of arrival."""
        if self.options.supports:
            order = entropies.argsort(stable=True)
            same = labels[order, None] == labels[order]
            rank = same.tril(-1).sum(1)  # number of its class with lower entropy
            chosen = order[rank < self.options.supports].sort().values
            kept, labels, entropies = kept[chosen], labels[chosen], entropies[chosen]
        return kept, labels, entropies

    def check_state(self, state: Mapping[str, Any]) -> None:
        extra, (classes, width) = state["extra"], class_rows(self.model).shape
        sizes = {len(extra.get(name, ())) for name in ("kept", "labels", "entropies")}
        if len(sizes) > 1 or (extra and (extra["kept"].shape[1] != width or bool((extra["labels"] >= classes).any()))):
            raise StateError(
                f"the state does not fit: its supports are of another network; {classes} classes of {width} features "
                "are wanted"
            )
