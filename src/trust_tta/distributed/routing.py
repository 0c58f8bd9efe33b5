"""Assign streams to replicas by rendezvous hashing: few streams move when a replica is lost or returns."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

Release = Callable[[int, str], Awaitable[None]]


def home_of(stream: str, replicas: Iterable[int]) -> int | None:
    """The replica with the highest hash for the stream."""
    return max(replicas, key=lambda number: hashlib.sha256(f"{number}:{stream}".encode()).digest(), default=None)


@dataclass(eq=False)
class _Assignment:
    replica: int | None = None
    pending: int = 0  # requests in progress
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    idle: asyncio.Event = field(default_factory=asyncio.Event)


class StreamRouter:
    """The replica of every stream; `live` are the replicas that answer.

    When the home of a stream changes, new requests wait until those in progress are answered and the old replica has
    released the stream, or is lost.
    """

    def __init__(self, release: Release) -> None:
        self.live: set[int] = set()
        self._release = release
        self._assignments: dict[str, _Assignment] = {}

    def replica_of(self, stream: str) -> int | None:
        found = self._assignments.get(stream)
        return None if found is None else found.replica

    def assign(self, stream: str, replica: int) -> None:
        self._assignments.setdefault(stream, _Assignment()).replica = replica

    def forget(self, stream: str) -> None:
        self._assignments.pop(stream, None)

    def lose(self, replica: int) -> None:
        self.live.discard(replica)
        for assigned in self._assignments.values():
            if assigned.replica == replica:
                assigned.replica = None

    @asynccontextmanager
    async def visit(self, stream: str) -> AsyncIterator[int | None]:
        """Yield the replica of the stream, which keeps it inside the context; None if no replica is live."""
        assigned = self._assignments.setdefault(stream, _Assignment())
        async with assigned.lock:
            if assigned.replica != home_of(stream, self.live):
                while assigned.pending:
                    assigned.idle.clear()
                    await assigned.idle.wait()
                if assigned.replica is not None and assigned.replica in self.live:
                    await self._release(assigned.replica, stream)
                assigned.replica = home_of(stream, self.live)  # it may have changed in the meantime
            assigned.pending += 1
            replica = assigned.replica
        try:
            yield replica
        finally:
            assigned.pending -= 1
            if assigned.pending == 0:
                assigned.idle.set()
