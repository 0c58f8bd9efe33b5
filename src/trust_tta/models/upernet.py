"""UPerNet over VMamba: a label for every pixel, whole images and sliding windows.

Xiao et al., "Unified Perceptual Parsing for Scene Understanding", ECCV 2018, as MMSegmentation 1.2 builds it;
parameters have the names of its files. Bilinear resizes never align corners.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trust_tta.errors import ConfigError, ShapeError
from trust_tta.models.base import Orders
from trust_tta.models.config import UPerNetConfig, VMambaConfig
from trust_tta.models.layers import make_norm
from trust_tta.models.parameter_roles import Role
from trust_tta.models.vmamba import VMamba
from trust_tta.preprocessing import Preprocessing, network_input


class Backbone(VMamba):
    """A VMamba without a classifier, with a norm for the map of each stage."""

    def __init__(self, config: VMambaConfig) -> None:
        own = {name: value for name, value in config if name in VMambaConfig.model_fields}
        super().__init__(VMambaConfig(**own | {"num_classes": 1}))
        del self.classifier
        for i, dim in enumerate(config.dims):
            self.add_module(f"outnorm{i}", make_norm(config.norm, dim))

    def forward_maps(self, x: Tensor, order: Orders = None, *, directions: Tensor | None = None) -> list[Tensor]:
        """The normalized map at the end of each stage, fine to coarse."""
        maps = super().forward_maps(x, order, directions=directions)
        return [self.get_submodule(f"outnorm{i}")(x) for i, x in enumerate(maps)]


def conv_bn_relu(channels: int, out_channels: int, size: int) -> nn.Sequential:
    """A convolution without bias, BatchNorm, ReLU."""
    conv = nn.Conv2d(channels, out_channels, size, padding=size // 2, bias=False)
    return nn.Sequential(OrderedDict(conv=conv, bn=nn.BatchNorm2d(out_channels), relu=nn.ReLU()))


class UPerHead(nn.Module):
    """Maps of several strides, fine to coarse, to logits (n, classes, h, w) at the size of the finest.

    The coarsest is average-pooled to `pools` x `pools` cells at each scale (PSP); then maps are added top-down (FPN).
    """

    def __init__(
        self, dims: Sequence[int], channels: int, classes: int, *, pools: Sequence[int] = (1, 2, 3, 6), dropout: float
    ) -> None:
        super().__init__()
        self.conv_seg = nn.Conv2d(channels, classes, 1)
        self.dropout = nn.Dropout2d(dropout)
        self.psp_modules = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(pool), conv_bn_relu(dims[-1], channels, 1)) for pool in pools
        )
        for norm in (m for m in self.psp_modules.modules() if isinstance(m, nn.BatchNorm2d)):
            norm.sees_few_values = True  # type: ignore[assignment]
        self.bottleneck = conv_bn_relu(dims[-1] + len(pools) * channels, channels, 3)
        self.lateral_convs = nn.ModuleList(conv_bn_relu(dim, channels, 1) for dim in dims[:-1])
        self.fpn_convs = nn.ModuleList(conv_bn_relu(channels, channels, 3) for _ in dims[:-1])
        self.fpn_bottleneck = conv_bn_relu(len(dims) * channels, channels, 3)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        return self.conv_seg(self.dropout(self.forward_features(maps)))

    def forward_features(self, maps: Sequence[Tensor]) -> Tensor:
        """The features (n, channels, h, w) that the last convolution classifies."""
        levels = [lateral(x) for lateral, x in zip(self.lateral_convs, maps[:-1], strict=True)]
        levels.append(self.pool(maps[-1]))
        for i in reversed(range(len(levels) - 1)):
            levels[i] = levels[i] + resize(levels[i + 1], levels[i].shape[2:])
        levels = [*(conv(x) for conv, x in zip(self.fpn_convs, levels[:-1], strict=True)), levels[-1]]
        return self.fpn_bottleneck(torch.cat([resize(x, levels[0].shape[2:]) for x in levels], 1))

    def pool(self, x: Tensor) -> Tensor:
        """The coarsest map (n, c, h, w) with its averages over cells of several sizes, (n, channels, h, w)."""
        pooled = [resize(branch(x), x.shape[2:]) for branch in self.psp_modules]
        return self.bottleneck(torch.cat([x, *pooled], 1))


class FCNHead(nn.Module):
    """One map to logits (n, classes, h, w) of its size; helps training and is not part of inference."""

    def __init__(self, dim: int, channels: int, classes: int, *, dropout: float) -> None:
        super().__init__()
        self.conv_seg = nn.Conv2d(channels, classes, 1)
        self.dropout = nn.Dropout2d(dropout)
        self.convs = nn.Sequential(conv_bn_relu(dim, channels, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv_seg(self.dropout(self.convs(x)))


class UPerNet(nn.Module):
    """images (n, channels, h, w) -> logits (n, classes, h, w), under a scan order of its VMamba.

    >>> from trust_tta import create_model
    >>> model = create_model("upernet_vmamba_nano", num_classes=11)
    >>> model(torch.zeros(1, 3, 45, 60)).shape
    torch.Size([1, 11, 45, 60])
    """

    dense = True  # a prediction for every pixel
    config: UPerNetConfig | None
    preprocessing: Preprocessing | None
    classes: tuple[str, ...] | None

    def __init__(self, backbone: Backbone, decode_head: UPerHead, auxiliary_head: FCNHead) -> None:
        super().__init__()
        self.backbone, self.decode_head, self.auxiliary_head = backbone, decode_head, auxiliary_head
        self.config = self.preprocessing = self.classes = None
        self.unchecked_batches = 0  # how many more batches are compared with the preprocessing

    @classmethod
    def from_config(cls, config: UPerNetConfig) -> UPerNet:
        classes, dropout = config.num_classes, config.dropout
        head = UPerHead(config.dims, config.channels, classes, pools=config.pools, dropout=dropout)
        auxiliary = FCNHead(config.dims[-2], config.auxiliary_channels, classes, dropout=dropout)
        for module in (head, auxiliary):
            nn.init.normal_(module.conv_seg.weight, std=0.01)
            nn.init.zeros_(cast(Tensor, module.conv_seg.bias))
        network = cls(Backbone(config), head, auxiliary)
        network.config = config
        return network

    @property
    def num_classes(self) -> int:
        return self.decode_head.conv_seg.out_channels

    def forward(self, images: Tensor, order: Orders = None, *, directions: Tensor | None = None) -> Tensor:
        """Logits at the size of the images; `order` and `directions` as those of `ScanNetwork.forward`."""
        images = network_input(self, images)
        return resize(self.forward_coarse(images, order, directions=directions), images.shape[2:])

    def forward_coarse(self, images: Tensor, order: Orders = None, *, directions: Tensor | None = None) -> Tensor:
        """Logits (n, classes, h', w') as the head gives them, at the stride of the first stage."""
        return self.decode_head(self.forward_maps(images, order, directions=directions))

    def forward_training(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The coarse logits of both heads, (n, classes, h', w') each, from one forward pass."""
        maps = self.forward_maps(images)
        return self.decode_head(maps), self.auxiliary_head(maps[-2])

    def forward_maps(self, images: Tensor, order: Orders = None, *, directions: Tensor | None = None) -> list[Tensor]:
        """The maps of the backbone, fine to coarse."""
        return self.backbone.forward_maps(self.backbone.embed(images), order, directions=directions)

    @property
    def scan_orders(self) -> tuple[str, ...]:
        return self.backbone.scan_orders

    def scan_directions(self, order: Orders, images: int) -> Tensor:
        """Direction that each parameter group reads, (4,), or one row per image, (images, 4)."""
        return self.backbone.scan_directions(order, images)

    def parameter_roles(self) -> dict[str, Role]:
        """The role of every parameter: the backbone's own; norms of the decoding head belong to the last stage.

        The auxiliary head takes no part in predictions, so nothing of it is adapted.
        """
        roles = {f"backbone.{name}": role for name, role in self.backbone.parameter_roles().items()}
        last = f"backbone.outnorm{len(self.backbone.layers) - 1}."
        for name, _ in self.named_parameters():
            if name.startswith(last):
                roles[name] = Role("norm", last=True)
            elif not name.startswith("backbone."):
                is_norm = name.startswith("decode_head.") and ".bn." in name
                roles[name] = Role("norm" if is_norm else "other", last=True)
        return {name: roles[name] for name, _ in self.named_parameters()}

    def classifier_names(self) -> tuple[str, ...]:
        """The parameters that give logits, which methods hold fixed, and those of the auxiliary head."""
        fixed = ("decode_head.conv_seg.", "auxiliary_head.")
        return tuple(name for name, _ in self.named_parameters() if name.startswith(fixed))

    def set_stochastic_depth(self, enabled: bool) -> None:
        """Switch stochastic depth, whatever mode the rest of the network is in."""
        self.backbone.set_stochastic_depth(enabled)

    def set_scan_backend(self, backend: str) -> None:
        """Use one scan backend in every block; "auto" chooses by device."""
        self.backbone.set_scan_backend(backend)


