"""Rounds of averaging: a coordinator collects updates of replicas, waits briefly, and returns merged states.

Nothing here depends on a cluster: `Coordinator.exchange` is a coroutine, and replicas get a function that calls it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trust_tta.distributed.averaging import AveragingConfig, Merger, MergeResult, ReplicaState, ReplicaUpdate
from trust_tta.distributed.replicas import Replica
from trust_tta.live.session import Result

ABSENT_AFTER = 10.0  # times the patience: replicas that sent nothing for so long are not waited for

log = logging.getLogger("trust_tta.distributed")


@dataclass(eq=False)
class _Round:
    updates: dict[str, ReplicaUpdate] = field(default_factory=dict)
    merged: asyncio.Event = field(default_factory=asyncio.Event)
    merges: list[MergeResult] = field(default_factory=list)


class Coordinator:
    """Merges the updates of a round once all expected replicas have sent theirs, or after `patience` seconds.

    Only the last merges are remembered; a new coordinator, after a crash, averages updates as they are.
    """

    def __init__(self, source: ReplicaState, policy: AveragingConfig | None = None, *, replicas: int) -> None:
        self.merger = Merger(source, policy)
        self.replicas = replicas
        self.rounds = self.bytes = 0
        self._round = _Round()
        self._heard: dict[str, float] = {}  # when each replica sent its last update
        self._begun = time.monotonic()

    @property
    def expected(self) -> int:
        """The number of replicas to wait for: all at the beginning, then those that sent an update recently."""
        since = time.monotonic() - ABSENT_AFTER * self.merger.policy.patience
        lately = sum(heard >= since for heard in self._heard.values())
        return max(lately, self.replicas) if self._begun >= since else lately

    async def exchange(self, update: ReplicaUpdate) -> MergeResult | None:
        """Send an update and wait for the round to end; returns the merge of its domain, None if no other is in it."""
        present = self._round
        self.bytes += update.bytes
        if not present.updates:
            asyncio.get_running_loop().call_later(self.merger.policy.patience, self._close, present)
        present.updates[update.replica] = update
        self._heard[update.replica] = time.monotonic()
        if len(present.updates) >= self.expected:
            self._close(present)
        await present.merged.wait()
        found = next((merge for merge in present.merges if update.replica in merge.members), None)
        self.bytes += found.state.bytes if found else 0
        return found

    async def report(self) -> dict[str, int]:
        return {"rounds": self.rounds, "bytes": self.bytes, "expected": self.expected, "merges": self.merger.number}

    def _close(self, closing: _Round) -> None:
        if closing is not self._round:
            return  # it was complete before patience ran out
        self._round = _Round()
        self.rounds += 1
        try:
            closing.merges = self.merger.merge(list(closing.updates.values()))
        except Exception:  # one bad update must not block the others
            log.exception("the updates of a round could not be merged")
        closing.merged.set()


class SynchronizedReplica:
    """A replica that exchanges updates at the intervals of `policy`, and continues alone without a coordinator.

    `replicas`: how many share the images. `exchange` returns the merge of an update, or None, or raises. `alone`: the
    number of failed exchanges.
    """

    def __init__(
        self,
        replica: Replica,
        exchange: Callable[[ReplicaUpdate], MergeResult | None],
        policy: AveragingConfig,
        *,
        replicas: int,
    ) -> None:
        self.replica, self.exchange, self.policy, self.replicas = replica, exchange, policy, replicas
        self.taken = self.returned = self.alone = 0
        self._since = self._exchanges = 0

    def __call__(self, images: Any) -> Result:
        result = self.replica(images)
        self._since += len(result.logits)
        if self._since * self.replicas >= self.policy.interval(self._exchanges):
            self._since, self._exchanges = 0, self._exchanges + 1
            self.synchronize()
        return result

    def synchronize(self) -> None:
        update = self.replica.make_update()
        try:
            merge = self.exchange(update)
        except Exception as error:  # the replica continues alone
            self.alone += 1
            log.warning("'%s' could not exchange updates: %s", self.replica.name, error)
            return
        if merge is not None:
            taken = self.replica.adopt(merge, update).action == "take"
            self.taken, self.returned = self.taken + taken, self.returned + (not taken)
