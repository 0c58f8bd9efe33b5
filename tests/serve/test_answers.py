"""Results of other threads in the event loop: each to whom it belongs, and all of a batch with one call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from trust_tta.serve.answers import Answers


def test_each_gets_his_own_result_or_error() -> None:
    async def ask() -> list[Any]:
        answers, futures = Answers(), [Future[int]() for _ in range(40)]
        waiting = [asyncio.ensure_future(answers.wait_for(future)) for future in futures]
        await asyncio.sleep(0)

        def settle(first: int) -> None:
            for number in range(first, len(futures), 4):
                if number % 5:
                    futures[number].set_result(number)
                else:
                    futures[number].set_exception(ValueError(str(number)))

        threads = [threading.Thread(target=settle, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        found = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 30)
        for thread in threads:
            thread.join()
        return found

    for number, found in enumerate(asyncio.run(ask())):
        assert (found == number) if number % 5 else (str(found) == str(number) and isinstance(found, ValueError))


def test_what_is_done_together_takes_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[Callable[..., Any]]()

    async def ask() -> list[int]:
        loop, answers, futures = asyncio.get_running_loop(), Answers(), [Future[int]() for _ in range(32)]
        call = loop.call_soon_threadsafe

        def counted(callback: Callable[..., Any], *given: Any) -> asyncio.Handle:
            calls.append(callback)
            return call(callback, *given)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        found = list[int]()
        for _ in range(2):
            waiting = [asyncio.ensure_future(answers.wait_for(future)) for future in futures]
            await asyncio.sleep(0)
            for number, future in enumerate(futures):
                future.set_result(number)
            found += await asyncio.wait_for(asyncio.gather(*waiting), 30)
            futures = [Future[int]() for _ in range(32)]
        return found

    assert asyncio.run(ask()) == 2 * list(range(32))
    assert len(calls) == 2


def test_a_result_that_is_there_already_is_taken() -> None:
    future = Future[str]()
    future.set_result("there")
    assert asyncio.run(Answers().wait_for(future)) == "there"


def test_who_gives_up_cancels_what_he_waits_for() -> None:
    async def ask(future: Future[None]) -> None:
        async with asyncio.timeout(0):
            await Answers().wait_for(future)

    waiting, begun = Future[None](), Future[None]()
    begun.set_running_or_notify_cancel()
    for future in (waiting, begun):
        with pytest.raises(TimeoutError):
            asyncio.run(ask(future))
    assert waiting.cancelled()
    begun.set_result(None)  # the loop has ended, and nobody hears of it
    assert begun.done()
