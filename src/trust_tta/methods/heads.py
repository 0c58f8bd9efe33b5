"""NEO and T3A: only the classifier adapts, by arithmetic on the pooled features; no backward pass, no second forward.

NEO: Murphy et al., "NEO: No-Optimization Test-Time Adaptation through Latent Re-Centering", ICLR 2026. T3A: Iwasawa and
Matsuo, "Test-Time Classifier Adjustment Module for Model-Agnostic Domain Generalization", NeurIPS 2021.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trust_tta.errors import StateError
from trust_tta.methods.base import Method, MethodOptions
from trust_tta.methods.features import (
    class_rows,
    classify,
    features_and_logits,
    linear_heads,
    pools_in_head,
    require_features,
)
from trust_tta.methods.losses import entropy
from trust_tta.methods.state import Array, Number, Spec
from trust_tta.methods.statistics import StatisticsKind
from trust_tta.methods.validation import all_finite, check_outputs
from trust_tta.schema import Fraction, Natural


class HeadMethod(Method):
    """A method over the features of a network: subclasses give `classify`, and `follow`, which moves what they keep."""

    def adapted_names(self, model: nn.Module) -> list[str]:
        require_features(model, self.name)
        if pools_in_head(model):
            linear_heads(model, by=self.name)
        return []

    def adapt(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            self.counters.forwards += 1
            features = self.features(images)
            check_outputs(all_finite(self.head(features)), images)  # prototypes would hide it
            before = self.prediction_before = self.classify(features)
            self.follow(features)
            return before if self.options.predict == "before" else self.classify(features)

    def infer(self, images: Tensor) -> Tensor:
        return self.classify(self.features(images))

    def features(self, images: Tensor) -> Tensor:
        """Pooled, (n, d)."""
        return features_and_logits(self.model, images)[0]

    def head(self, features: Tensor) -> Tensor:
        """What the trained classifier says of features (n, d)."""
        return classify(self.model, features)

    def classify(self, features: Tensor) -> Tensor:
        """Logits (n, classes) of features (n, d), with what is kept now."""
        raise NotImplementedError

    def follow(self, features: Tensor) -> None:
        """Move what is kept by the features (n, d) of a batch."""
        raise NotImplementedError


class NeoOptions(MethodOptions):
    """`alpha`: the share of a batch in the mean of the features, which starts at zero; None: the mean of all images."""

    statistics: StatisticsKind = "source"
    alpha: Fraction | None = None


class Neo(HeadMethod):
    """The features of the stream are moved so that their mean is zero, the center that the classifier was trained
    around; the present batch counts in the mean."""

    name = "neo"
    Options = NeoOptions
    options: NeoOptions
    mean_features: Tensor | None

    def reset_state(self) -> None:
        self.mean_features = None
        self.images = 0

    def state_spec(self) -> dict[str, Spec]:
        return {"mean_features": Array((None,)), "images": Number(int, least=0, most=2.0**53)}

    def classify(self, features: Tensor) -> Tensor:
        return self.head((features - self._mean(features)).to(features.dtype))

    def follow(self, features: Tensor) -> None:
        self.images += len(features)
        share = len(features) / self.images if self.options.alpha is None else self.options.alpha
        self.mean_features = (1 - share) * self._mean(features) + share * features.to(_wide(features)).mean(0)

    def _mean(self, features: Tensor) -> Tensor:
        """(d,), in at least float32: in half precision a small share would be lost."""
        kept = torch.zeros_like(features[0]) if self.mean_features is None else self.mean_features
        mean = kept.to(features.device, _wide(features))
        if len(mean) != features.shape[1]:
            raise StateError(f"the state is of {len(mean)} features and there are {features.shape[1]}")
        return mean


class T3aOptions(MethodOptions):
    """`supports`: for each class, the surest features that are kept; 0 keeps all."""

    statistics: StatisticsKind = "source"
    supports: Natural = 20


class T3a(HeadMethod):
    """Each class is a prototype: the sum of the normalized features that were taken for it, with the row of the
    classifier as the first; `supports` of the least entropy are kept."""

    Options = T3aOptions
    options: T3aOptions
    kept: Tensor | None
    labels: Tensor | None
    entropies: Tensor | None

    def adapted_names(self, model: nn.Module) -> list[str]:
        super().adapted_names(model)
        linear_heads(model, by=self.name)
        return []

    def reset_state(self) -> None:
        self.kept = self.labels = self.entropies = None

    def state_spec(self) -> dict[str, Spec]:
        return {
            "kept": Array((None, None)),
            "labels": Array((None,), torch.int64, least=0),
            "entropies": Array((None,), least=-1e-3),
        }

    def classify(self, features: Tensor) -> Tensor:
        kept, labels, _ = self._supports(features)
        normal = F.normalize(kept, dim=1)  # under autocast on a GPU in float32
        prototypes = normal.new_zeros(len(self._rows()), features.shape[1]).index_add_(0, labels, normal)
        return features @ F.normalize(prototypes, dim=1).T

    def follow(self, features: Tensor) -> None:
        old = self._supports(features)
        new = self._judged(features)
        self.kept, self.labels, self.entropies = self._surest(*(torch.cat(pair) for pair in zip(old, new, strict=True)))

    def _judged(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Features (n, d), the classes that the trained classifier takes them for, and how sure it is."""
        logits = self.head(features)
        return features, logits.argmax(1), entropy(logits.to(_wide(logits)))

    def _supports(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What is kept, or, at the beginning, the rows of the classifier."""
        if self.kept is None or self.labels is None or self.entropies is None:
            return self._surest(*self._judged(self._rows().to(features)))
        entropies = self.entropies.to(features.device, _wide(features))
        return self.kept.to(features), self.labels.to(features.device), entropies

    def _surest(self, kept: Tensor, labels: Tensor, entropies: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The first `supports` of each class by entropy, in the order in which they came."""
        if self.options.supports:
            order = entropies.argsort(stable=True)
            same = labels[order, None] == labels[order]
            rank = same.tril(-1).sum(1)  # how many of its class are surer
            chosen = order[rank < self.options.supports].sort().values
            kept, labels, entropies = kept[chosen], labels[chosen], entropies[chosen]
        return kept, labels, entropies

    def _rows(self) -> Tensor:
        """The weights (classes, d) of the classifier."""
        return class_rows(self.model)

    def check_state(self, state: Mapping[str, Any]) -> None:
        extra, (classes, width) = state["extra"], self._rows().shape
        sizes = {len(extra.get(name, ())) for name in ("kept", "labels", "entropies")}
        if len(sizes) > 1 or (extra and (extra["kept"].shape[1] != width or bool((extra["labels"] >= classes).any()))):
            raise StateError(
                f"the state does not fit: its supports are of another network; {classes} classes of {width} features "
                "are wanted"
            )


def _wide(values: Tensor) -> torch.dtype:
    """At least float32."""
    return torch.promote_types(values.dtype, torch.float32)
