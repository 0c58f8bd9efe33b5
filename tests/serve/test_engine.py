"""The engine: batches of different streams in parallel, batches of one stream in order."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
from trust_tta.serve.engine import BatchResult, Engine, Prediction
from trust_tta.serve.service import MAX_WORKERS, Service
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


class Counted(StreamCache):
    """Knows how many threads have used a stream at the same time, at most, and all streams together."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.users, self.most, self.in_all = Counter[str](), 0, 0
        self.counting = threading.Lock()

    @contextmanager
    def using(self, name: str) -> Iterator[Stream]:
        with super().using(name) as stream:
            with self.counting:
                self.users[name] += 1
                self.most, self.in_all = max(self.most, self.users[name]), max(self.in_all, self.users.total())
            yield stream
            with self.counting:
                self.users[name] -= 1


@contextmanager
def engine(
    folder: Path,
    inside: Callable[[Tensor], object],
    *,
    on_batch: Callable[[BatchResult], None] = lambda batch: None,
    max_loaded: int = 16,
    workers: int = 2,
) -> Iterator[Engine]:
    class Watched(Adapting):
        name = Adapting.name

    Watched.inside = staticmethod(inside)  # forks have it, too
    streams = Counted(
        create_method(Watched, toy(), lr=1e-3, statistics="stream"),
        folder,
        guard=Guard(),
        max_loaded=max_loaded,
        max_streams=100,
        on_event=lambda stream, event: None,
    )
    made = Engine(streams, PREPROCESSING, Settings(batch_size=SIZE, max_wait=0.0), on_batch, workers=workers)
    made.start()
    try:
        yield made
    finally:
        made.drain()


@dataclass
class Inside:
    """Lets nobody pass until it is told to; `most`: how many were inside at the same time."""

    now: int = 0
    most: int = 0
    entered: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    open: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, images: Tensor) -> None:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        self.entered.release()
        assert self.open.wait(30)
        with self.lock:
            self.now -= 1


def logits(future: Future[Prediction]) -> Tensor:
    return future.result(60).logits


def test_batches_of_two_streams_run_in_parallel(tmp_path: Path) -> None:
    both = threading.Barrier(2)
    with engine(tmp_path, lambda images: both.wait(30)) as run:
        for images in clean(3, size=SIZE):
            answers = [run.submit(name, images, adapt=True) for name in ("a", "b")]
            first, second = map(logits, answers)
            assert torch.equal(first, second)


def test_batches_of_one_stream_run_in_order(tmp_path: Path, threads: SetThreads) -> None:
    """However many streams and workers, each answers bit for bit as if it had been alone."""
    threads(1)  # sums depend on their number
    names, rounds, pause = ("a", "b", "c"), 8, threading.Event()
    sent = {name: clean(rounds, size=SIZE, seed=i) for i, name in enumerate(names)}
    # The pause gives another worker the time to come in, if it could.
    with engine(tmp_path, lambda images: pause.wait(0.002), workers=3) as run:
        answers = {name: list[Future[Prediction]]() for name in names}
        for step in range(rounds):
            for name in names:
                answers[name].append(run.submit(name, sent[name][step], adapt=True))
        found = {name: [logits(answer) for answer in answers[name]] for name in names}
        assert isinstance(run.streams, Counted)
        assert run.streams.most == 1
        assert run.streams.in_all > 1
    for name in names:
        alone = make("tent", lr=1e-3, statistics="stream")
        assert states_equal(found[name], [alone(images) for images in sent[name]])


def test_blocked_batches_start_together_once_unblocked(tmp_path: Path) -> None:
    both, images = threading.Barrier(2), clean(1, size=SIZE)[0]
    with engine(tmp_path, lambda images: both.wait(30)) as run:
        for _ in range(5):
            held, let_go = threading.Event(), threading.Event()
            run.submit_task(lambda h=held, g=let_go: h.set() or g.wait(30), "a", "b")  # type: ignore[misc]
            assert held.wait(30)
            answers = [run.submit(name, images, adapt=True) for name in "ab"]
            run.submit_task(lambda: None).result(30)  # the other worker has looked at them, and sleeps again
            let_go.set()
            assert all(answer.result(60).adapted for answer in answers)