def resize(x: Tensor, size: Sequence[int]) -> Tensor:
    """Bilinear, (n, c, h, w) to (n, c, *size); corners are not aligned. The same size is no copy."""
    if tuple(x.shape[2:]) == tuple(size):
        return x
    return F.interpolate(x, size=tuple(size), mode="bilinear", align_corners=False)


def windows(length: int, crop: int, stride: int) -> Iterator[tuple[int, int]]:
    """Start and end of the windows along one side; the last is moved back inside, a short side is one window.

    >>> list(windows(50, 32, 21))
    [(0, 32), (18, 50)]
    """
    for i in range(max(length - crop + stride - 1, 0) // stride + 1):
        end = min(i * stride + crop, length)
        yield max(end - crop, 0), end


def slide(forward: Callable[[Tensor], Tensor], images: Tensor, *, crop: int, stride: int) -> Tensor:
    """Logits (n, classes, h, w) of images (n, channels, h, w): the mean over all windows that cover a pixel.

    `forward` gives logits at the size of a window, as a network or the `evaluate` of a method does.
    """
    if crop < 1 or not 1 <= stride <= crop:
        raise ConfigError(f"crop is {crop} and stride {stride}; give a crop >= 1 and a stride from 1 to the crop")
    height, width = images.shape[2:]
    total: Tensor | None = None
    count = images.new_zeros(1, 1, height, width)
    for top, bottom in windows(height, crop, stride):
        for left, right in windows(width, crop, stride):
            logits = forward(images[:, :, top:bottom, left:right])
            if total is None:
                total = logits.new_zeros(len(images), logits.shape[1], height, width)
            total[:, :, top:bottom, left:right] += logits
            count[:, :, top:bottom, left:right] += 1
    if total is None:
        raise ShapeError(f"images have shape {tuple(images.shape)}; give (n, channels, h, w) without an empty side")
    return total.div_(count)
