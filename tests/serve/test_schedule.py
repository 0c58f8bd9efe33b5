"""What may begin, in which order, and beside what."""

from __future__ import annotations

import pytest
import torch

from trust_tta.serve.schedule import Key, Lot, Request, Schedule, Task, Work
from trust_tta.serve.settings import RequestError, Settings


def schedule(*, side_by_side: bool = False, **settings: float) -> Schedule:
    return Schedule(Settings(**{"batch_size": 4, "max_wait": 0.0, **settings}), side_by_side=side_by_side)  # type: ignore[arg-type]


def add(to: Schedule, stream: str, images: int = 1, *, adapt: bool = True) -> bool:
    return to.add(Key(stream, adapt), Request(torch.zeros(images, 1, 1, 1)), seconds_per_image=0.5)


def task(to: Schedule, *streams: str) -> Task:
    added = Task(lambda: None, frozenset(streams))
    to.add_task(added)
    return added


def lot(work: Work | None) -> tuple[str, bool, list[int]]:
    """Its stream, whether it adapts, and the images of its requests."""
    assert isinstance(work, Lot)
    return *work.key, [len(request.images) for request in work.requests]


def test_a_batch_takes_whole_requests_in_order_and_no_more_than_fit() -> None:
    plan = schedule()
    for images in (1, 2, 2, 9, 1):
        add(plan, "a", images)
    found = []
    while (work := plan.begin()) is not None:
        found.append(lot(work)[2])
        plan.end(work)
    assert found == [[1, 2], [2], [9], [1]]
    assert (plan.images, plan.waiting, plan.running) == (0, False, 0)


def test_who_has_waited_longest_comes_first_and_only_alike_requests_share() -> None:
    plan = schedule()
    for stream, adapt in (("b", True), ("a", False), ("b", False), ("a", True), ("b", True)):
        add(plan, stream, adapt=adapt)
    assert [lot(plan.begin()), lot(plan.begin())] == [("b", True, [1, 1]), ("a", False, [1])]


def test_batches_of_one_stream_wait_for_each_other() -> None:
    plan = schedule()
    add(plan, "a", 4)
    add(plan, "a", 4, adapt=False)
    add(plan, "a", 4)
    first = plan.begin()
    assert first is not None
    assert plan.begin() is None
    assert plan.due() == 0
    assert plan.until_due() is None  # nobody is to wake up before the first has ended
    add(plan, "b", 4)
    assert plan.due() == 1
    assert lot(plan.begin())[0] == "b"
    plan.end(first)
    assert lot(plan.begin()) == ("a", False, [4])


def test_batches_that_change_nothing_do_not() -> None:
    plan = schedule(side_by_side=True)
    for _ in range(3):
        add(plan, "a", 4)
    assert plan.due() == 3
    assert [lot(plan.begin())[0] for _ in range(3)] == ["a"] * 3
    assert plan.running == 3


@pytest.mark.parametrize("side_by_side", [False, True])
def test_a_task_has_its_streams_to_itself(side_by_side: bool) -> None:
    plan = schedule(side_by_side=side_by_side)
    add(plan, "a", 4)
    running = plan.begin()
    assert running is not None
    add(plan, "a", 4)
    first, second, third = task(plan, "a", "new"), task(plan, "new"), task(plan, "b")
    assert plan.begin() is third
    assert plan.begin() is None  # neither the second task nor the next batch overtakes the first task
    plan.end(running)
    assert plan.begin() is first
    add(plan, "new", 4)
    assert plan.begin() is None
    plan.end(first)
    assert plan.begin() is second
    assert lot(plan.begin())[0] == "a"
    assert plan.begin() is None
    plan.end(second)
    assert lot(plan.begin())[0] == "new"


def test_a_task_without_streams_waits_for_nothing() -> None:
    plan = schedule()
    add(plan, "a", 4)
    plan.begin()
    assert plan.begin() is None
    assert task(plan) is plan.begin()


def test_requests_wait_for_others_until_the_batch_is_full_or_all_is_due() -> None:
    plan = schedule(max_wait=1000.0)
    assert add(plan, "a")  # from now on something will be due
    assert not add(plan, "a")
    assert plan.begin() is None
    waits = plan.until_due()
    assert waits is not None
    assert 900 < waits <= 1000
    assert add(plan, "a", 2)  # full
    assert lot(plan.begin()) == ("a", True, [1, 1, 2])
    add(plan, "b")
    assert plan.begin() is None
    plan.everything = True
    assert lot(plan.begin()) == ("b", True, [1])


def test_queues_are_bounded_by_stream_and_in_all() -> None:
    plan = schedule(most_queued=6, most_queued_in_all=9)
    add(plan, "a", 4)
    add(plan, "a", 2, adapt=False)
    with pytest.raises(RequestError, match="6 images of the stream 'a' are queued") as refused:
        add(plan, "a")
    assert (refused.value.status, refused.value.retry_after) == (429, 4)
    add(plan, "b", 3)
    with pytest.raises(RequestError, match="9 images are queued") as refused:
        add(plan, "c")
    assert (refused.value.status, refused.value.retry_after) == (503, 5)
    while (work := plan.begin()) is not None:
        plan.end(work)
    add(plan, "a", 6)
    assert plan.images == 6
