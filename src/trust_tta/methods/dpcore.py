"""DPCore: a growing set of prompts, one for each kind of shift that was met, each with the features it was learned on.

Zhang et al., "DPCore: Dynamic Prompt Coreset for Continual Test-Time Adaptation", ICML 2025. The method is of vision
transformers, whose prompts are tokens. A VMamba has no place for them: here a prompt is a bias for each channel, added
to every position of the first map, and the pooled features stand for those of the class token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from trust_tta.errors import StateError
from trust_tta.methods.base import Method, MethodOptions
from trust_tta.methods.clean import MappedNetwork, SourceStatistics, StatisticsOption, require_maps, required
from trust_tta.methods.safety import check_outputs
from trust_tta.methods.state import Array, Spec
from trust_tta.methods.statistics import StatisticsKind
from trust_tta.schema import Count, Fraction, Positive, Rate


class DpcoreOptions(MethodOptions):
    """`source_statistics` of clean images are required: gather_source_statistics(model, clean_batches) gives them.

    `steps` for a shift that is known, `new_steps` for a new one. A shift is known where the prompts at hand bring the
    features nearer than `rho` times their distance; `tau`: temperature of the weights of the prompts; `alpha`: how far
    they follow.
    """

    statistics: StatisticsKind = "source"
    source_statistics: StatisticsOption = None
    lr: Rate = 0.1
    weight_decay: Rate = 0.01
    steps: Count = 1
    new_steps: Count = 50
    rho: Rate = 0.8
    tau: Positive = 3.0
    alpha: Fraction = 0.999
    episodic: bool = False


class Seen(NamedTuple):
    """A batch under one prompt: logits (n, classes), mean and deviation (d,) of its features."""

    logits: Tensor
    mean: Tensor
    std: Tensor


class Dpcore(Method):
    """A prompt that brings the features of the batch to those of clean images: a mixture of those known, or a new one.

    `coreset` (m, 2 d + c): mean and deviation of the features that a prompt was learned on, and the prompt. The weights
    of the network stay as they are.
    """

    Options = DpcoreOptions
    options: DpcoreOptions
    coreset: Tensor | None

    def adapted_names(self, model: nn.Module) -> list[str]:
        require_maps(model)
        required(self.options.source_statistics, self.name, "source_statistics")
        return []

    def start(self) -> None:
        self.coreset = None

    def moving(self) -> dict[str, Spec]:
        return {"coreset": Array((None, None))}

    def adapt(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            first_map = cast(MappedNetwork, self.model).embed(images)
            plain = self.see(first_map, first_map.new_zeros(first_map.shape[1]))
        self.logits_before = plain.logits
        check_outputs(plain.logits, images)
        prompt, logits = self.adapt_known(first_map, plain) or self.adapt_new(first_map, plain)
        if self.options.predict == "before":
            return logits
        with torch.no_grad():
            return self.see(first_map, prompt).logits

    def adapt_known(self, first_map: Tensor, plain: Seen) -> tuple[Tensor, Tensor] | None:
        """Learn from the mixture of known prompts, where it suits the batch; they all follow by their weights."""
        if self.coreset is None:
            return None
        weights, prompt = self.mix(self.coreset.to(first_map), plain)
        seen = self.see(first_map, prompt.requires_grad_())
        if not bool(self.distance(seen) < self.options.rho * self.distance(plain)):
            return None
        learned, logits = self.learn(first_map, prompt, seen, steps=self.options.steps)
        known, new = self.coreset.to(first_map), torch.cat([plain.mean, plain.std, learned])
        self.coreset = known + self.options.alpha * weights[:, None] * (new - known)
        return learned, logits

    def adapt_new(self, first_map: Tensor, plain: Seen) -> tuple[Tensor, Tensor]:
        """Learn a prompt from nothing, and keep it with the features of the batch."""
        prompt = first_map.new_zeros(first_map.shape[1]).requires_grad_()
        learned, logits = self.learn(first_map, prompt, self.see(first_map, prompt), steps=self.options.new_steps)
        new = torch.cat([plain.mean, plain.std, learned])[None]
        self.coreset = new if self.coreset is None else torch.cat([self.coreset.to(new), new])
        return learned, logits

    def learn(self, first_map: Tensor, prompt: Tensor, seen: Seen, *, steps: int) -> tuple[Tensor, Tensor]:
        """Descend the distance to clean images from `prompt`, already `seen`; the last step's logits."""
        optimizer = torch.optim.AdamW([prompt], lr=self.options.lr, weight_decay=self.options.weight_decay)
        for step in range(steps):
            seen = self.see(first_map, prompt) if step else seen
            loss = self.distance(seen)
            (prompt.grad,) = torch.autograd.grad(loss, [prompt])
            self.counters.backwards += 1
            finite = bool((loss.detach() + prompt.grad.sum()).isfinite())
            self.counters.updates += finite
            self.counters.skipped += not finite
            if finite:
                optimizer.step()
        return prompt.detach(), seen.logits.detach()

    def see(self, first_map: Tensor, prompt: Tensor) -> Seen:
        """One counted pass from the first map (n, c, h, w) on, with a prompt (c,)."""
        self.counters.forwards += 1
        return self._see(first_map, prompt)

    def _see(self, first_map: Tensor, prompt: Tensor) -> Seen:
        network = cast(MappedNetwork, self.model)
        features = network.pool(network.forward_maps(first_map + prompt.view(1, -1, 1, 1))[-1])
        variance, mean = torch.var_mean(features, dim=0, correction=min(1, len(features) - 1))
        return Seen(network.forward_head(features), mean, (variance + 1e-12).sqrt())  # zero has no slope

    def distance(self, seen: Seen) -> Tensor:
        """Of the batch's features to those of clean images, ()."""
        source = self.source.like(seen.mean)
        return _apart(seen.mean - source.features, seen.std - source.features_std)

    def mix(self, coreset: Tensor, plain: Seen) -> tuple[Tensor, Tensor]:
        """Weights (m,) of the known prompts, more the nearer the features they were learned on, and their mixture."""
        width = len(plain.mean)
        means, stds, prompts = coreset.tensor_split((width, 2 * width), dim=1)
        weights = (-_apart(means - plain.mean, stds - plain.std) / self.options.tau).softmax(0)
        return weights, weights @ prompts

    def infer(self, images: Tensor) -> Tensor:
        first_map = cast(MappedNetwork, self.model).embed(images)
        plain = self._see(first_map, first_map.new_zeros(first_map.shape[1]))
        if self.coreset is None:
            return plain.logits
        return self._see(first_map, self.mix(self.coreset.to(first_map), plain)[1]).logits

    @property
    def source(self) -> SourceStatistics:
        return cast(SourceStatistics, self.options.source_statistics)

    def check_state(self, state: Mapping[str, Any]) -> None:
        width, coreset = 2 * len(self.source.features), state["extra"].get("coreset")
        if coreset is not None and (coreset.shape[1] <= width or bool((coreset[:, width // 2 : width] < 0).any())):
            raise StateError(
                f"the state does not fit: extra.coreset has shape {tuple(coreset.shape)}; rows of {width // 2} means, "
                "as many deviations >= 0 and a prompt are wanted"
            )


def _apart(means: Tensor, stds: Tensor) -> Tensor:
    """Lengths of differences (..., d), summed, (...)."""
    apart: Tensor = torch.linalg.vector_norm(means, dim=-1) + torch.linalg.vector_norm(stds, dim=-1)
    return apart
