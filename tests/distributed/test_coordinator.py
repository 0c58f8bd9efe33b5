"""Rounds of averaging: stragglers, absent replicas, and a lost coordinator."""

from __future__ import annotations

import asyncio

import pytest
import torch

from tests.distributed.test_averaging import OTHER, SIZE, make_replicas, update, zero
from trust_tta.distributed.averaging import AveragingConfig, MergeResult, ReplicaUpdate
from trust_tta.distributed.coordinator import Coordinator, SynchronizedReplica

QUICK = AveragingConfig(patience=0.05)


def test_round_ends_when_all_replicas_sent_updates() -> None:
    async def run() -> list[MergeResult | None]:
        coordinator = Coordinator(zero(), AveragingConfig(patience=60), replicas=3)
        return await asyncio.gather(*(coordinator.exchange(update(str(i), torch.ones(SIZE))) for i in range(3)))

    merges = asyncio.run(run())
    assert [merge and merge.members for merge in merges] == [("0", "1", "2")] * 3


def test_round_ends_when_patience_runs_out() -> None:
    async def run() -> list[MergeResult | None]:
        coordinator = Coordinator(zero(), QUICK, replicas=3)
        return await asyncio.gather(*(coordinator.exchange(update(str(i), torch.ones(SIZE))) for i in range(2)))

    assert [merge and merge.members for merge in asyncio.run(run())] == [("0", "1")] * 2


def test_straggler_is_merged_in_the_next_round() -> None:
    async def run() -> list[MergeResult | None]:
        coordinator = Coordinator(zero(), QUICK, replicas=2)
        assert await coordinator.exchange(update("late", torch.ones(SIZE))) is None
        return await asyncio.gather(*(coordinator.exchange(update(name, torch.ones(SIZE))) for name in ("late", "b")))

    assert all(merge and merge.members == ("late", "b") for merge in asyncio.run(run()))


def test_absent_replicas_are_not_expected() -> None:
    async def run() -> list[int]:
        coordinator = Coordinator(zero(), AveragingConfig(patience=0.01), replicas=3)
        expected = [coordinator.expected]
        await asyncio.gather(*(coordinator.exchange(update(str(i), torch.ones(SIZE))) for i in range(3)))
        expected.append(coordinator.expected)
        await asyncio.sleep(0.15)
        await coordinator.exchange(update("0", torch.ones(SIZE)))
        return [*expected, coordinator.expected]

    assert asyncio.run(run()) == [3, 3, 1]


def test_replica_alone_in_its_domain_is_not_merged() -> None:
    async def run() -> list[MergeResult | None]:
        coordinator = Coordinator(zero(), QUICK, replicas=3)
        updates = [
            update("a", torch.ones(SIZE)),
            update("b", torch.ones(SIZE)),
            update("c", torch.ones(SIZE), signature=OTHER),
        ]
        return await asyncio.gather(*map(coordinator.exchange, updates))

    first, second, alone = asyncio.run(run())
    assert first is not None
    assert first is second
    assert alone is None


def test_failed_merge_ends_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> MergeResult | None:
        coordinator = Coordinator(zero(), QUICK, replicas=1)
        monkeypatch.setattr(coordinator.merger, "merge", lambda updates: 1 / 0)
        return await coordinator.exchange(update("a", torch.ones(SIZE)))

    assert asyncio.run(run()) is None


def test_bytes_are_those_of_the_tensors() -> None:
    async def run() -> dict[str, int]:
        coordinator = Coordinator(zero(), QUICK, replicas=2)
        await asyncio.gather(*(coordinator.exchange(update(name, torch.ones(SIZE))) for name in "ab"))
        return await coordinator.report()

    state, signature = 4 * (SIZE + 5 + 5) + 16, 4 * 4 + 16
    assert asyncio.run(run()) == {"rounds": 1, "bytes": 2 * (2 * state + signature), "expected": 2, "merges": 1}


def test_replica_continues_without_a_coordinator() -> None:
    (replica,) = make_replicas(1)

    def lost(update: ReplicaUpdate) -> MergeResult | None:
        raise ConnectionError("gone")

    member = SynchronizedReplica(replica, lost, AveragingConfig(every=256), replicas=1)
    torch.manual_seed(1)
    for _ in range(6):  # it tries after 16 images, and after 32 more
        assert member(torch.randn(8, 3, 16, 16)).logits.shape == (8, 4)
    assert (member.alone, member.taken) == (2, 0)
