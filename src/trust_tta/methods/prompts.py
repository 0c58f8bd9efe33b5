"""Learned prompts: tokens of vision transformers, a row of VMamba's first map, or of other networks' images."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trust_tta.errors import ConfigError, ShapeError
from trust_tta.methods.features import classify, features_and_logits, require_features


class PromptedOutput(NamedTuple):
    """A token of every layer, concatenated (n, sum of widths), and pooled features (n, d)."""

    layers: Tensor
    features: Tensor


class ImagePrompts:
    """Any network with prompts: tokens replace the last row of its images, a bias is added to every pixel.

    The layers' statistics are those of the pooled features, which are the input of the classifier. `as_bias`: a prompt
    may be one bias per channel.
    """

    as_bias = True

    def __init__(self, network: Any) -> None:
        self.network = network

    def embed(self, images: Tensor) -> Tensor:
        """The tensor that prompts are added to."""
        return images

    def width(self, x: Tensor) -> int:
        """The size of a token of the embedded images."""
        return x.shape[1]

    def spread(self, images: Tensor, x: Tensor) -> float:
        """The range of random tokens: uniform, as visual prompt tuning draws them."""
        return _spread(images.shape[1], x.shape[1])

    def forward(self, x: Tensor, tokens: Tensor | None = None) -> PromptedOutput:
        """Run the network from `embed` on, with `tokens` (prompts, width) that all images share."""
        x = x if tokens is None else append_row(x[:, :, :-1], tokens)
        features, _ = features_and_logits(self.network, x)
        return PromptedOutput(features, features)

    def classify(self, features: Tensor) -> Tensor:
        return classify(self.network, features)


class MapPrompts(ImagePrompts):
    """A VMamba: tokens fill one more row of the first map (n, c, h, w); a layer is described by its mean token."""

    def embed(self, images: Tensor) -> Tensor:
        return self.network.embed(images)

    def spread(self, images: Tensor, x: Tensor) -> float:
        return _spread(images.shape[1] * (images.shape[2] // x.shape[2]) ** 2, x.shape[1])

    def forward(self, x: Tensor, tokens: Tensor | None = None) -> PromptedOutput:
        maps = self.network.forward_maps(x if tokens is None else append_row(x, tokens))
        return PromptedOutput(torch.cat([m.mean((2, 3)) for m in maps], dim=1), self.network.pool(maps[-1]))

    def classify(self, features: Tensor) -> Tensor:
        return self.network.forward_head(features)


class TokenPrompts(ImagePrompts):
    """A vision transformer of timm: prompts are inserted after the class token and removed after the last block.

    A layer is described by its class token under the next block's norm; without a class token, by its mean token.
    """

    as_bias = False

    def __init__(self, network: Any) -> None:
        super().__init__(network)
        self.prefix = int(network.num_prefix_tokens)

    def embed(self, images: Tensor) -> Tensor:
        """Tokens (n, l, d) with their positions."""
        return self.network._pos_embed(self.network.patch_embed(images))

    def width(self, x: Tensor) -> int:
        return x.shape[2]

    def spread(self, images: Tensor, x: Tensor) -> float:
        return _spread(images.shape[1] * math.prod(self.network.patch_embed.patch_size), x.shape[2])

    def forward(self, x: Tensor, tokens: Tensor | None = None) -> PromptedOutput:
        count = 0 if tokens is None else len(tokens)
        if tokens is not None:
            x = torch.cat([x[:, : self.prefix], tokens.expand(len(x), -1, -1), x[:, self.prefix :]], dim=1)
        x, layers = self.network.norm_pre(x), []
        norms = [*(block.norm1 for block in self.network.blocks[1:]), self.network.norm]
        for block, norm in zip(self.network.blocks, norms, strict=True):
            x = block(x)
            own = torch.cat([x[:, : self.prefix], x[:, self.prefix + count :]], dim=1) if count else x
            layers.append(norm(own[:, 0] if self.network.cls_token is not None else own.mean(1)))
        return PromptedOutput(
            torch.cat(layers, dim=1), self.network.forward_head(self.network.norm(own), pre_logits=True)
        )


_MAPS = ("embed", "forward_maps", "pool", "forward_head")
_TOKENS = ("patch_embed", "_pos_embed", "norm_pre", "blocks", "norm", "num_prefix_tokens", "cls_token", "forward_head")


def take_prompts(model: nn.Module) -> ImagePrompts:
    """The prompt interface of a network: for its tokens, its first map, or else its images."""
    network: Any = model
    if all(hasattr(model, name) for name in _MAPS):
        return MapPrompts(network)
    if getattr(model, "dense", False):
        raise ConfigError(f"prompts need one prediction per image; {type(model).__name__} segments images")
    require_features(model, "a prompt")
    if all(hasattr(model, name) for name in _TOKENS) and _is_plain(network.blocks):
        return TokenPrompts(network)
    return ImagePrompts(network)


def _is_plain(blocks: Any) -> bool:
    """Whether blocks take tokens alone; some also take rotary positions."""
    return isinstance(blocks, nn.Sequential) and all(hasattr(block, "norm1") for block in blocks)


def append_row(first_map: Tensor, tokens: Tensor) -> Tensor:
    """The map (n, c, h, w) with tokens (prompts, c) as one more row; each fills an equal share of it."""
    n, channels, _, width = first_map.shape
    if len(tokens) > width:
        raise ShapeError(f"{len(tokens)} prompts do not fit in a row of {width} tokens; set prompts to {width} or less")
    row = tokens[torch.arange(width, device=first_map.device) * len(tokens) // width].T
    return torch.cat([first_map, row[None, :, None].expand(n, channels, 1, width)], dim=2)


def _spread(numbers_of_patch: int, width: int) -> float:
    return math.sqrt(6 / (numbers_of_patch + width))
