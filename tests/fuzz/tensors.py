"""Tensors that do not belong where they are put."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import strategies as st
from torch import Tensor

_SHAPES: tuple[tuple[int, ...], ...] = (
    (), (0,), (1,), (3,), (16,), (184,), (8, 16), (3, 16), (0, 3), (1, 1, 1, 1), (8, 3, 2, 2),
)  # fmt: skip
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64,
    torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
_FILLS = (0.0, 1.0, -1.0, 0.5, 1e-30, 1e30, 1e300, float("nan"), float("inf"))
_KINDS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda t: t,
    lambda t: t,
    lambda t: t,
    lambda t: t.to("meta"),
    lambda t: t.to_sparse(),
    lambda t: t.reshape(-1)[:1].expand(10**12) if t.numel() else t,
    lambda t: t.mT if t.dim() > 1 else t,
    lambda t: torch.nn.Parameter(t),
    lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
)


def _make(shape: tuple[int, ...], dtype: torch.dtype, fill: float, kind: Callable[[Tensor], Tensor]) -> Tensor:
    try:
        tensor = torch.full(shape, fill, dtype=torch.float64).to(dtype)
        return kind(tensor)
    except (RuntimeError, NotImplementedError):  # there is no such tensor
        return torch.zeros(shape)


odd_tensors = st.builds(
    _make, st.sampled_from(_SHAPES), st.sampled_from(_DTYPES), st.sampled_from(_FILLS), st.sampled_from(_KINDS)
)
