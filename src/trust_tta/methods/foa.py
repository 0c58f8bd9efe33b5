"""FOA: learn input tokens by evolution, without a backward pass, and shift the features to the source's mean.

Niu et al., "Test-Time Model Adaptation with Only Forward Passes", ICML 2024. The method is of vision transformers;
this is it as the TRUST paper moved it to VMamba: the tokens are part of the first map, and the mean of all tokens
of a map stands for the class token, which a VMamba does not have.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from trust_tta.errors import ConfigError, ShapeError, StateError
from trust_tta.methods.base import Method
from trust_tta.methods.losses import entropy
from trust_tta.methods.modes import check_count, check_number
from trust_tta.methods.search import Search, Vector
from trust_tta.methods.tokens import (
    MappedNetwork,
    SourceStatistics,
    gather_source_statistics,
    mean_tokens,
    require_maps,
)
from trust_tta.optional import require

__all__ = ["Foa", "SourceStatistics", "gather_source_statistics"]

MOMENTUM = 0.9  # of the moving mean of the features


class Foa(Method):
    """A row of `prompts` learned tokens below the first map, chosen by CMA-ES; `population` + 1 forwards a batch.

    Fitness: summed entropy + `weight` * n/64 * squared distance of the batch's token statistics to those of clean
    images. These are required: foa.gather_source_statistics(model, clean_batches) gives `source_statistics`.
    The prediction is that of the best candidate, its features shifted by the source's mean less their moving mean.
    """

    name = "foa"

    def __init__(
        self,
        model: nn.Module,
        *,
        source_statistics: SourceStatistics | None = None,
        prompts: int = 3,
        population: int = 27,
        sigma: float = 1.0,
        weight: float = 0.4,
        seed: int = 0,
        episodic: bool = False,
        batch_statistics: bool = True,
    ) -> None:
        require_maps(model)
        require("cma", extra="foa")
        if source_statistics is None:
            raise ConfigError(
                "foa needs statistics of clean images; give source_statistics="
                "trust_tta.methods.foa.gather_source_statistics(model, clean_batches)"
            )
        check_count("prompts", prompts)
        check_count("population", population, least=4)
        check_number("weight", weight)
        check_number("sigma", sigma, least=1e-12)
        super().__init__(model, episodic=episodic, batch_statistics=batch_statistics)
        self.statistics = source_statistics
        self.prompts, self.population, self.sigma, self.weight, self.seed = prompts, population, sigma, weight, seed
        self.search: Search | None = None  # made on the first batch, which shows the width of a token
        self.mean_features: Tensor | None = None

    def adapt(self, images: Tensor) -> Tensor:
        network = cast(MappedNetwork, self.model)
        with torch.no_grad():
            first_map = network.embed(images)
            self.search = self.search or self.new_search(self.prompts * first_map.shape[1])
            candidates = self.search.ask()
            outcomes = [self.try_tokens(network, first_map, candidate) for candidate in candidates]
        self.counters.forwards += len(candidates)
        fitness, logits, features = (torch.stack(values) for values in zip(*outcomes, strict=True))
        self.logits_before = logits[-1]
        finite = fitness.isfinite()
        if not bool(finite.any()):
            self.load_extra_state(self.extra_state())  # the candidates must be drawn again
            self.counters.skipped += 1
            return logits[-1]
        worst = fitness[finite].max()
        fitness = fitness.where(finite, worst + worst.abs() + 1)
        self.search.tell(candidates, fitness)
        self.counters.updates += 1
        self.follow(features[finite].mean(0))
        return logits[fitness.argmin()]

    @torch.no_grad()
    def evaluate(self, images: Tensor) -> Tensor:
        if self.search is None:
            return super().evaluate(images)
        network = cast(MappedNetwork, self.model)
        return self.try_tokens(network, network.embed(images), self.search.best)[1]

    def try_tokens(self, network: MappedNetwork, first_map: Tensor, candidate: Vector) -> tuple[Tensor, Tensor, Tensor]:
        """Fitness, logits (n, classes) and mean features (d,) of the batch with one candidate's tokens."""
        maps = network.forward_maps(self.append_row(first_map, candidate))
        features, source = network.pool(maps[-1]), self.statistics.like(first_map)
        shift = 0 if self.mean_features is None else source.features - self.mean_features.to(features)
        logits = network.forward_head(features + shift)
        tokens = mean_tokens(maps)
        std, mean = torch.std_mean(tokens, dim=0, correction=min(1, len(tokens) - 1))
        distance = (mean - source.mean).square().sum() + (std - source.std).square().sum()
        return entropy(logits).sum() + self.weight * len(tokens) / 64 * distance, logits, features.mean(0)

    def append_row(self, first_map: Tensor, candidate: Vector) -> Tensor:
        """The map (n, c, h, w) with the tokens as one more row; each token fills an equal stretch of it."""
        n, channels, _, width = first_map.shape
        if self.prompts > width:
            raise ShapeError(
                f"{self.prompts} prompts do not fit in a row of {width} tokens; set prompts to {width} or less"
            )
        tokens = torch.from_numpy(candidate).to(first_map).view(self.prompts, channels)
        row = tokens[torch.arange(width, device=first_map.device) * self.prompts // width].T
        return torch.cat([first_map, row[None, :, None].expand(n, channels, 1, width)], dim=2)

    def new_search(self, dimension: int) -> Search:
        return Search(dimension, population=self.population, sigma=self.sigma, seed=self.seed)

    def follow(self, features: Tensor) -> None:
        """Move the mean features (d,) towards those of this batch."""
        if self.mean_features is not None:
            features = MOMENTUM * self.mean_features.to(features) + (1 - MOMENTUM) * features
        self.mean_features = features

    def settings(self) -> list[float]:
        return [self.prompts, self.population, self.sigma, self.seed]

    def extra_state(self) -> dict[str, Any]:
        if self.search is None or self.mean_features is None:
            return {}
        search = {"dimension": len(self.search.best), "told": self.search.told}
        return {"settings": self.settings(), "mean_features": self.mean_features, **search}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        self.search, self.mean_features = None, state.get("mean_features")
        if not state:
            return
        if state["settings"] != self.settings():
            raise StateError(
                "this state is of another search; create foa with the same prompts, population, sigma, seed"
            )
        self.search = self.new_search(state["dimension"])
        self.search.replay(state["told"])
