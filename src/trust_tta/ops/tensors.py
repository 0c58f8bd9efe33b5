"""Names and shapes of the tensors that the scans pass to each other.

Sizes: b images, g groups, m directions (1, or 2: forward and backward), c channels, l positions, n states, r the rank
of the step sizes. In SS2D g = 2, the rows and the columns of a map.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class ScanInputs(NamedTuple):
    """Arguments of the grouped scan. Direction 0 runs from the first position to the last, direction 1 back."""

    u: Tensor  # (b, g, c, l)
    delta: Tensor  # (b, g, m, c, l), before bias and softplus
    A: Tensor  # (g, m, c, n)
    B: Tensor  # (b, g, m, n, l)
    C: Tensor  # (b, g, m, n, l)
    D: Tensor | None  # (g, m, c)
    delta_bias: Tensor | None  # (g, m, c)
    delta_softplus: bool = True


class ScanGradients(NamedTuple):
    """Gradients of the grouped scan, shaped as the inputs; the last two are empty where the input is None."""

    u: Tensor
    delta: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor
    delta_bias: Tensor


class Parameters(NamedTuple):
    """SS2D's four groups of scan parameters under upstream's names, or their gradients (empty where not wanted)."""

    x_proj_weight: Tensor  # (4, r+2n, c)
    dt_projs_weight: Tensor  # (4, c, r)
    dt_projs_bias: Tensor  # (4, c)
    A_logs: Tensor  # (4c, n)
    Ds: Tensor  # (4c,)


class Gathered(NamedTuple):
    """The parameters of each direction; axis 0 is b where every image has its own order, and absent otherwise."""

    x_proj: Tensor  # (.., 2, 2(r+2n), c), in the dtype of the map
    dt_proj: Tensor  # (.., 2, 2, c, r), in the dtype of the map
    A: Tensor  # (.., 2, 2, c, n)
    D: Tensor  # (.., 2, 2, c)
    dt_bias: Tensor  # (.., 2, 2, c)

    @property
    def rank(self) -> int:
        return self.dt_proj.shape[-1]

    def parameter_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the five `Parameters` that these were gathered from."""
        (c, rank), n = self.dt_proj.shape[-2:], self.A.shape[-1]
        return (4, self.x_proj.shape[-2] // 2, c), (4, c, rank), (4, c), (4 * c, n), (4 * c,)

    def low_rank(self, projected: Tensor) -> Tensor:
        """Low-rank step sizes (b, 2, 2, r, l) out of projected (b, 2, 2, r+2n, l), before dt_proj expands them."""
        return projected[:, :, :, : self.rank]

    def scan_inputs(self, u: Tensor, delta: Tensor, projected: Tensor) -> ScanInputs:
        """SS2D as a grouped scan; images with parameters of their own become groups in a batch of one."""
        n, (A, D, bias) = self.A.shape[-1], self[2:]
        B, C = projected[:, :, :, -2 * n : -n], projected[:, :, :, -n:]
        if A.dim() == 4:
            return ScanInputs(u, delta, A, B, C, D, bias)
        u, delta, B, C = (t.flatten(0, 1)[None] for t in (u, delta, B, C))
        A, D, bias = (t.flatten(0, 1) for t in (A, D, bias))
        return ScanInputs(u, delta, A, B, C, D, bias)


class Saved(NamedTuple):
    """Tensors saved for the backward of `scan_map`; each backend leaves those empty that it does not save."""

    projected: Tensor  # (b, 2, 2, r+2n, l), on a CPU (b, l, 4, r+2n): low-rank step sizes, B and C
    states: Tensor  # Triton: the states between chunks
    u: Tensor  # CPU: SiLU of the map, (b, l, c)
    gathered: Gathered

    def flatten(self) -> tuple[Tensor, ...]:
        """The eight tensors in a row, as an operator returns them."""
        return (*self[:3], *self.gathered)

    @classmethod
    def unflatten(cls, tensors: tuple[Tensor, ...]) -> Saved:
        projected, states, u, *gathered = tensors
        return cls(projected, states, u, Gathered(*gathered))


def to_pixels(x: Tensor) -> Tensor:
    """(b, c, h, w) as (b, h, w, c), contiguous."""
    return x.permute(0, 2, 3, 1).contiguous()
