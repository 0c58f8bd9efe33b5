"""EATA: ETA, and an anchor that holds the weights that matter for clean images; RDumb: ETA that starts anew.

Niu et al., "Efficient Test-Time Model Adaptation without Forgetting", ICML 2022; Press et al., "RDumb: A Simple
Approach that Questions Our Progress in Continual Test-Time Adaptation", NeurIPS 2023.
"""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import Tensor, nn

from trust_tta.errors import ConfigError
from trust_tta.methods.clean import FisherOption, FisherWeights
from trust_tta.methods.eta import Eta, EtaOptions
from trust_tta.schema import Count, Rate


class EataOptions(EtaOptions):
    """`fisher` weights of clean images are required: gather_fisher(model, clean_batches) gives them."""

    lr: Rate = 2.5e-4
    optimizer: Literal["adam", "sgd"] = "sgd"
    fisher: FisherOption = None
    fisher_alpha: Rate = 2000.0


class Eata(Eta):
    """ETA's loss + `fisher_alpha` * sum of F * (weight - source)^2; no step where no prediction counts."""

    name = "eata"
    Options = EataOptions
    options: EataOptions

    def adapted_names(self, model: nn.Module) -> list[str]:
        names = super().adapted_names(model)
        if self.options.fisher is None:
            raise ConfigError(
                "eata needs the Fisher weights of clean images; give fisher="
                "trust_tta.methods.gather_fisher(model, clean_batches), or use 'eta', which is EATA without them"
            )
        shapes = {name: model.get_parameter(name).shape for name in names}
        if {name: value.shape for name, value in self.options.fisher.values.items()} != shapes:
            raise ConfigError(
                "the Fisher weights are those of other parameters; gather them on this network with "
                f"parameters={self.options.parameters!r}"
            )
        return names

    def loss(self, logits: Tensor, chosen: Tensor | None) -> Tensor:
        fisher = cast(FisherWeights, self.options.fisher).values
        now = torch.cat([tensor.reshape(-1) for tensor in self.weights.tensors])
        then = torch.cat([self.weights.source[name].reshape(-1) for name in self.adapted])
        matter = torch.cat([fisher[name].reshape(-1) for name in self.adapted]).to(now)
        anchor = (matter * (now - then).square()).sum()
        return super().loss(logits, chosen) + self.options.fisher_alpha * anchor


class RdumbOptions(EtaOptions):
    """`reset_every`: batches after which everything learned is forgotten."""

    lr: Rate = 2.5e-4
    optimizer: Literal["adam", "sgd"] = "sgd"
    reset_every: Count = 1000


class Rdumb(Eta):
    """ETA that returns to the source after every `reset_every` batches, also those without an update."""

    name = "rdumb"
    Options = RdumbOptions
    options: RdumbOptions

    def adapt(self, images: Tensor) -> Tensor:
        if self.counters.batches and self.counters.batches % self.options.reset_every == 0:
            self.weights.restore_source()  # what the norms have seen of the stream is still right
            self.start()
            self.counters.recoveries += 1
        return super().adapt(images)
