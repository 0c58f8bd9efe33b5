"""The engine: order and size of batches, bounds of the queues, tasks between batches, and the end."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.conftest import SetThreads
from tests.live.toys import clean, draw, make, states_equal, toy
from tests.serve.services import make_network, pixels
from trust_tta.errors import StateError
from trust_tta.live.guard import Guard
from trust_tta.live.snapshots import Folder
from trust_tta.live.stream import Stream
from trust_tta.methods.registry import create_method
from trust_tta.methods.tent import Tent
from trust_tta.ops.segmentation_logits import Logits
from trust_tta.preprocessing import Preprocessing
from trust_tta.serve.engine import BatchResult, Engine, RequestPrediction
from trust_tta.serve.service import Service
from trust_tta.serve.settings import RequestError, Settings
from trust_tta.serve.stream_cache import StreamCache

PREPROCESSING = Preprocessing(size=8, resize=None)
SIZE = 4  # of a batch: every request of four images is one, and due at once


class Adapting(Tent):
    """Tent that can be watched while it adapts."""

    name = "tent"
    inside: Callable[[Tensor], object]

    def adapt(self, images: Tensor) -> Logits:
        self.inside(images)
        return super().adapt(images)


@contextmanager
def engine(
    folder: Path,
    inside: Callable[[Tensor], object],
    *,
    on_batch: Callable[[BatchResult], None] = lambda batch: None,
    max_loaded: int = 16,
    **settings: float,
) -> Iterator[Engine]:
    class Watched(Adapting):
        name = Adapting.name

    Watched.inside = staticmethod(inside)  # forks have it, too
    streams = StreamCache(
        create_method(Watched, toy(), lr=1e-3, statistics="stream"),
        folder,
        guard=Guard(),
        max_loaded=max_loaded,
        max_streams=100,
        on_event=lambda stream, event: None,
    )
    limits = Settings(**{"batch_size": SIZE, "max_wait": 0.0, **settings})  # type: ignore[arg-type]
    made = Engine(streams, PREPROCESSING, limits, on_batch)
    try:
        yield made
    finally:
        made.drain()


@dataclass
class Inside:
    """Blocks a batch until `open` is set."""

    entered: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    open: threading.Event = field(default_factory=threading.Event)

    def __call__(self, images: Tensor) -> None:
        self.entered.release()
        assert self.open.wait(30)


def logits(future: Future[RequestPrediction]) -> Tensor:
    return future.result(60).logits


def test_batches_of_one_stream_run_in_order(tmp_path: Path, threads: SetThreads) -> None:
    """Each stream answers bit for bit as if it had been alone."""
    threads(1)  # sums depend on their number
    names, rounds = ("a", "b", "c"), 8
    sent = {name: clean(rounds, size=SIZE, seed=i) for i, name in enumerate(names)}
    with engine(tmp_path, lambda images: None) as run:
        answers = {name: list[Future[RequestPrediction]]() for name in names}
        for step in range(rounds):
            for name in names:
                answers[name].append(run.submit(name, sent[name][step], adapt=True))
        found = {name: [logits(answer) for answer in answers[name]] for name in names}
    for name in names:
        alone = Stream(make("tent", lr=1e-3, statistics="stream"))
        assert states_equal(found[name], [alone(images).logits for images in sent[name]])


def test_streams_moved_to_disk_continue_where_they_were(tmp_path: Path, threads: SetThreads) -> None:
    """Six streams with two places in memory: each answers bit for bit as if it had stayed there."""
    threads(1)
    names, chance, sent = [f"s{i}" for i in range(6)], random.Random(0), dict[str, list[Tensor]]()
    with engine(tmp_path, lambda images: None, max_loaded=2) as run:
        answers = {name: list[Future[RequestPrediction]]() for name in names}
        for step in range(36):
            name = chance.choice(names)
            images = draw(SIZE, seed=step)[0]
            sent.setdefault(name, []).append(images)
            answers[name].append(run.submit(name, images, adapt=True))
        found = {name: [logits(answer) for answer in answers[name]] for name in names}
        assert len(run.streams.loaded) == 2
    for name in names:
        alone = Stream(make("tent", lr=1e-3, statistics="stream"))
        assert states_equal(found[name], [alone(images).logits for images in sent[name]])


def test_drain_answers_everything_and_closes_streams(tmp_path: Path) -> None:
    watch = Inside()
    with engine(tmp_path, watch) as run:
        answers = [run.submit(name, images, adapt=True) for name in "abc" for images in clean(3, size=SIZE)]
        assert watch.entered.acquire(timeout=30)
        tasks = [run.submit_task(lambda name=name: name) for name in "abc"]  # type: ignore[misc]
        with ThreadPoolExecutor(1) as other:
            draining = other.submit(run.drain)
            while run.alive:
                time.sleep(0.001)
            with pytest.raises(RequestError, match="stopping"):
                run.submit("a", clean(1)[0], adapt=True)
            with pytest.raises(RequestError, match="stopping"):
                run.submit_task(lambda: None)
            assert not draining.done()
            watch.open.set()
            draining.result(60)
        assert all(answer.done() and answer.result().adapted for answer in answers)
        assert [task.result(0) for task in tasks] == ["a", "b", "c"]
        assert (run.queued, run.streams.loaded) == (0, [])
    for name in "abc":
        with closing(Folder(tmp_path / name)) as folder:  # nobody holds it any more
            newest, problems = folder.newest()
            assert newest is not None
            assert (newest.state["books"]["images"], problems) == (3 * SIZE, [])


def test_error_fails_only_the_request_at_fault(tmp_path: Path) -> None:
    """Of the requests that share a batch, only the one at fault fails."""

    def inside(images: Tensor) -> None:
        if (images[:, 0, 0, 0] == 7).any():
            raise StateError("seven")

    with engine(tmp_path, inside) as run:
        held, let_go = threading.Event(), threading.Event()
        run.submit_task(lambda: held.set() or let_go.wait(30))  # type: ignore[func-returns-value]
        assert held.wait(30)
        images, bad = draw(SIZE, seed=0)[0], draw(1, seed=1)[0]
        bad[0, 0, 0, 0] = 7
        good = run.submit("a", images, adapt=True)
        shared = [run.submit("b", part, adapt=True) for part in (images[:2], bad, images[3:])]
        let_go.set()
        assert good.result(30).adapted
        assert [answer.exception(30) is None for answer in shared] == [True, False, True]
        assert "seven" in str(shared[1].exception())
        assert run.submit_task(lambda: run.streams.open("b").method.counters.batches).result(30) == 2
        assert run.alive


def test_pixels_and_network_input_share_a_batch(tmp_path: Path) -> None:
    network, batches = make_network(tmp_path, "bn"), list[BatchResult]()
    streams = StreamCache(
        network.method, tmp_path / "streams", guard=Guard(), max_loaded=2, max_streams=2, on_event=lambda *_: None
    )
    run = Engine(streams, network.preprocessing, Settings(batch_size=10, max_wait=0.0), batches.append)
    held, raw = threading.Event(), torch.from_numpy(pixels(10))
    run.submit_task(lambda: held.wait(30))
    parts = [network.preprocessing.normalize(raw[:3]), raw[3:4], raw[4:8], network.preprocessing.normalize(raw[8:])]
    answers = [run.submit("a", part, adapt=True) for part in parts]
    only_pixels = [run.submit("b", raw[start : start + 5], adapt=True) for start in (0, 5)]
    held.set()
    expected = Stream(make_network(tmp_path, "bn").method)(network.preprocessing(raw)).logits
    assert torch.equal(torch.cat([logits(answer) for answer in answers]), expected)
    assert torch.equal(torch.cat([logits(answer) for answer in only_pixels]), expected)
    assert [len(batch.images) for batch in batches] == [10, 10]
    run.drain()


def test_requests_of_many_clients_are_all_logged_and_counted(tmp_path: Path, threads: SetThreads) -> None:
    threads(2)
    network = make_network(tmp_path, "source")
    service = Service(network, tmp_path / "state", settings=Settings(batch_size=2, max_wait=0.0))
    names, count = ("a", "b", "c"), 60

    def send(number: int) -> RequestPrediction:
        images = network.preprocessing(pixels(1, seed=number))
        return service.predict(images, stream=names[number % 3], adapt=True).result(60)

    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(send, range(count)))
    assert 'trust_tta_images_total{adapted="true"} 60.0' in service.metrics.text().decode()
    found = service.give_feedback([(f"{answer.id}-0", int(answer.output[0].argmax())) for answer in answers])
    assert all(label is not None and label.correct for label in found)
    summaries = service.dashboard.summaries()
    assert {name: summaries[name]["labels"] for name in names} == dict.fromkeys(names, count // 3)
    service.stop()
    for name in names:
        assert service.streams.open(name).images == count // 3
    service.streams.close()


def test_batch_takes_whole_requests_in_order_and_only_of_one_key(tmp_path: Path) -> None:
    """The queue that has waited longest comes first; a task comes before any batch."""
    found, order = list[tuple[str, list[int]]](), list[str]()

    def note(batch: BatchResult) -> None:
        found.append((batch.name, [len(list(g)) for _, g in groupby(batch.ids, lambda name: name.partition("-")[0])]))
        order.append("batch")

    held, let_go = threading.Event(), threading.Event()
    with engine(tmp_path, lambda images: None, on_batch=note) as run:
        run.submit_task(lambda: held.set() or let_go.wait(30))  # type: ignore[func-returns-value]
        assert held.wait(30)
        answers = [run.submit("b", draw(n, seed=n)[0], adapt=True) for n in (1, 2)]
        answers += [run.submit("a", draw(1, seed=3)[0], adapt=adapt) for adapt in (True, False)]
        answers += [run.submit("b", draw(n, seed=n)[0], adapt=True) for n in (2, 9, 1)]
        run.submit_task(lambda: order.append("task"))
        let_go.set()
        assert [len(answer.result(30).output) for answer in answers] == [1, 2, 1, 1, 2, 9, 1]
        assert run.queued == 0
    assert found == [("b", [1, 2]), ("a", [1]), ("a", [1]), ("b", [2]), ("b", [9]), ("b", [1])]
    assert order[0] == "task"


def test_partial_batch_waits_until_full_or_drained(tmp_path: Path) -> None:
    sizes = list[int]()
    with engine(tmp_path, lambda i: None, on_batch=lambda b: sizes.append(len(b.images)), max_wait=1000.0) as run:
        first = [run.submit("a", draw(n, seed=n)[0], adapt=True) for n in (1, 1, 2)]
        for answer in first:
            answer.result(30)
        assert sizes == [SIZE]
        last = run.submit("a", draw(1, seed=5)[0], adapt=True)
        run.submit_task(lambda: None).result(30)
        assert not last.done()
    assert last.result(0).adapted
    assert sizes == [SIZE, 1]


def test_queues_are_bounded_per_stream_and_in_total(tmp_path: Path) -> None:
    with engine(
        tmp_path, lambda images: None, batch_size=100, max_wait=1000.0, max_queued=6, max_queued_total=9
    ) as run:
        run.submit("a", draw(4, seed=0)[0], adapt=True)
        run.submit("a", draw(2, seed=1)[0], adapt=False)
        with pytest.raises(RequestError, match="6 images of the stream 'a' are queued") as refused:
            run.submit("a", draw(1, seed=2)[0], adapt=True)
        assert (refused.value.status, refused.value.retry_after) == (429, 1)
        run.submit("b", draw(3, seed=3)[0], adapt=True)
        with pytest.raises(RequestError, match="9 images are queued") as refused:
            run.submit("c", draw(1, seed=4)[0], adapt=True)
        assert (refused.value.status, refused.value.retry_after) == (503, 1)
        assert run.queued == 9