def test_task_waits_for_the_running_batch_and_blocks_the_next(tmp_path: Path) -> None:
    watch, begun, let_go = Inside(), threading.Event(), threading.Event()
    seen = list[int]()

    def task() -> str:
        begun.set()
        seen.append(watch.now)
        assert let_go.wait(30)
        seen.append(watch.now)
        return "done"

    with engine(tmp_path, watch, workers=3) as run:
        first = run.submit("a", clean(1, size=SIZE)[0], adapt=True)
        assert watch.entered.acquire(timeout=30)
        asked, later = run.submit_task(task, "a"), run.submit("a", clean(1, size=SIZE)[0], adapt=True)
        assert run.submit_task(lambda: "another stream", "b").result(30) == "another stream"
        assert not begun.is_set()
        watch.open.set()
        first.result(30)
        assert begun.wait(30)
        assert run.submit_task(lambda: "another stream", "b").result(30) == "another stream"
        assert not later.running()
        let_go.set()
        assert asked.result(30) == "done"
        later.result(30)
    assert seen == [0, 0]


def test_streams_in_use_are_not_evicted(tmp_path: Path, threads: SetThreads) -> None:
    """Six streams with two places in memory: each answers bit for bit as if it had stayed there."""
    threads(1)
    names, chance, sent = [f"s{i}" for i in range(6)], random.Random(0), dict[str, list[Tensor]]()
    with engine(tmp_path, lambda images: None, max_loaded=2) as run:
        answers = {name: list[Future[Prediction]]() for name in names}
        for step in range(36):
            name = chance.choice(names)
            images = draw(SIZE, seed=step)[0]
            sent.setdefault(name, []).append(images)
            answers[name].append(run.submit(name, images, adapt=True))
        found = {name: [logits(answer) for answer in answers[name]] for name in names}
        assert len(run.streams.loaded) == 2
    for name in names:
        alone = make("tent", lr=1e-3, statistics="stream")
        assert states_equal(found[name], [alone(images) for images in sent[name]])


def test_drain_answers_everything_and_closes_streams(tmp_path: Path) -> None:
    watch = Inside()
    with engine(tmp_path, watch) as run:
        answers = [run.submit(name, images, adapt=True) for name in "abc" for images in clean(3, size=SIZE)]
        tasks = [run.submit_task(lambda name=name: name, name) for name in "abc"]  # type: ignore[misc]
        for _ in range(2):
            assert watch.entered.acquire(timeout=30)
        with ThreadPoolExecutor(1) as other:
            draining = other.submit(run.drain)
            while run.alive:
                time.sleep(0.001)
            with pytest.raises(RequestError, match="stopping"):
                run.submit("a", clean(1)[0], adapt=True)
            with pytest.raises(RequestError, match="stopping"):
                run.submit_task(lambda: None, "a")
            assert not draining.done()
            watch.open.set()
            draining.result(60)
        assert all(answer.done() and answer.result().adapted for answer in answers)
        assert [task.result(0) for task in tasks] == ["a", "b", "c"]
        assert (run.queued, run.streams.loaded) == (0, [])
    assert watch.most == 2
    for name in "abc":
        with closing(Folder(tmp_path / name)) as folder:  # nobody holds it any more
            newest, problems = folder.newest()
            assert newest is not None
            assert (newest.state["books"]["images"], problems) == (3 * SIZE, [])


def test_error_fails_only_the_request_at_fault(tmp_path: Path) -> None:
    """Both are inside when it is raised; of the requests that shared its batch, only the one at fault fails."""
    both = threading.Barrier(2, timeout=30)

    def inside(images: Tensor) -> None:
        if len(images) == SIZE:
            both.wait()
        if (images[:, 0, 0, 0] == 7).any():
            raise StateError("seven")

    with engine(tmp_path, inside) as run:
        held, let_go = threading.Event(), threading.Event()
        run.submit_task(lambda: held.set() or let_go.wait(30), "a", "b")  # type: ignore[func-returns-value]
        assert held.wait(30)
        images, bad = draw(SIZE, seed=0)[0], draw(1, seed=1)[0]
        bad[0, 0, 0, 0] = 7
        good = run.submit("a", images, adapt=True)
        shared = [run.submit("b", part, adapt=True) for part in (images[:2], bad, images[3:])]
        let_go.set()
        assert good.result(30).adapted
        assert [answer.exception(30) is None for answer in shared] == [True, False, True]
        assert "seven" in str(shared[1].exception())
        with run.streams.using("b") as stream:
            assert stream.method.counters.batches == 2
        assert run.alive


