"""From the threads of the engine to the event loop: what many requests wait for comes with one call."""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


class Answers:
    """Wakes the coroutines of one event loop, all together whose futures are done by then."""

    def __init__(self) -> None:
        self._done: deque[asyncio.Future[None]] = deque()
        self._called = False  # the event loop will look at `_done`

    async def wait_for(self, future: Future[T]) -> T:
        """The result of a future of other threads; it is cancelled with the coroutine that waits."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        future.add_done_callback(lambda _: self._tell(waiter, loop))
        try:
            await waiter
        finally:
            future.cancel()
        return future.result()

    def _tell(self, waiter: asyncio.Future[None], loop: asyncio.AbstractEventLoop) -> None:
        self._done.append(waiter)
        if not self._called:  # also where another thread asks at this moment: one call too many does no harm
            self._called = True
            with suppress(RuntimeError):  # the loop has ended, and nobody waits
                loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._called = False  # first: what is done from here on calls again
        while self._done:
            waiter = self._done.popleft()
            if not waiter.done():
                waiter.set_result(None)
