"""Networks that take learned prompts after their embedding: vision transformers as tokens, VMambas in their maps."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from trust_tta.errors import ConfigError, ShapeError
from trust_tta.methods.features import classify, linear_heads


class Seen(NamedTuple):
    """A batch in a network: a token of every layer (n, sum of widths), and pooled features (n, d)."""

    layers: Tensor
    features: Tensor


class PromptedNetwork(Protocol):
    """Images to what prompts are put into, from there to features, and to logits (n, classes)."""

    def embed(self, images: Tensor) -> Tensor: ...

    def width(self, x: Tensor) -> int:
        """The numbers in a token of what `embed` gave."""

    def spread(self, images: Tensor, x: Tensor) -> float:
        """The range of random tokens: uniform, as visual prompt tuning draws them."""

    def see(self, x: Tensor, tokens: Tensor | None = None) -> Seen:
        """From `embed` on, with `tokens` (prompts, width) that all images share."""

    def classify(self, features: Tensor) -> Tensor: ...


class Maps:
    """A VMamba: tokens fill one more row of the first map (n, c, h, w); a map's mean token stands for its layer."""

    def __init__(self, network: Any) -> None:
        self.network = network
        self.embed, self.classify = network.embed, network.forward_head

    def width(self, x: Tensor) -> int:
        return x.shape[1]

    def spread(self, images: Tensor, x: Tensor) -> float:
        return _spread(images.shape[1] * (images.shape[2] // x.shape[2]) ** 2, x.shape[1])

    def see(self, x: Tensor, tokens: Tensor | None = None) -> Seen:
        maps = self.network.forward_maps(x if tokens is None else append_row(x, tokens))
        return Seen(torch.cat([m.mean((2, 3)) for m in maps], dim=1), self.network.pool(maps[-1]))


class Tokens:
    """A vision transformer of timm: prompts follow the class token and leave after the last block.

    The class token, normalized as the next block takes it, stands for a layer; where there is none, the mean token.
    """

    def __init__(self, network: Any) -> None:
        self.network, self.prefix = network, int(network.num_prefix_tokens)

    def embed(self, images: Tensor) -> Tensor:
        """Tokens (n, l, d) with their positions."""
        tokens: Tensor = self.network._pos_embed(self.network.patch_embed(images))
        return tokens

    def width(self, x: Tensor) -> int:
        return x.shape[2]

    def spread(self, images: Tensor, x: Tensor) -> float:
        return _spread(images.shape[1] * math.prod(self.network.patch_embed.patch_size), x.shape[2])

    def see(self, x: Tensor, tokens: Tensor | None = None) -> Seen:
        count = 0 if tokens is None else len(tokens)
        if tokens is not None:
            x = torch.cat([x[:, : self.prefix], tokens.expand(len(x), -1, -1), x[:, self.prefix :]], dim=1)
        x, layers = self.network.norm_pre(x), []
        norms = [*(block.norm1 for block in self.network.blocks[1:]), self.network.norm]
        for block, norm in zip(self.network.blocks, norms, strict=True):
            x = block(x)
            own = torch.cat([x[:, : self.prefix], x[:, self.prefix + count :]], dim=1) if count else x
            layers.append(norm(own[:, 0] if self.network.cls_token is not None else own.mean(1)))
        return Seen(torch.cat(layers, dim=1), self.network.forward_head(self.network.norm(own), pre_logits=True))

    def classify(self, features: Tensor) -> Tensor:
        return classify(self.network, features)


_MAPS = ("embed", "forward_maps", "pool", "forward_head")
_TOKENS = ("patch_embed", "_pos_embed", "norm_pre", "blocks", "norm", "num_prefix_tokens", "cls_token", "forward_head")


def take_prompts(model: nn.Module) -> PromptedNetwork:
    """The network with a place for prompts, or a refusal."""
    network: Any = model
    if all(hasattr(model, name) for name in _MAPS):
        return Maps(network)
    if all(hasattr(model, name) for name in _TOKENS) and _is_plain(network.blocks):
        linear_heads(model, by="a prompt")
        return Tokens(network)
    raise ConfigError(
        f"prompts are put into the tokens of a vision transformer or the first map of a VMamba, and "
        f"{type(model).__name__} has no such place; use a VMamba, one of timm's ViTs, or another method such as 'tent'"
    )


def _is_plain(blocks: Any) -> bool:
    """Whether blocks take tokens and nothing else, as positions that turn with them."""
    return isinstance(blocks, nn.Sequential) and all(hasattr(block, "norm1") for block in blocks)


def append_row(first_map: Tensor, tokens: Tensor) -> Tensor:
    """The map (n, c, h, w) with tokens (prompts, c) as one more row; each fills an equal stretch of it."""
    n, channels, _, width = first_map.shape
    if len(tokens) > width:
        raise ShapeError(f"{len(tokens)} prompts do not fit in a row of {width} tokens; set prompts to {width} or less")
    row = tokens[torch.arange(width, device=first_map.device) * len(tokens) // width].T
    return torch.cat([first_map, row[None, :, None].expand(n, channels, 1, width)], dim=2)


def _spread(numbers_of_patch: int, width: int) -> float:
    return math.sqrt(6 / (numbers_of_patch + width))
