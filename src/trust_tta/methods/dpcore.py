"""DPCore: a growing set of prompts, one for each domain, stored with the feature statistics of its images.

Zhang et al., "DPCore: Dynamic Prompt Coreset for Continual Test-Time Adaptation", ICML 2025. The method is for
vision transformers, whose prompts are tokens. On a VMamba a prompt is a bias for each channel, added to every position
of the first map. Pooled features replace those of the class token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from trust_tta.errors import StateError
from trust_tta.methods.base import Method, MethodOptions
from trust_tta.methods.prompts import take_prompts
from trust_tta.methods.source_data import StatisticsOption, required
from trust_tta.methods.state import Array, Spec
from trust_tta.methods.statistics import StatisticsKind
from trust_tta.methods.validation import check_outputs
from trust_tta.schema import Count, Fraction, Positive, Rate


class DpcoreOptions(MethodOptions):
    """`source_statistics` of clean images are required: gather_source_statistics(model, clean_batches) gives them.

    `prompts`: tokens of a prompt, drawn by `seed`, in vision transformers. `steps` for a known domain, `new_steps` for
    a new one. A domain is known if the mixture of stored prompts reduces the distance of the features to `rho` times
    or less; `tau`: temperature of the weights of the mixture; `alpha`: step size of the stored prompts.
    """

    statistics: StatisticsKind = "source"
    source_statistics: StatisticsOption = None
    prompts: Count = 8
    seed: Annotated[int, Field(ge=0)] = 0
    lr: Rate = 0.1
    weight_decay: Rate = 0.01
    steps: Count = 1
    new_steps: Count = 50
    rho: Rate = 0.8
    tau: Positive = 3.0
    alpha: Fraction = 0.999
    episodic: bool = False


class FeatureStats(NamedTuple):
    """A batch under one prompt: logits (n, classes), mean and deviation (d,) of its features."""

    logits: Tensor
    mean: Tensor
    std: Tensor


class Dpcore(Method):
    """A prompt that brings the features of the batch to those of clean images: a mixture of those known, or a new one.

    `coreset` (m, 2 d + p): mean and deviation of the features that a prompt was learned on, and the prompt. The weights
    of the network stay as they are.
    """

    Options = DpcoreOptions
    options: DpcoreOptions
    coreset: Tensor | None

    def adapted_names(self, model: nn.Module) -> list[str]:
        take_prompts(model)
        self.source = required(self.options.source_statistics, self.name, "source_statistics")
        return []

    def state_spec(self) -> dict[str, Spec]:
        return {"coreset": Array((None, None))}

    def adapt(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            x = take_prompts(self.model).embed(images)
            plain = self.forward_stats(x)
        self.prediction_before = plain.logits
        check_outputs(plain.logits, images)
        prompt, logits = self.adapt_known(x, plain) or self.adapt_new(x, plain, self.first_prompt(images, x))
        if self.options.predict == "before":
            return logits
        with torch.no_grad():
            return self.forward_stats(x, prompt).logits

    def adapt_known(self, x: Tensor, plain: FeatureStats) -> tuple[Tensor, Tensor] | None:
        """Fine-tune the mixture of stored prompts and update them by their weights; None for a new domain."""
        if self.coreset is None:
            return None
        weights, prompt = self.mix(self.coreset.to(x), plain)
        seen = self.forward_stats(x, prompt.requires_grad_())
        if not bool(self.distance(seen) < self.options.rho * self.distance(plain)):
            return None
        learned, logits = self.learn(x, prompt, seen, steps=self.options.steps)
        known, new = self.coreset.to(x), torch.cat([plain.mean, plain.std, learned])
        self.coreset = known + self.options.alpha * weights[:, None] * (new - known)
        return learned, logits

    def adapt_new(self, x: Tensor, plain: FeatureStats, prompt: Tensor) -> tuple[Tensor, Tensor]:
        """Learn a new prompt, and store it with the feature statistics of the batch."""
        prompt.requires_grad_()
        learned, logits = self.learn(x, prompt, self.forward_stats(x, prompt), steps=self.options.new_steps)
        new = torch.cat([plain.mean, plain.std, learned])[None]
        self.coreset = new if self.coreset is None else torch.cat([self.coreset.to(new), new])
        return learned, logits

    def learn(self, x: Tensor, prompt: Tensor, seen: FeatureStats, *, steps: int) -> tuple[Tensor, Tensor]:
        """Minimize the distance to clean images, from `prompt` with its outputs `seen`; also the last step's logits."""
        optimizer = torch.optim.AdamW([prompt], lr=self.options.lr, weight_decay=self.options.weight_decay)
        for step in range(steps):
            seen = self.forward_stats(x, prompt) if step else seen
            loss = self.distance(seen)
            (prompt.grad,) = torch.autograd.grad(loss, [prompt])
            self.counters.backwards += 1
            finite = bool((loss.detach() + prompt.grad.sum()).isfinite())
            self.counters.updates += finite
            self.counters.skipped += not finite
            if finite:
                optimizer.step()
        return prompt.detach(), seen.logits.detach()

    def forward_stats(self, x: Tensor, prompt: Tensor | None = None) -> FeatureStats:
        """Outputs of one counted pass over the embedded batch, with a prompt (c,) or (prompts * d,)."""
        self.counters.forwards += 1
        return self._forward_stats(x, prompt)

    def _forward_stats(self, x: Tensor, prompt: Tensor | None) -> FeatureStats:
        network = take_prompts(self.model)
        if prompt is None or network.as_bias:
            features = network.forward(x if prompt is None else x + prompt.view(1, -1, 1, 1)).features
        else:
            features = network.forward(x, prompt.view(-1, network.width(x))).features
        variance, mean = torch.var_mean(features, dim=0, correction=min(1, len(features) - 1))
        return FeatureStats(network.classify(features), mean, (variance + 1e-12).sqrt())  # zero has no slope

    def first_prompt(self, images: Tensor, x: Tensor) -> Tensor:
        """The initial prompt: no bias, or the same random tokens."""
        network = take_prompts(self.model)
        if network.as_bias:
            return x.new_zeros(network.width(x))
        spread, numbers = network.spread(images, x), self.options.prompts * network.width(x)
        return torch.from_numpy(np.random.default_rng(self.options.seed).uniform(-spread, spread, numbers)).to(x)

    def distance(self, seen: FeatureStats) -> Tensor:
        """Distance () of the batch's feature statistics to those of clean images."""
        source = self.source.like(seen.mean)
        return _distance(seen.mean - source.features, seen.std - source.features_std)

    def mix(self, coreset: Tensor, plain: FeatureStats) -> tuple[Tensor, Tensor]:
        """Weights (m,) of the known prompts, larger for nearer features, and the weighted sum of the prompts."""
        width = len(plain.mean)
        means, stds, prompts = coreset.tensor_split((width, 2 * width), dim=1)
        weights = (-_distance(means - plain.mean, stds - plain.std) / self.options.tau).softmax(0)
        return weights, weights @ prompts

    def infer(self, images: Tensor) -> Tensor:
        x = take_prompts(self.model).embed(images)
        plain = self._forward_stats(x, None)
        if self.coreset is None:
            return plain.logits
        return self._forward_stats(x, self.mix(self.coreset.to(x), plain)[1]).logits

    def check_state(self, state: Mapping[str, Any]) -> None:
        width, coreset = 2 * len(self.source.features), state["extra"].get("coreset")
        if coreset is not None and (coreset.shape[1] <= width or bool((coreset[:, width // 2 : width] < 0).any())):
            raise StateError(
                f"the state does not fit: extra.coreset has shape {tuple(coreset.shape)}; rows of {width // 2} means, "
                "as many deviations >= 0 and a prompt are wanted"
            )


def _distance(means: Tensor, stds: Tensor) -> Tensor:
    """Sum (...) of the norms of differences (..., d) of means and of standard deviations."""
    return torch.linalg.vector_norm(means, dim=-1) + torch.linalg.vector_norm(stds, dim=-1)
