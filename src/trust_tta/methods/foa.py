"""FOA: input tokens learned by CMA-ES, without a backward pass, and features shifted to the source's mean.

Niu et al., "Test-Time Model Adaptation with Only Forward Passes", ICML 2024. The method is for vision transformers, as
those of timm. On a VMamba it follows the TRUST paper: the tokens are part of the first map, and the mean token of a map
replaces the class token.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from trust_tta.methods.base import Method, MethodOptions
from trust_tta.methods.losses import entropy
from trust_tta.methods.prompts import ImagePrompts, take_prompts
from trust_tta.methods.source_data import StatisticsOption, required
from trust_tta.methods.state import Array, Number, Spec
from trust_tta.ops.segmentation_logits import Logits
from trust_tta.optional import require
from trust_tta.schema import Count, Rate

Vector = NDArray[np.float64]
MOMENTUM = 0.9  # of the moving mean of the features


class FoaOptions(MethodOptions):
    """`source_statistics` of clean images are required: gather_source_statistics(model, clean_batches) gives them.

    `prompts`: learned tokens, after the class token or as a row below the first map. `population`: candidates per
    batch. `sigma`: first step size of the search. `weight` of the distance to the source's statistics. `fitness`:
    whether the entropy in it is of the prediction before the features are shifted. `initial`: one more
    candidate of the first population.
    """

    source_statistics: StatisticsOption = None
    prompts: Count = 3
    population: Annotated[int, Field(ge=4)] = 27
    sigma: Annotated[float, Field(ge=1e-12, allow_inf_nan=False)] = 1.0
    weight: Rate = 0.4
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    fitness: Literal["unshifted", "shifted"] = "unshifted"
    initial: Literal["random", "zero"] = "random"
    episodic: bool = False


class Foa(Method):
    """`prompts` learned tokens after the embedding, chosen by CMA-ES; `population` + 1 forwards per batch.

    Fitness: summed entropy + `weight` * n/64 * squared distance of the batch's token statistics to those of clean
    images. The prediction is that of the best candidate, its features shifted by the source's mean less their moving
    mean; with `predict="before"`, that of the best of the last batch.
    """

    Options = FoaOptions
    options: FoaOptions

    def reset_state(self) -> None:
        self.search: Search | None = None  # made on the first batch, which shows the width of a token
        self.told: Tensor | None = None
        self.dimension: int | None = None
        self.spread: float | None = None  # of the first tokens
        self.mean_features: Tensor | None = None
        options = self.options
        self.settings = [options.prompts, options.population, float(options.sigma), options.seed]

    def state_spec(self) -> dict[str, Spec]:
        """A search is a function of its settings and of the fitness values it was told."""
        settings: list[Spec] = [Number(type(value), least=value, most=value) for value in self.settings]
        return {
            "settings": settings,
            "dimension": Number(int, least=1, most=1e6),
            "spread": Number(float, least=0),
            "told": Array((None, self.options.population + 1), torch.float64),
            "mean_features": Array((None,)),
        }

    def adapted_names(self, model: nn.Module) -> list[str]:
        take_prompts(model)
        require("cma", extra="foa")
        self.source = required(self.options.source_statistics, self.name, "source_statistics")
        return []

    def adapt(self, images: Tensor) -> Tensor:
        network = take_prompts(self.model)
        with torch.no_grad():
            x = network.embed(images)
            size = self.options.prompts * network.width(x)
            spread = network.spread(images, x) if self.options.initial == "random" else 0.0
            search = self.search = self.search or self.make_search(size, spread)
            candidates = search.ask()
            outcomes = [self.try_tokens(network, x, candidate) for candidate in candidates]
        self.counters.forwards += len(candidates)
        fitness, logits, features = (torch.stack(values) for values in zip(*outcomes, strict=True))
        self.prediction_before = logits[-1]
        finite = fitness.isfinite()
        if not bool(finite.any()):
            self.search = None  # the candidates must be drawn again
            self.counters.skipped += 1
            return logits[-1]
        worst = fitness[finite].max()
        fitness = fitness.where(finite, worst + worst.abs() + 1)
        search.tell(candidates, fitness)
        self.told, self.dimension, self.spread = search.told, size, spread
        self.counters.updates += 1
        self.update_mean_features(features[finite].mean(0))
        return logits[-1] if self.options.predict == "before" else logits[fitness.argmin()]

    def infer(self, images: Tensor) -> Logits:
        if self.search is None and self.dimension is None:
            return self.frozen_logits(images)
        network = take_prompts(self.model)
        self.search = self.search or self.make_search(self.dimension or 0, self.spread or 0.0)
        return self.try_tokens(network, network.embed(images), self.search.best)[1]

    def try_tokens(self, network: ImagePrompts, x: Tensor, candidate: Vector) -> tuple[Tensor, Tensor, Tensor]:
        """Fitness, logits (n, classes) and mean features (d,) of an embedded batch with one candidate's tokens."""
        seen = network.forward(x, torch.from_numpy(candidate).to(x).view(self.options.prompts, -1))
        features, source = seen.features, self.source.like(x)
        plain = logits = network.classify(features)
        if self.mean_features is not None:
            logits = network.classify(features + source.features - self.mean_features.to(features))
        judged = plain if self.options.fitness == "unshifted" else logits
        std, mean = torch.std_mean(seen.layers, dim=0, correction=min(1, len(x) - 1))
        distance = (mean - source.mean).square().sum() + (std - source.std).square().sum()
        return entropy(judged).sum() + self.options.weight * len(x) / 64 * distance, logits, features.mean(0)

    def make_search(self, dimension: int, spread: float) -> Search:
        """A new search; a saved one is restored by replaying its fitness values."""
        options = self.options
        first = np.random.default_rng(options.seed).uniform(-spread, spread, dimension)
        search = Search(first, population=options.population, sigma=options.sigma, seed=options.seed)
        if self.told is not None:
            search.replay(self.told.cpu())
        return search

    def update_mean_features(self, features: Tensor) -> None:
        """Update the moving mean of the features (d,)."""
        if self.mean_features is not None:
            features = MOMENTUM * self.mean_features.to(features) + (1 - MOMENTUM) * features
        self.mean_features = features


