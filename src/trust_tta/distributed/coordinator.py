"""Rounds of offers: replicas meet at a coordinator, wait briefly for each other, and continue alone if nobody answers.

Nothing here depends on a cluster: `Coordinator.meet` is a coroutine, and a member is given a function that calls it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trust_tta.distributed.averaging import Averaging, Merge, Merger, Offer, State
from trust_tta.distributed.replicas import Replica
from trust_tta.live.session import Result

ABSENT = 10.0  # times the patience, after which a replica is no longer waited for

log = logging.getLogger("trust_tta.distributed")


@dataclass(eq=False)
class _Round:
    offers: dict[str, Offer] = field(default_factory=dict)
    merged: asyncio.Event = field(default_factory=asyncio.Event)
    merges: list[Merge] = field(default_factory=list)


class Coordinator:
    """Merges the offers of a round as soon as everyone has come, or patience runs out.

    A replica that has not come for a while is not waited for. Only the last merges are remembered: after a crash, a new
    coordinator averages the offers as they are.
    """

    def __init__(self, source: State, policy: Averaging | None = None, *, replicas: int) -> None:
        self.merger = Merger(source, policy)
        self.replicas = replicas
        self.rounds = self.bytes = 0
        self._round = _Round()
        self._heard: dict[str, float] = {}  # when each replica came last
        self._begun = time.monotonic()

    @property
    def expected(self) -> int:
        """How many replicas to wait for: all at the beginning, then those that came recently."""
        since = time.monotonic() - ABSENT * self.merger.policy.patience
        lately = sum(heard >= since for heard in self._heard.values())
        return max(lately, self.replicas) if self._begun >= since else lately

    async def meet(self, offer: Offer) -> Merge | None:
        """The merge that the replica belongs to, once the round is over; None where it is alone in its domain."""
        present = self._round
        self.bytes += offer.bytes
        if not present.offers:
            asyncio.get_running_loop().call_later(self.merger.policy.patience, self._close, present)
        present.offers[offer.replica] = offer
        self._heard[offer.replica] = time.monotonic()
        if len(present.offers) >= self.expected:
            self._close(present)
        await present.merged.wait()
        found = next((merge for merge in present.merges if offer.replica in merge.members), None)
        self.bytes += found.state.bytes if found else 0
        return found

    async def report(self) -> dict[str, int]:
        return {"rounds": self.rounds, "bytes": self.bytes, "expected": self.expected, "merges": self.merger.number}

    def _close(self, closing: _Round) -> None:
        if closing is not self._round:
            return  # everyone had come before patience ran out
        self._round = _Round()
        self.rounds += 1
        try:
            closing.merges = self.merger.merge(list(closing.offers.values()))
        except Exception:  # one bad offer must not make anyone wait forever
            log.exception("the offers of a round could not be merged")
        closing.merged.set()


class Member:
    """A replica that meets the others as often as `policy` says; losing the coordinator costs it nothing.

    `replicas`: how many share the images. `meet` returns the merge of an offer, or None, or raises. `alone`: how often
    nobody answered.
    """

    def __init__(
        self, replica: Replica, meet: Callable[[Offer], Merge | None], policy: Averaging, *, replicas: int
    ) -> None:
        self.replica, self.meet, self.policy, self.replicas = replica, meet, policy, replicas
        self.taken = self.returned = self.alone = 0
        self._since = self._met = 0

    def __call__(self, images: Any) -> Result:
        result = self.replica(images)
        self._since += len(result.logits)
        if self._since * self.replicas >= self.policy.interval(self._met):
            self._since, self._met = 0, self._met + 1
            self.meet_others()
        return result

    def meet_others(self) -> None:
        offer = self.replica.offer()
        try:
            merge = self.meet(offer)
        except Exception as error:  # whatever happened to the others, this one continues
            self.alone += 1
            log.warning("'%s' met nobody: %s", self.replica.name, error)
            return
        if merge is not None:
            taken = self.replica.take(merge, offer).action == "take"
            self.taken, self.returned = self.taken + taken, self.returned + (not taken)
