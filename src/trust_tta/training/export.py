"""A trained network as one .safetensors file with a description of itself."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path

import torch
from torch import nn

from trust_tta.atomic import replacing
from trust_tta.errors import CheckpointError


def export_model(
    model: nn.Module,
    path: str | PathLike[str],
    *,
    dtype: torch.dtype = torch.float16,
    metadata: Mapping[str, str],
) -> None:
    """Write the parameters in `dtype` under upstream's names, running statistics in full, whole or not at all."""
    from safetensors.torch import save

    weights = dict(model.named_parameters())
    state = {}
    for name, tensor in model.state_dict().items():
        value = tensor.to(dtype) if name in weights else tensor
        if not bool(torch.isfinite(value).all()):
            raise CheckpointError(f"{name} does not fit {dtype} (it has values that become inf or nan); use float32")
        state[name] = value.cpu().contiguous()
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as temporary:
        temporary.write_bytes(save(state, metadata={"format": "pt", **metadata}))
