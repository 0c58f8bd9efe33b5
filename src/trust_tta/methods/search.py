"""A seeded CMA-ES search that can be saved as plain numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trust_tta.optional import require

Vector = NDArray[np.float64]


class Normals:
    """Standard normal numbers of a seed; unlike a bound function, a deep copy goes on by itself."""

    def __init__(self, seed: int) -> None:
        self.state = np.random.RandomState(seed)

    def __call__(self, *shape: int) -> Vector:
        return self.state.randn(*shape)


class Search:
    """Minimise over vectors (dimension,): ask for candidates, tell their fitness.

    The search is a function of its settings and of the fitness values it was told, so these are its whole
    state: `replay` walks the same path to the same bits, without evaluating anything.
    """

    def __init__(self, dimension: int, *, population: int, sigma: float, seed: int) -> None:
        options = {"popsize": population, "randn": Normals(seed), "seed": np.nan, "verbose": -9, "verb_log": 0}
        self.strategy: Any = require("cma", extra="foa").CMAEvolutionStrategy(np.zeros(dimension), sigma, options)
        self.best: Vector = np.zeros(dimension)
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
        """From the start, take the fitness values (rounds, population + 1) of a saved search."""
        for fitness in told:
            self.tell(self.ask(), fitness)
