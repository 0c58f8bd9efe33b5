"""Base class of the scan networks: scan orders as data, and the interface that the methods use."""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import Any, ClassVar, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trust_tta.errors import ShapeError
from trust_tta.models.config import NetworkConfig
from trust_tta.models.layers import StochasticDepth
from trust_tta.models.parameter_roles import Kind, Role
from trust_tta.orders import LETTERS, OrderLike, ScanOrder, find_order
from trust_tta.preprocessing import Preprocessing, network_input

Orders: TypeAlias = OrderLike | Sequence[OrderLike] | Tensor | None

# Group k of the parameters reads the direction whose letter stands at place k.
FOUR_DIRECTIONS = {"".join(LETTERS[i] for i in row): row for row in permutations(range(4))}

# How the names of a mixer's parameters begin.
SCAN_PARAMETERS = ("A_", "D", "x_proj", "dt_")
PROJECTIONS = ("in_proj", "out_proj", "conv", "proj.")


class ScanNetwork(nn.Module):
    """Maps images (n, channels, h, w) to logits (n, classes) under a scan order, an argument of the forward pass.

    `scan_orders` are the names of the orders, the published one first. The forward pass reads `directions`, one row of
    integers for the order or one row per image: an order is data, so one captured CUDA graph serves all orders.
    """

    orders: ClassVar[Mapping[str, Sequence[int]]]  # the directions of each scan order, by its name
    order_free: ClassVar[bool] = False  # every scan order gives the same logits
    head_path: ClassVar[str] = "head"  # name of the classification layer
    mixer: ClassVar[str]  # regular expression that ends where the names inside a mixer begin
    direction_table: Tensor  # `orders` as a tensor (orders, groups)
    preprocessing: Preprocessing | None  # set by the checkpoint or by the variant
    classes: tuple[str, ...] | None  # names in label order, where they are known
    license: str | None  # of the weights, where it is known
    config: NetworkConfig

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config = config
        self.scan_orders = tuple(self.orders)
        self.preprocessing = self.classes = self.license = None
        self.unchecked_batches = 0  # how many more batches are compared with the preprocessing
        self.register_buffer("direction_table", torch.tensor(list(self.orders.values())), persistent=False)

    def forward(self, images: Tensor, order: Orders = None, *, directions: Tensor | None = None) -> Tensor:
        """Logits under one scan order, one order per image, or `directions` as `scan_directions` returns them.

        On a CUDA device, predictions replay a CUDA graph from the second batch of a shape on, as `tt.fast` does.
        """
        if directions is None and (replayed := self._replay(images, order)) is not None:
            return replayed
        return self.forward_head(self.forward_features(images, order, directions=directions))

    def _replay(self, images: Tensor, order: Orders) -> Tensor | None:
        """Logits from a CUDA graph; None where none may be captured."""
        from trust_tta.models.fast import Fast, may_replay

        if self.training or self.unchecked_batches or not may_replay(images):
            return None
        fast = self.__dict__.get("_fast")
        if fast is None or fast.model != self:  # a copy of the network holds the Fast of its original
            # A weak reference, so that the network is freed with its last user.
            fast = self.__dict__["_fast"] = Fast(cast(nn.Module, weakref.proxy(self)))
        images = self.check_images(images)
        return cast(Fast, fast).replay(images, self.scan_directions(order, len(images)))

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles hold no CUDA graphs."""
        return {name: value for name, value in self.__dict__.items() if name != "_fast"}

    def forward_features(self, images: Tensor, order: Orders = None, *, directions: Tensor | None = None) -> Tensor:
        """The pooled features (n, d) that the head classifies."""
        return self.pool(self.encode(images, order, directions=directions))

    def encode(self, images: Tensor, order: Orders = None, *, directions: Tensor | None = None) -> Tensor:
        """Unpooled features: the last map (n, d, h, w), or all tokens (n, l, d)."""
        raise NotImplementedError

    def pool(self, x: Tensor) -> Tensor:
        """Output of `encode`, normalized and pooled: (n, d)."""
        raise NotImplementedError

    def forward_head(self, features: Tensor) -> Tensor:
        """Logits (n, classes) of pooled features: the mean over the heads."""
        first, *others = [head(features) for head in self.heads()]
        return sum(others, first) / (1 + len(others)) if others else first

    def heads(self) -> list[nn.Linear]:
        """Classification layers; most networks have one."""
        return [cast(nn.Linear, self.get_submodule(self.head_path))]

    def classifier_names(self) -> tuple[str, ...]:
        """Names of the classifier's parameters, which methods hold fixed."""
        own = {id(parameter) for head in self.heads() for parameter in head.parameters()}
        return tuple(name for name, parameter in self.named_parameters() if id(parameter) in own)

    def last_stage(self) -> tuple[str, ...]:
        """Prefixes of the names of the last stage's parameters, those of the head among them."""
        raise NotImplementedError

    def parameter_roles(self) -> dict[str, Role]:
        """The role of every parameter, by name; norms inside a mixer count as `other`, as in the paper."""
        last = self.last_stage()
        return {name: Role(self._kind(name), name.startswith(last)) for name, _ in self.named_parameters()}

    def _kind(self, name: str) -> Kind:
        mixer = re.search(self.mixer, name)
        if mixer is None:  # SyncBatchNorm is a _BatchNorm, too
            module = self.get_submodule(name.rpartition(".")[0])
            return "norm" if isinstance(module, _BatchNorm | nn.LayerNorm | nn.RMSNorm) else "other"
        inside = name[mixer.end() :]
        if inside.startswith(SCAN_PARAMETERS):
            return "scan"
        return "projection" if inside.startswith(PROJECTIONS) else "other"

    def check_images(self, images: Tensor) -> Tensor:
        """Images as float (n, channels, h, w); pixels go through the preprocessing."""
        images = network_input(self, images)
        if images.dim() != 4 or images.shape[1] != self.config.in_channels or not images.is_floating_point():
            raise ShapeError(
                f"images have shape {tuple(images.shape)} and dtype {images.dtype}; "
                f"the network takes floats of shape (n, {self.config.in_channels}, h, w)"
            )
        return images

    def scan_directions(self, order: Orders, images: int) -> Tensor:
        """Directions of an order, (groups,), or one row per image, (images, groups)."""
        if isinstance(order, Tensor | np.ndarray):
            order = cast(Orders, order.tolist())
        if order is None:
            return self.direction_table[0]
        if isinstance(order, (str, ScanOrder)) or all(isinstance(i, int) for i in order):
            return self.direction_table[self._row(cast(OrderLike, order))]
        if len(order) != images:
            raise ShapeError(
                f"{len(order)} orders were given for {images} images; give one order, or one for each image"
            )
        return self.direction_table[[self._row(cast(OrderLike, o)) for o in order]]

    def _row(self, order: OrderLike) -> int:
        return self.scan_orders.index(str(find_order(order, self.scan_orders)))

    def set_stochastic_depth(self, enabled: bool) -> None:
        """Switch stochastic depth, whatever mode the rest of the network is in."""
        for module in self.modules():
            if isinstance(module, StochasticDepth):
                module.train(enabled)

    def set_scan_backend(self, backend: str) -> None:
        """Use one scan backend in every block; "auto" chooses by device."""
        for module in self.modules():
            if hasattr(type(module), "backend"):
                module.backend = backend  # type: ignore[assignment]
