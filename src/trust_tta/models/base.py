"""What all our networks share: traversals as data, and what the methods ask of a network."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import Any, ClassVar, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn

from trust_tta.errors import ShapeError
from trust_tta.models.config import NetworkConfig
from trust_tta.models.layers import StochasticDepth
from trust_tta.models.parameter_roles import Role
from trust_tta.orders import LETTERS, OrderLike, ScanOrder, find_order
from trust_tta.preprocessing import Preprocessing, network_input

Orders: TypeAlias = OrderLike | Sequence[OrderLike] | Tensor | None

# Group k of the parameters reads the direction whose letter stands at place k.
FOUR_DIRECTIONS = {"".join(LETTERS[i] for i in row): row for row in permutations(range(4))}


class ScanNetwork(nn.Module):
    """images (n, channels, h, w) -> logits (n, classes), under a traversal that is an argument of the forward pass.

    `traversals` are the names of the orders, the network's own first. What a pass reads is `slots`, a row of integers
    for each of them, or one row per image: one recorded pass serves all orders.
    """

    rows: ClassVar[Mapping[str, Sequence[int]]]  # the slots of each traversal, by its name
    slot_table: Tensor  # the same as a tensor (traversals, groups)
    preprocessing: Preprocessing | None  # what makes images its input; a checkpoint or a variant says
    classes: tuple[str, ...] | None  # names in label order, where they are known
    config: NetworkConfig

    def __init__(self) -> None:
        super().__init__()
        self.traversals = tuple(self.rows)
        self.preprocessing = self.classes = None
        self.unchecked_batches = 0  # how many more batches are compared with the preprocessing
        self.register_buffer("slot_table", torch.tensor(list(self.rows.values())), persistent=False)

    def forward(self, images: Tensor, order: Orders = None, *, slots: Tensor | None = None) -> Tensor:
        """Logits under one traversal order, or one order for each image; or under what `slots` gave for them.

        On a CUDA device predictions are recorded from the second batch of a shape on, as `tt.fast` does.
        """
        replayed = self._replay(images, order) if slots is None else None
        return (
            replayed if replayed is not None else self.forward_head(self.forward_features(images, order, slots=slots))
        )

    def _replay(self, images: Tensor, order: Orders) -> Tensor | None:
        """The logits by a recorded pass, or None where it is not for that."""
        from trust_tta.models.fast import Fast, may_replay

        if self.training or self.unchecked_batches or not may_replay(images):
            return None
        fast = self.__dict__.get("_fast")
        if fast is None or fast.model != self:  # a copy brings that of its original
            # Weakly: a network must go when its last user does.
            fast = self.__dict__["_fast"] = Fast(cast(nn.Module, weakref.proxy(self)))
        images = self.check_images(images)
        return cast(Fast, fast).replay(images, self.slots(order, len(images)))

    def __getstate__(self) -> dict[str, Any]:
        """Copies and files hold no recordings."""
        return {name: value for name, value in self.__dict__.items() if name != "_fast"}

    def forward_features(self, images: Tensor, order: Orders = None, *, slots: Tensor | None = None) -> Tensor:
        """The pooled features (n, d) that the head classifies."""
        return self.pool(self.encode(images, order, slots=slots))

    def encode(self, images: Tensor, order: Orders = None, *, slots: Tensor | None = None) -> Tensor:
        """What is pooled: the last map (n, d, h, w), or all tokens (n, l, d)."""
        raise NotImplementedError

    def pool(self, x: Tensor) -> Tensor:
        """What `encode` gives, normalized and pooled, (n, d)."""
        raise NotImplementedError

    def forward_head(self, features: Tensor) -> Tensor:
        """Logits (n, classes) of pooled features."""
        raise NotImplementedError

    def heads(self) -> list[nn.Linear]:
        """The layers that classify; most networks have one."""
        raise NotImplementedError

    def classifier_names(self) -> tuple[str, ...]:
        """The parameters that give logits, which methods hold fixed."""
        own = {id(parameter) for head in self.heads() for parameter in head.parameters()}
        return tuple(name for name, parameter in self.named_parameters() if id(parameter) in own)

    def parameter_roles(self) -> dict[str, Role]:
        """The role of every parameter, by name."""
        raise NotImplementedError

    def check_images(self, images: Tensor) -> Tensor:
        """Images as the network takes them: floats (n, channels, h, w), made from pixels where they are pixels."""
        images = network_input(self, images)
        if images.dim() != 4 or images.shape[1] != self.config.in_channels or not images.is_floating_point():
            raise ShapeError(
                f"images have shape {tuple(images.shape)} and dtype {images.dtype}; "
                f"the network takes floats of shape (n, {self.config.in_channels}, h, w)"
            )
        return images

    def slots(self, order: Orders, images: int) -> Tensor:
        """The row of an order, (groups,), or one row per image, (images, groups)."""
        if isinstance(order, Tensor | np.ndarray):
            order = cast(Orders, order.tolist())
        if order is None:
            return self.slot_table[0]
        if isinstance(order, (str, ScanOrder)) or all(isinstance(i, int) for i in order):
            return self.slot_table[self._row(cast(OrderLike, order))]
        if len(order) != images:
            raise ShapeError(
                f"{len(order)} orders were given for {images} images; give one order, or one for each image"
            )
        return self.slot_table[[self._row(cast(OrderLike, o)) for o in order]]

    def _row(self, order: OrderLike) -> int:
        return self.traversals.index(str(find_order(order, self.traversals)))

    def set_stochastic_depth(self, enabled: bool) -> None:
        """Switch stochastic depth alone, whatever mode the rest of the network is in."""
        for module in self.modules():
            if isinstance(module, StochasticDepth):
                module.train(enabled)

    def set_scan_backend(self, backend: str) -> None:
        """Use one scan backend in every block; "auto" chooses by device."""
        for module in self.modules():
            if "backend" in module.__dict__:
                module.backend = backend  # type: ignore[assignment]
