"""What the maps of a network look like on clean images, stage by stage."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from trust_tta.errors import ConfigError
from trust_tta.methods.parameters import share, use_batch_statistics


class MappedNetwork(Protocol):
    """Images to a first map, to a map a stage, to pooled features, to logits; a VMamba offers it."""

    def embed(self, images: Tensor) -> Tensor: ...
    def forward_maps(self, x: Tensor) -> list[Tensor]: ...
    def pool(self, x: Tensor) -> Tensor: ...
    def forward_head(self, features: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class SourceStatistics:
    """Of clean images: mean and deviation of the mean token of every stage, one stage after the other, and the
    mean of the pooled features."""

    mean: Tensor
    std: Tensor
    features: Tensor

    def like(self, tensor: Tensor) -> SourceStatistics:
        """On the device and in the dtype of `tensor`."""
        return SourceStatistics(self.mean.to(tensor), self.std.to(tensor), self.features.to(tensor))


def gather_source_statistics(
    model: nn.Module, batches: Iterable[Tensor], *, batch_statistics: bool = True
) -> SourceStatistics:
    """Statistics over batches of clean images (n, c, h, w); forward passes only, the model is left as it was."""
    require_maps(model)
    copy = share(model, []).eval()
    if batch_statistics:
        use_batch_statistics(copy)
    network = cast(MappedNetwork, copy)
    images, sums, squares, features = 0, torch.zeros(()), torch.zeros(()), torch.zeros(())
    with torch.no_grad():
        for batch in batches:
            maps = network.forward_maps(network.embed(batch))
            tokens = mean_tokens(maps).double().cpu()
            images += len(tokens)
            sums, squares = sums + tokens.sum(0), squares + tokens.square().sum(0)
            features = features + network.pool(maps[-1]).double().cpu().sum(0)
    if images < 2:
        raise ConfigError(f"{images} clean images were given; source statistics need at least two")
    mean = sums / images
    variance = (squares / images - mean.square()).clamp_min(0) * images / (images - 1)
    return SourceStatistics(mean.float(), variance.sqrt().float(), (features / images).float())


def mean_tokens(maps: list[Tensor]) -> Tensor:
    """The mean token of each map (n, c, h, w), one map after the other, (n, sum of c)."""
    return torch.cat([m.mean((2, 3)) for m in maps], dim=1)


def require_maps(model: nn.Module) -> None:
    missing = [name for name in ("embed", "forward_maps", "pool", "forward_head") if not hasattr(model, name)]
    if missing:
        raise ConfigError(
            f"FOA puts tokens into the maps of a network and {type(model).__name__} has no {', '.join(missing)}; "
            "use a VMamba, or another method such as 'tent'"
        )
