"""All adapted weights as one vector: a few hundred small tensors cost a few hundred kernels, a vector costs one."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor


class Flat:
    """A vector (n,), at least float32, with a place for every element of `tensors`, and another for their gradients.

    The tensors stay where they are: the vector is filled from them, worked on, and written back.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)
        dtype = reduce(torch.promote_types, (t.dtype for t in self.tensors), torch.float32)
        total = sum(t.numel() for t in self.tensors)
        self.weights = torch.zeros(total, dtype=dtype, device=self.tensors[0].device)
        self.gradient = torch.zeros_like(self.weights)
        self.places, self.gradient_places = self.layers(self.weights), self.layers(self.gradient)

    def __deepcopy__(self, memo: dict[int, Any]) -> Flat:
        """A copy's places must be in the copy's vectors; whoever holds a vector finds the copy's."""
        twin = Flat(copy.deepcopy(self.tensors, memo))
        memo[id(self.weights)], memo[id(self.gradient)] = twin.weights, twin.gradient
        return twin

    def layers(self, vector: Tensor) -> list[Tensor]:
        """Views of a vector (n,) with the tensors' shapes."""
        parts = vector.split([t.numel() for t in self.tensors])
        return [part.view(t.shape) for part, t in zip(parts, self.tensors, strict=True)]

    def vector(self, values: Iterable[Tensor]) -> Tensor:
        """A new vector of values with the tensors' shapes."""
        return torch.cat([value.detach().reshape(-1).to(self.weights) for value in values])

    def read(self) -> Tensor:
        """A copy (n,) of the tensors as they are now."""
        self.gather()
        return self.weights.clone()

    def write(self, vector: Tensor) -> None:
        """Give the tensors the values of a vector (n,)."""
        self.weights.copy_(vector)
        self.scatter()

    def gather(self) -> None:
        """Fill `weights` from the tensors."""
        torch._foreach_copy_(self.places, [t.detach() for t in self.tensors])

    def scatter(self) -> None:
        """Write `weights` back to the tensors."""
        with torch.no_grad():
            torch._foreach_copy_(self.tensors, self.places)

    def gather_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Fill `gradient`; a tensor that has none keeps zeros."""
        pairs = [(place, g) for place, g in zip(self.gradient_places, gradients, strict=True) if g is not None]
        if len(pairs) < len(gradients):
            self.gradient.zero_()
        if pairs:
            places, given = zip(*pairs, strict=True)
            torch._foreach_copy_(list(places), list(given))
