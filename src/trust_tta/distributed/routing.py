"""Which replica has which stream; as few streams as possible move when a replica comes or goes."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

Release = Callable[[int, str], Awaitable[None]]


def home_of(stream: str, replicas: Iterable[int]) -> int | None:
    """The replica with the highest hash for the stream: when one is lost, only its own streams move."""
    return max(replicas, key=lambda number: hashlib.sha256(f"{number}:{stream}".encode()).digest(), default=None)


@dataclass(eq=False)
class _Place:
    """Where a stream is. `asked`: requests that its replica is answering now."""

    replica: int | None = None
    asked: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    idle: asyncio.Event = field(default_factory=asyncio.Event)


class Places:
    """The places of all streams. `live`: the replicas that answer.

    A stream moves when its home changes: new requests wait until those in progress are answered and its replica has
    released it; there is nothing to wait for where the replica is lost.
    """

    def __init__(self, release: Release) -> None:
        self.live: set[int] = set()
        self._release = release
        self._places: dict[str, _Place] = {}

    def of(self, stream: str) -> int | None:
        place = self._places.get(stream)
        return None if place is None else place.replica

    def put(self, stream: str, replica: int) -> None:
        """Record that a replica has the stream."""
        self._places.setdefault(stream, _Place()).replica = replica

    def forget(self, stream: str) -> None:
        self._places.pop(stream, None)

    def lose(self, replica: int) -> None:
        """Record that a replica is lost, with all its streams."""
        self.live.discard(replica)
        for place in self._places.values():
            if place.replica == replica:
                place.replica = None

    @asynccontextmanager
    async def visit(self, stream: str) -> AsyncIterator[int | None]:
        """The replica that has the stream for as long as the context lasts; None where none is live."""
        place = self._places.setdefault(stream, _Place())
        async with place.lock:
            await self._bring_home(stream, place)
            place.asked += 1
            replica = place.replica
        try:
            yield replica
        finally:
            place.asked -= 1
            if place.asked == 0:
                place.idle.set()

    async def _bring_home(self, stream: str, place: _Place) -> None:
        home = home_of(stream, self.live)
        if place.replica == home:
            return
        while place.asked:
            place.idle.clear()
            await place.idle.wait()
        if place.replica is not None and place.replica in self.live:
            await self._release(place.replica, stream)
        place.replica = home_of(stream, self.live)  # it may have changed in the meantime