class Normals:
    """Standard normal numbers of a seed; unlike that of a bound method, a deep copy has a generator of its own."""

    def __init__(self, seed: int) -> None:
        self.state = np.random.RandomState(seed)

    def __call__(self, *shape: int) -> Vector:
        return self.state.randn(*shape)


class Search:
    """Minimize over vectors (dimension,): ask for candidates, tell their fitness.

    Settings and fitness values determine the search, so they are its whole state: `replay` restores it bit for bit,
    without forward passes.
    """

    def __init__(self, first: Vector, *, population: int, sigma: float, seed: int) -> None:
        """`first` (dimension,): one more candidate of the first population, which is drawn about zero."""
        options = {"popsize": population, "randn": Normals(seed), "seed": np.nan, "verbose": -9, "verb_log": 0}
        self.strategy: Any = require("cma", extra="foa").CMAEvolutionStrategy(np.zeros(len(first)), sigma, options)
        self.best: Vector = first
        self.told = torch.zeros(0, population + 1, dtype=torch.float64)

    def ask(self) -> list[Vector]:
        """A new population, and the best of the last one again."""
        return [*self.strategy.ask(), self.best]

    def tell(self, candidates: list[Vector], fitness: Tensor) -> None:
        """Learn from the fitness (population + 1,) of what `ask` gave."""
        values = fitness.double().cpu()
        self.strategy.tell(candidates, values.tolist())
        self.best = candidates[int(values.argmin())]
        self.told = torch.cat([self.told, values[None]])

    def replay(self, told: Tensor) -> None:
        """Repeat a saved search from its fitness values (rounds, population + 1)."""
        for fitness in told:
            self.tell(self.ask(), fitness)
