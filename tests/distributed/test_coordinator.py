"""Rounds in an event loop: stragglers, absentees, and a coordinator that is lost."""

from __future__ import annotations

import asyncio

import pytest
import torch

from tests.distributed.test_averaging import OTHER, SIZE, make_replicas, offer, zero
from trust_tta.distributed.averaging import Averaging, Merge, Offer
from trust_tta.distributed.coordinator import Coordinator, Member

QUICK = Averaging(patience=0.05)


def test_a_round_is_over_when_everyone_is_there() -> None:
    async def meet() -> list[Merge | None]:
        coordinator = Coordinator(zero(), Averaging(patience=60), replicas=3)
        return await asyncio.gather(*(coordinator.meet(offer(str(i), torch.ones(SIZE))) for i in range(3)))

    merges = asyncio.run(meet())
    assert [merge and merge.members for merge in merges] == [("0", "1", "2")] * 3


def test_nobody_waits_for_stragglers_longer_than_patience() -> None:
    async def meet() -> list[Merge | None]:
        coordinator = Coordinator(zero(), QUICK, replicas=3)
        return await asyncio.gather(*(coordinator.meet(offer(str(i), torch.ones(SIZE))) for i in range(2)))

    assert [merge and merge.members for merge in asyncio.run(meet())] == [("0", "1")] * 2


def test_a_straggler_is_merged_with_whoever_comes_next() -> None:
    async def meet() -> list[Merge | None]:
        coordinator = Coordinator(zero(), QUICK, replicas=2)
        assert await coordinator.meet(offer("late", torch.ones(SIZE))) is None
        return await asyncio.gather(*(coordinator.meet(offer(name, torch.ones(SIZE))) for name in ("late", "b")))

    assert all(merge and merge.members == ("late", "b") for merge in asyncio.run(meet()))


def test_who_is_gone_for_long_is_not_waited_for() -> None:
    async def meet() -> list[int]:
        coordinator = Coordinator(zero(), Averaging(patience=0.01), replicas=3)
        expected = [coordinator.expected]
        await asyncio.gather(*(coordinator.meet(offer(str(i), torch.ones(SIZE))) for i in range(3)))
        expected.append(coordinator.expected)
        await asyncio.sleep(0.15)
        await coordinator.meet(offer("0", torch.ones(SIZE)))
        return [*expected, coordinator.expected]

    assert asyncio.run(meet()) == [3, 3, 1]


def test_a_replica_alone_in_its_domain_gets_nothing() -> None:
    async def meet() -> list[Merge | None]:
        coordinator = Coordinator(zero(), QUICK, replicas=3)
        offers = [
            offer("a", torch.ones(SIZE)),
            offer("b", torch.ones(SIZE)),
            offer("c", torch.ones(SIZE), signature=OTHER),
        ]
        return await asyncio.gather(*map(coordinator.meet, offers))

    first, second, alone = asyncio.run(meet())
    assert first is not None
    assert first is second
    assert alone is None


def test_a_merge_that_fails_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    async def meet() -> Merge | None:
        coordinator = Coordinator(zero(), QUICK, replicas=1)
        monkeypatch.setattr(coordinator.merger, "merge", lambda offers: 1 / 0)
        return await coordinator.meet(offer("a", torch.ones(SIZE)))

    assert asyncio.run(meet()) is None


def test_the_bytes_are_those_of_the_tensors() -> None:
    async def meet() -> dict[str, int]:
        coordinator = Coordinator(zero(), QUICK, replicas=2)
        await asyncio.gather(*(coordinator.meet(offer(name, torch.ones(SIZE))) for name in "ab"))
        return await coordinator.report()

    state, signature = 4 * (SIZE + 5 + 5) + 16, 4 * 4 + 16
    assert asyncio.run(meet()) == {"rounds": 1, "bytes": 2 * (2 * state + signature), "expected": 2, "merges": 1}


def test_a_member_goes_on_alone_when_the_coordinator_is_lost() -> None:
    (replica,) = make_replicas(1)

    def lost(offer: Offer) -> Merge | None:
        raise ConnectionError("gone")

    member = Member(replica, lost, Averaging(every=256), replicas=1)
    torch.manual_seed(1)
    for _ in range(6):  # it tries after 16 images, and after 32 more
        assert member(torch.randn(8, 3, 16, 16)).logits.shape == (8, 4)
    assert (member.alone, member.taken) == (2, 0)
