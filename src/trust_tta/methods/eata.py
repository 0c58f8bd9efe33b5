"""EATA: ETA, and an anchor that holds the weights that matter for clean images; RDumb: ETA that starts anew.

Niu et al., "Efficient Test-Time Model Adaptation without Forgetting", ICML 2022; Press et al., "RDumb: A Simple
Approach that Questions Our Progress in Continual Test-Time Adaptation", NeurIPS 2023.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, cast

import torch
from pydantic import PlainValidator
from torch import Tensor, nn

from trust_tta.errors import ConfigError
from trust_tta.methods.eta import Eta, EtaOptions
from trust_tta.methods.losses import pseudo_label_loss
from trust_tta.methods.parameters import ParameterSet, select, share
from trust_tta.methods.statistics import Statistics, StatisticsKind
from trust_tta.schema import Count, Rate, show


@dataclass(frozen=True)
class FisherWeights:
    """How much each adapted weight matters for clean images: squared gradients, by the weight's name."""

    values: dict[str, Tensor] = field(repr=False)


def gather_fisher(
    model: nn.Module,
    batches: Iterable[Tensor],
    *,
    parameters: ParameterSet = "bn",
    statistics: StatisticsKind = "batch",
) -> FisherWeights:
    """The mean over batches of clean images of the squared gradient of the cross-entropy to the network's own labels.

    The gradient is that of a batch, as in the official code; the model is left as it was.
    """
    names, count = select(model, parameters), 0
    with torch.inference_mode(False), torch.enable_grad():
        copy = share(model, names)
        norms = Statistics(copy, statistics)
        weights = [copy.get_parameter(name) for name in names]
        sums = [torch.zeros_like(weight, requires_grad=False) for weight in weights]
        for batch in batches:
            norms.begin(len(batch))
            gradients = torch.autograd.grad(pseudo_label_loss(copy(batch)), weights, allow_unused=True)
            for total, gradient in zip(sums, gradients, strict=True):
                total += 0 if gradient is None else gradient.square()
            count += 1
    if count == 0:
        raise ConfigError("no clean batches were given; the Fisher weights need at least one")
    return FisherWeights({name: total / count for name, total in zip(names, sums, strict=True)})


def _check_fisher(value: Any) -> Any:
    if value is not None and not isinstance(value, FisherWeights):
        raise ConfigError(f"it is {show(value)}; give what gather_fisher(model, clean_batches) returns")
    return value


class EataOptions(EtaOptions):
    """`fisher` weights of clean images are required: gather_fisher(model, clean_batches) gives them."""

    lr: Rate = 2.5e-4
    optimizer: Literal["adam", "sgd"] = "sgd"
    fisher: Annotated[FisherWeights | None, PlainValidator(_check_fisher)] = None
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
                "trust_tta.methods.eata.gather_fisher(model, clean_batches), or use 'eta', which is EATA without them"
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
