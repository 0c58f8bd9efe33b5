"""The scheduler: which work may begin, and in which order."""

from __future__ import annotations

import pytest
import torch

from trust_tta.serve.scheduler import PredictRequest, QueueKey, RequestBatch, Scheduler, Task, Work
from trust_tta.serve.settings import RequestError, Settings


def make_scheduler(**settings: float) -> Scheduler:
    return Scheduler(Settings(**{"batch_size": 4, "max_wait": 0.0, **settings}))  # type: ignore[arg-type]


def add(to: Scheduler, stream: str, images: int = 1, *, adapt: bool = True) -> bool:
    return to.add(QueueKey(stream, adapt), PredictRequest(torch.zeros(images, 1, 1, 1)), seconds_per_image=0.5)


def task(to: Scheduler, *streams: str) -> Task:
    added = Task(lambda: None, frozenset(streams))
    to.add_task(added)
    return added


def contents(work: Work | None) -> tuple[str, bool, list[int]]:
    """Its stream, whether it adapts, and the images of its requests."""
    assert isinstance(work, RequestBatch)
    return *work.key, [len(request.images) for request in work.requests]


def test_batch_takes_whole_requests_in_order_up_to_its_size() -> None:
    scheduler = make_scheduler()
    for images in (1, 2, 2, 9, 1):
        add(scheduler, "a", images)
    found = []
    while (work := scheduler.begin()) is not None:
        found.append(contents(work)[2])
        scheduler.end(work)
    assert found == [[1, 2], [2], [9], [1]]
    assert (scheduler.images, scheduler.waiting, scheduler.running) == (0, False, 0)


def test_oldest_queue_comes_first_and_only_equal_keys_share_a_batch() -> None:
    scheduler = make_scheduler()
    for stream, adapt in (("b", True), ("a", False), ("b", False), ("a", True), ("b", True)):
        add(scheduler, stream, adapt=adapt)
    assert [contents(scheduler.begin()), contents(scheduler.begin())] == [("b", True, [1, 1]), ("a", False, [1])]


def test_batches_of_one_stream_run_one_at_a_time() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 4)
    add(scheduler, "a", 4, adapt=False)
    add(scheduler, "a", 4)
    first = scheduler.begin()
    assert first is not None
    assert scheduler.begin() is None
    assert scheduler.due() == 0
    assert scheduler.until_due() is None  # nobody is to wake up before the first has ended
    add(scheduler, "b", 4)
    assert scheduler.due() == 1
    assert contents(scheduler.begin())[0] == "b"
    scheduler.end(first)
    assert contents(scheduler.begin()) == ("a", False, [4])


def test_task_has_exclusive_use_of_its_streams() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 4)
    running = scheduler.begin()
    assert running is not None
    add(scheduler, "a", 4)
    first, second, third = task(scheduler, "a", "new"), task(scheduler, "new"), task(scheduler, "b")
    assert scheduler.begin() is third
    assert scheduler.begin() is None  # neither the second task nor the next batch overtakes the first task
    scheduler.end(running)
    assert scheduler.begin() is first
    add(scheduler, "new", 4)
    assert scheduler.begin() is None
    scheduler.end(first)
    assert scheduler.begin() is second
    assert contents(scheduler.begin())[0] == "a"
    assert scheduler.begin() is None
    scheduler.end(second)
    assert contents(scheduler.begin())[0] == "new"


def test_task_without_streams_starts_at_once() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 4)
    scheduler.begin()
    assert scheduler.begin() is None
    assert task(scheduler) is scheduler.begin()


def test_partial_batch_waits_until_full_or_flushed() -> None:
    scheduler = make_scheduler(max_wait=1000.0)
    assert add(scheduler, "a")  # from now on something will be due
    assert not add(scheduler, "a")
    assert scheduler.begin() is None
    waits = scheduler.until_due()
    assert waits is not None
    assert 900 < waits <= 1000
    assert add(scheduler, "a", 2)  # full
    assert contents(scheduler.begin()) == ("a", True, [1, 1, 2])
    add(scheduler, "b")
    assert scheduler.begin() is None
    scheduler.flush = True
    assert contents(scheduler.begin()) == ("b", True, [1])


def test_queues_are_bounded_per_stream_and_in_total() -> None:
    scheduler = make_scheduler(max_queued=6, max_queued_total=9)
    add(scheduler, "a", 4)
    add(scheduler, "a", 2, adapt=False)
    with pytest.raises(RequestError, match="6 images of the stream 'a' are queued") as refused:
        add(scheduler, "a")
    assert (refused.value.status, refused.value.retry_after) == (429, 4)
    add(scheduler, "b", 3)
    with pytest.raises(RequestError, match="9 images are queued") as refused:
        add(scheduler, "c")
    assert (refused.value.status, refused.value.retry_after) == (503, 5)
    while (work := scheduler.begin()) is not None:
        scheduler.end(work)
    add(scheduler, "a", 6)
    assert scheduler.images == 6
