"""ETA: entropy minimization on reliable, non-redundant predictions; EATA: ETA with Fisher regularization towards the
source; RDumb: ETA with periodic resets.

Niu et al., "Efficient Test-Time Model Adaptation without Forgetting", ICML 2022; Press et al., "RDumb: A Simple
Approach that Questions Our Progress in Continual Test-Time Adaptation", NeurIPS 2023.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from trust_tta.errors import ConfigError
from trust_tta.methods.base import Learner, LearningOptions
from trust_tta.methods.losses import ENTROPIES, EntropyKind, mean_prediction
from trust_tta.methods.source_data import FisherOption, FisherWeights, required
from trust_tta.methods.state import Array, Spec
from trust_tta.methods.validation import check_classes
from trust_tta.ops.segmentation_logits import Logits, apply_in_chunks
from trust_tta.schema import Count, Rate

MOMENTUM = 0.9  # of the moving mean of the predictions

Margin = Annotated[float, Field(ge=0)]  # may be infinite


class EtaOptions(LearningOptions):
    """`margin`: of the entropy, as a fraction of ln(classes). `d_margin`: largest cosine to the mean prediction; None
    takes 0.4 for up to 10 classes, 0.2 for up to 100 and the paper's 0.05 above."""

    margin: Margin = 0.4
    d_margin: Margin | None = None
    weighting: bool = True
    entropy: EntropyKind = "softmax"

    @model_validator(mode="after")
    def _finite_weights(self) -> Self:
        if self.weighting and math.isinf(self.margin):
            raise ValueError("an infinite margin gives infinite weights; set weighting=False or a finite margin")
        return self


class Eta(Learner):
    """Entropy of the predictions below `margin` * ln(classes) that differ from the moving mean prediction.

    With `weighting`, a prediction of entropy H counts exp(margin - H). A batch without such a prediction changes
    nothing.
    """

    Options = EtaOptions
    options: EtaOptions
    chunked_loss = True
    mean_prediction: Tensor | None

    def state_spec(self) -> dict[str, Spec]:
        return {"mean_prediction": Array((None,), least=0, most=1 + 1e-3)}

    def select(self, logits: Logits) -> Tensor:
        """Mask (n, ...) of the predictions that are reliable and, once there is a mean prediction, not redundant."""
        reliable = ENTROPIES[self.options.entropy](logits) < self.margin(logits.shape[1])
        if self.mean_prediction is None:
            return reliable
        check_classes(self.mean_prediction, logits.shape[1])
        mean = self.mean_prediction

        def similarity(chunk: Tensor) -> Tensor:
            predictions = chunk.softmax(1).movedim(1, -1)
            return torch.cosine_similarity(mean.to(predictions), predictions, dim=-1)

        return reliable & (apply_in_chunks(similarity, logits).abs() < self.d_margin(logits.shape[1]))

    def update(self, images: Tensor, logits: Logits) -> None:
        """One step on the selected predictions, if any; then update the moving mean prediction (classes,)."""
        chosen = self.select(logits.detach())
        if not bool(chosen.any()) or not bool(self.step(self.selected_loss(logits, chosen))):
            return
        prediction = mean_prediction(logits.detach(), chosen)
        if self.mean_prediction is not None:
            prediction = MOMENTUM * self.mean_prediction.to(prediction) + (1 - MOMENTUM) * prediction
        self.mean_prediction = prediction

    def selected_loss(self, logits: Logits, chosen: Tensor) -> Tensor:
        """The mean entropy of the predictions `chosen` (n, ...), weighted by exp(margin - entropy)."""
        entropies = ENTROPIES[self.options.entropy](logits)[chosen]
        if not self.options.weighting:
            return entropies.mean()
        return (torch.exp(self.margin(logits.shape[1]) - entropies.detach()) * entropies).mean()

    def margin(self, classes: int) -> float:
        """Largest entropy of a reliable prediction, in nats."""
        return self.options.margin * math.log(classes)

    def d_margin(self, classes: int) -> float:
        """Largest cosine to the mean prediction; by default that of the published code for 10, 100, 1000 classes."""
        if self.options.d_margin is not None:
            return self.options.d_margin
        return 0.4 if classes <= 10 else 0.2 if classes <= 100 else 0.05


class OfficialOptions(EtaOptions):
    """With the rate and the optimizer of the authors."""

    lr: Rate = 2.5e-4
    optimizer: Literal["adam", "sgd"] = "sgd"


class EataOptions(OfficialOptions):
    """`fisher` weights of clean images are required: gather_fisher(model, clean_batches) gives them."""

    fisher: FisherOption = None
    fisher_alpha: Rate = 2000.0


class Eata(Eta):
    """ETA's loss + `fisher_alpha` * sum of F * (weight - source)^2; no step where no prediction counts."""

    Options = EataOptions
    options: EataOptions

    def adapted_names(self, model: nn.Module) -> list[str]:
        names = super().adapted_names(model)
        hint = ", or use 'eta', which is EATA without them"
        fisher = required(self.options.fisher, self.name, "fisher", hint=hint).values
        if {name: value.shape for name, value in fisher.items()} != {n: model.get_parameter(n).shape for n in names}:
            raise ConfigError(
                "the Fisher weights are those of other parameters; gather them on this network with "
                f"parameters={self.options.parameters!r}"
            )
        return names

    def selected_loss(self, logits: Logits, chosen: Tensor) -> Tensor:
        fisher = cast(FisherWeights, self.options.fisher).values
        now = torch.cat([tensor.reshape(-1) for tensor in self.weights.tensors])
        importance = torch.cat([fisher[name].reshape(-1) for name in self.adapted]).to(now)
        anchor = (importance * (now - self.weights.source_vector.to(now)).square()).sum()
        return super().selected_loss(logits, chosen) + self.options.fisher_alpha * anchor


class RdumbOptions(OfficialOptions):
    """`reset_every`: number of batches between two resets."""

    reset_every: Count = 1000


class Rdumb(Eta):
    """ETA that returns to the source after every `reset_every` batches, also those without an update."""

    Options = RdumbOptions
    options: RdumbOptions

    def adapt(self, images: Tensor) -> Logits:
        if self.counters.batches and self.counters.batches % self.options.reset_every == 0:
            self.weights.restore_source()  # but not the statistics of the norms
            self.reset_state()
            self.counters.recoveries += 1
        return super().adapt(images)
