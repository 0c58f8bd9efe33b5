"""ScanOrder: every spelling, the inverse, and errors that name the value."""

from __future__ import annotations

import copy
import pickle
from itertools import product

import numpy as np
import pytest

from trust_tta.errors import ConfigError
from trust_tta.orders import DEFAULT_ORDER, PAPER_ORDERS, OrderLike, ScanOrder

ALL = ScanOrder.all()


def test_there_are_24_in_lexicographic_order() -> None:
    assert len(set(ALL)) == 24
    assert [str(o) for o in ALL] == sorted(str(o) for o in ALL)
    assert sorted(reversed(ALL)) == list(ALL)
    assert ALL[0] == DEFAULT_ORDER == ScanOrder()


@pytest.mark.parametrize("spelling", ["badc", "1032", (1, 0, 3, 2), [1, 0, 3, 2], ScanOrder("badc")], ids=repr)
def test_every_spelling(spelling: OrderLike) -> None:
    order = ScanOrder(spelling)
    assert str(order) == "badc"
    assert repr(order) == "ScanOrder('badc')"
    assert tuple(order) == order.indices == (1, 0, 3, 2)
    assert (len(order), order[2]) == (4, 3)
    assert order == ScanOrder("badc")
    assert hash(order) == hash(ScanOrder("badc"))


def test_integers_of_numpy() -> None:
    assert ScanOrder(np.array([3, 0, 1, 2])) == ScanOrder("dabc")  # type: ignore[arg-type]


@pytest.mark.parametrize("order", ALL, ids=str)
def test_round_trips_and_inverse(order: ScanOrder) -> None:
    assert ScanOrder(str(order)) == ScanOrder(tuple(order)) == order
    assert [order[order.inverse[j]] for j in range(4)] == [0, 1, 2, 3]
    assert [order.inverse[order[k]] for k in range(4)] == [0, 1, 2, 3]
    assert order.inverse.inverse == order
    assert (order == order.inverse) == all(order[order[k]] == k for k in range(4))
    for other in (pickle.loads(pickle.dumps(order)), copy.deepcopy(order)):
        assert other == order


def test_the_inverse_of_a_product_is_the_reversed_product_of_inverses() -> None:
    for first, second in product(ALL, ALL):
        both = ScanOrder([first[second[k]] for k in range(4)])
        assert both.inverse == ScanOrder([second.inverse[first.inverse[k]] for k in range(4)])


def test_ten_orders_are_their_own_inverse_and_the_papers_are_among_them() -> None:
    assert sum(order == order.inverse for order in ALL) == 10
    assert [str(o) for o in PAPER_ORDERS] == ["abcd", "abdc", "adcb", "bacd", "badc", "dbca"]
    assert all(order == order.inverse for order in PAPER_ORDERS)


@pytest.mark.parametrize(
    "value",
    ["abca", "abc", "abcde", "", "ABCD", "0124", "a b c d", (0, 1, 2), (0, 1, 2, 4), (0.5, 1, 2, 3), 5, None, b"abcd"],
    ids=repr,
)
def test_an_error_names_the_value(value: OrderLike) -> None:
    with pytest.raises(ConfigError, match="is not a permutation of four directions") as caught:
        ScanOrder(value)
    assert repr(value) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_order_cannot_be_changed() -> None:
    order = ScanOrder("badc")
    with pytest.raises(AttributeError, match="cannot assign"):
        order.indices = (0, 1, 2, 3)  # type: ignore[misc]
    with pytest.raises(AttributeError):
        order.inverse = order  # type: ignore[misc]


def test_an_order_is_no_tuple_and_no_text() -> None:
    assert ScanOrder("abcd") != "abcd"  # type: ignore[comparison-overlap]
    assert ScanOrder("abcd") != (0, 1, 2, 3)  # type: ignore[comparison-overlap]
