"""Many tensors copied at once: the library takes a launch for every few of them, longer than moving them takes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trust_tta.scan import functional


class Copies:
    """Copies tensors to others of the same shapes when called; on a GPU by one kernel."""

    def __init__(self, targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        self.targets, self.values = list(targets), list(values)
        self.places: list[int] = []  # where the tensors lay when the table was made: they may be moved
        self.table: Tensor | None = None

    def __call__(self) -> None:
        if not self.targets:
            return
        with torch.no_grad():
            if "copies" not in functional.USED or not functional.HAS_TRITON or not self.targets[0].is_cuda:
                torch._foreach_copy_(self.targets, self.values)
                return
            places = [t.data_ptr() for t in self.targets] + [t.data_ptr() for t in self.values]
            if places != self.places:
                self.places, self.table = places, self._make_table()
            if self.table is None:
                torch._foreach_copy_(self.targets, self.values)
                return
        from trust_tta.kernels import triton_copies

        triton_copies.copy(self.table)
        torch.autograd.graph.increment_version(self.targets)

    def _make_table(self) -> Tensor | None:
        """What the kernel reads, or None where it does not take the tensors."""
        if not all(t.is_cuda and t.dtype == torch.float32 and t.is_contiguous() for t in self.targets + self.values):
            return None
        from trust_tta.kernels import triton_copies

        return triton_copies.make_table(self.targets, self.values)