def test_pixels_and_network_input_share_a_batch(tmp_path: Path) -> None:
    network, batches = make_network(tmp_path, "bn"), list[BatchResult]()
    streams = StreamCache(
        network.method, tmp_path / "streams", guard=Guard(), max_loaded=2, max_streams=2, on_event=lambda *_: None
    )
    run = Engine(streams, network.preprocessing, Settings(batch_size=10, max_wait=0.0), batches.append, workers=1)
    raw = torch.from_numpy(pixels(10))
    parts = [network.preprocessing.normalize(raw[:3]), raw[3:4], raw[4:8], network.preprocessing.normalize(raw[8:])]
    answers = [run.submit("a", part, adapt=True) for part in parts]
    only_pixels = [run.submit("b", raw[start : start + 5], adapt=True) for start in (0, 5)]
    run.start()
    expected = make_network(tmp_path, "bn").method(network.preprocessing(raw))
    assert torch.equal(torch.cat([logits(answer) for answer in answers]), expected)
    assert torch.equal(torch.cat([logits(answer) for answer in only_pixels]), expected)
    assert [len(batch.images) for batch in batches] == [10, 10]
    run.drain()


def test_threads_are_divided_among_running_batches_and_restored(tmp_path: Path, threads: SetThreads) -> None:
    threads(4)
    used, held, let_go = list[int](), threading.Event(), threading.Event()
    images = clean(1, size=SIZE)[0]
    with engine(tmp_path, lambda images: used.append(torch.get_num_threads())) as run:
        for _ in range(2):
            run.submit("a", images, adapt=True).result(30)
        assert used == [4, 4]
        run.submit_task(lambda: held.set() or let_go.wait(30), "a", "b")  # type: ignore[func-returns-value]
        assert held.wait(30)
        answers = [run.submit(name, images, adapt=True) for name in "ab"]
        let_go.set()
        for answer in answers:
            answer.result(30)
        assert used[2] == 2  # the other one was due
        assert torch.get_num_threads() == 4
    with ThreadPoolExecutor(1) as new:
        assert new.submit(torch.get_num_threads).result(30) == 4


def test_worker_count_follows_cores_up_to_a_maximum(tmp_path: Path, threads: SetThreads) -> None:
    network = make_network(tmp_path, "source")
    for cores, max_loaded, workers in ((1, 16, 1), (2, 16, 2), (64, 16, MAX_WORKERS), (8, 1, 1)):
        threads(cores)
        service = Service(network, tmp_path / f"{cores}-{max_loaded}", settings=Settings(max_loaded=max_loaded))
        assert len(service.engine._workers) == workers
        service.start()
        service.stop()


def test_parallel_batches_are_all_logged_and_counted(tmp_path: Path, threads: SetThreads) -> None:
    threads(2)
    network = make_network(tmp_path, "source")
    service = Service(network, tmp_path / "state", settings=Settings(batch_size=2, max_wait=0.0))
    service.start()
    names, count = ("a", "b", "c"), 60

    def send(number: int) -> Prediction:
        images = network.preprocessing(pixels(1, seed=number))
        return service.predict(images, stream=names[number % 3], adapt=True).result(60)

    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(send, range(count)))
    assert 'trust_tta_images_total{adapted="true"} 60.0' in service.metrics.text().decode()
    found = service.give_feedback([(answer.ids[0], int(answer.output[0].argmax())) for answer in answers])
    assert all(label is not None and label.correct for label in found)
    summaries = service.dashboard.summaries()
    assert {name: summaries[name]["labels"] for name in names} == dict.fromkeys(names, count // 3)
    service.stop()
    for name in names:
        with service.streams.using(name) as stream:
            assert stream.images == count // 3
    service.streams.close()
