"""A traversal order is a permutation of the parameter groups: it changes who reads what and moves no data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import trust_tta as tt
from tests.models.networks import TINY_CONFIGS, tiny_images, tiny_network
from trust_tta.errors import ConfigError, ShapeError

ORDERS = tt.ScanOrder.all()
GROUPED = ("x_proj_weight", "dt_projs_weight", "dt_projs_bias", "A_logs", "Ds")  # the first axis holds the four groups


def permute_groups(state: dict[str, Tensor], groups: list[int]) -> dict[str, Tensor]:
    """The state dict whose group j is group groups[j] of `state`."""
    return {
        name: t.view(4, -1)[groups].view(t.shape) if name.endswith(GROUPED) else t.clone() for name, t in state.items()
    }


@pytest.mark.parametrize("config", TINY_CONFIGS)
def test_orders_change_nothing_when_the_groups_are_equal(config: str) -> None:
    model, images = tiny_network(TINY_CONFIGS[config]), tiny_images()
    model.load_state_dict(permute_groups(model.state_dict(), [2, 2, 2, 2]))
    expected = model(images)
    for order in ORDERS:
        torch.testing.assert_close(model(images, order=order), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_an_order_equals_permuted_groups(order: tt.ScanOrder) -> None:
    model, images = tiny_network(), tiny_images()
    under_order = model(images, order=order)
    if order != tt.ScanOrder("abcd"):
        assert (under_order - model(images)).abs().max() > 1e-6
    group_of_direction = [list(order).index(j) for j in range(4)]
    model.load_state_dict(permute_groups(model.state_dict(), group_of_direction))
    assert torch.equal(under_order, model(images))


@pytest.mark.parametrize("config", TINY_CONFIGS)
def test_one_order_an_image_equals_each_image_alone(config: str) -> None:
    model, images = tiny_network(TINY_CONFIGS[config]), tiny_images(5)
    orders = ["abcd", "badc", (3, 0, 1, 2), tt.ScanOrder("bcda"), "0132"]
    together = model(images, order=orders)
    for i, order in enumerate(orders):
        alone = model(images[i : i + 1], order=order)
        torch.testing.assert_close(together[i : i + 1], alone, rtol=1e-11, atol=1e-11)


def test_gradients_of_one_order_an_image_are_the_sum_over_images() -> None:
    model, images, orders = tiny_network(), tiny_images(3), ["abcd", "bcda", "dcba"]
    parameters = list(model.parameters())
    together = torch.autograd.grad(model(images, order=orders).square().sum(), parameters)
    alone = [
        torch.autograd.grad(model(images[i : i + 1], order=o).square().sum(), parameters) for i, o in enumerate(orders)
    ]
    for got, *parts in zip(together, *alone, strict=True):
        torch.testing.assert_close(got, torch.stack(parts).sum(0), rtol=1e-9, atol=1e-9)


class Recorder(TorchDispatchMode):
    """Every operator that runs, with the shapes of its tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, tuple[tuple[int, ...], ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shapes = tuple(tuple(a.shape) for a in args if isinstance(a, Tensor))
        self.calls.append((str(func), shapes))
        return func(*args, **(kwargs or {}))


MOVES = ("aten.index", "aten.gather", "aten.flip", "aten.roll", "aten.take", "aten.scatter", "aten.select_scatter")


def test_an_order_moves_no_data() -> None:
    model, images = tiny_network(), tiny_images()
    recorded = []
    for order in ("abcd", "cdab", "bcda"):
        with torch.no_grad(), Recorder() as recorder:
            model(images, order=order)
        recorded.append(recorder.calls)
    assert recorded[0]
    assert recorded[1] == recorded[2] == recorded[0]  # the same operators on the same shapes, whatever the order
    moved = [shapes[0] for name, shapes in recorded[0] if name.startswith(MOVES)]
    assert moved
    assert all(shape[0] == 4 for shape in moved)  # only the four parameter groups are picked from, never a map


def test_an_order_is_the_same_numbers_in_a_tensor() -> None:
    model, images = tiny_network(), tiny_images(3)
    orders = [(0, 2, 1, 3), (3, 1, 0, 2), (1, 0, 3, 2)]
    for order in orders:
        assert torch.equal(model(images, order=torch.tensor(order)), model(images, order=order))
        assert torch.equal(model(images, order=np.array(order)), model(images, order=order))
    assert torch.equal(model(images, order=torch.tensor(orders)), model(images, order=orders))
    with pytest.raises(ConfigError, match="not a permutation"):
        model(images, order=torch.tensor([0, 0, 1, 2]))


def test_wrong_orders_are_refused() -> None:
    model, images = tiny_network(), tiny_images(3)
    with pytest.raises(ConfigError, match="scan order 'abca' is not a permutation"):
        model(images, order="abca")
    with pytest.raises(ShapeError, match="2 orders were given for 3 images"):
        model(images, order=["abcd", "badc"])
