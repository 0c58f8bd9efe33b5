"""The service on a Ray cluster: replicas that hold the streams, and the HTTP ingress that routes requests to them.

Each replica is a Ray Serve application, since Serve would spread the requests of a stream over all replicas of one
application. Replicas share a folder: if one is lost, others continue its streams from snapshots.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from starlette.requests import Request
from starlette.routing import Route
from torch import Tensor

from trust_tta.bench.environment import choose_device
from trust_tta.distributed.routing import StreamRouter
from trust_tta.errors import StateError, TrustError, one_line
from trust_tta.live.stream import REFERENCE_FILE
from trust_tta.serve.app import Api, make_app
from trust_tta.serve.dashboard import MAX_EVENTS
from trust_tta.serve.engine import RequestPrediction
from trust_tta.serve.event_log import Feedback
from trust_tta.serve.metrics import Metrics, as_text, gauge, sum_metrics
from trust_tta.serve.network import NetworkInfo, NetworkSource, ServedNetwork, open_network
from trust_tta.serve.server import log_as_json
from trust_tta.serve.service import Service
from trust_tta.serve.settings import ANSWER_SECONDS, MAX_REQUESTS, RequestError, Settings
from trust_tta.serve.stream_cache import stream_names

T = TypeVar("T")

NAME = "trust-tta"
MAX_REPLICAS = 1024  # as the command line allows
CLOSE_SECONDS = 30.0
_REPLICA = re.compile(rf"{NAME}-replica-(\d+)")
PAUSE = 0.5  # seconds between two polls of a replica
POLL_SECONDS = 3.0  # within which a replica must answer a poll, or counts as lost
TRIES = 4  # replicas that may be lost during one request

log = logging.getLogger("trust_tta.distributed")


# Replicas


@dataclass(frozen=True)
class ReplicaConfig:
    """The configuration of the replicas; files and folder must exist under the same paths on every node."""

    source: NetworkSource
    method: str
    folder: str
    token: str
    device: str = "cpu"
    settings: Settings = Settings()  # noqa: RUF009, it is frozen
    allowed_hosts: tuple[str, ...] = ()
    threads: int = 1
    cpus: float = 1.0
    gpus: float = 0.0

    @property
    def streams(self) -> Path:
        return Path(self.folder) / "streams"

    def open_network(self) -> ServedNetwork:
        return open_network(self.source, self.method, device=choose_device(self.device))


def resources_per_replica(resources: Mapping[str, float], replicas: int, *, device: str) -> dict[str, Any]:
    """Resources of one replica: half of its share, at most half a CPU and GPU, so that a lost one fits elsewhere."""
    cpus, gpus = (resources.get(kind, 0.0) / replicas for kind in ("CPU", "GPU"))
    claims = {"cpus": min(1.0, cpus) / 2, "gpus": min(1.0, gpus) / 2 if device != "cpu" else 0.0}
    return claims | {"threads": max(1, int(cpus))}


class ServiceReplica:
    """A service without a port; the ingress calls it."""

    def __init__(self, config: ReplicaConfig, number: int) -> None:
        log_as_json()
        torch.set_num_threads(config.threads)
        folder = Path(config.folder) / "replicas" / str(number)
        self.service = Service(config.open_network(), folder, settings=config.settings, streams=config.streams)

    def check_health(self) -> None:
        """Called by Serve, which replaces a replica that raises."""
        if not self.service.ready:
            raise RuntimeError("the engine does not run")

    async def ask(self, what: str, *given: Any) -> tuple[str, Any]:
        """Call `predict`, `poll`, or a method of the service.

        Returns ("done", the result), or ("refused", (status, message, seconds to wait)).
        """
        call = getattr(self if what in ("predict", "poll") else self.service, what)
        try:
            found = await asyncio.to_thread(call, *given)
            return "done", await asyncio.wrap_future(found) if isinstance(found, Future) else found
        except RequestError as error:
            return "refused", (error.status, str(error), error.retry_after)
        except TrustError as error:
            log.error("failed", extra={"reason": str(error)})
            return "refused", (503, str(error), 2)

    def predict(self, stream: str, images: Tensor, adapt: bool) -> Future[RequestPrediction]:
        return self.service.predict(images, stream=stream, adapt=adapt)

    def poll(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "streams": self.service.streams.loaded}


def start_replicas(config: ReplicaConfig, count: int) -> None:
    """Start an application without an HTTP route for each replica."""
    from ray import serve

    deployment = serve.deployment(ServiceReplica).options(
        name="replica",
        num_replicas=1,
        max_ongoing_requests=4 * MAX_REQUESTS,
        ray_actor_options={"num_cpus": config.cpus, "num_gpus": config.gpus},
        health_check_period_s=2,
        graceful_shutdown_timeout_s=CLOSE_SECONDS,
    )
    targets = [
        serve.RunTarget(deployment.bind(config, number), name=f"{NAME}-replica-{number}", route_prefix=None)
        for number in range(count)
    ]
    serve.run_many(targets)


def replica_handle(number: int) -> Any:
    from ray import serve

    return serve.get_app_handle(f"{NAME}-replica-{number}")


def replica_numbers(*, running: bool = False) -> list[int]:
    from ray import serve

    found = {_REPLICA.fullmatch(name): app for name, app in serve.status().applications.items()}
    return sorted(int(match[1]) for match, app in found.items() if match and (not running or app.status == "RUNNING"))


# The ingress


class ReplicaLostError(Exception):
    """A replica that does not answer in time."""


class ReplicatedService:
    """`serve.service.Service` on replicas; coroutines run in the event loop that calls `start`."""

    def __init__(self, config: ReplicaConfig, info: NetworkInfo) -> None:
        self.config, self.network, self.settings = config, info, config.settings
        self.metrics = Metrics()
        self._shown: dict[str, int] = {}  # number on the live page of each stream, in order of appearance
        self.router = StreamRouter(self._release)
        self.processes: dict[int, int] = {}
        self._handles: dict[int, Any] = {}
        self._lost: dict[int, asyncio.Event] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        for number in replica_numbers():
            self._handles[number] = replica_handle(number)
            self._lost[number] = asyncio.Event()
            self._tasks.append(self._loop.create_task(self._watch(number)))

    def stop(self) -> None:
        """Replicas end by themselves."""

    @property
    def ready(self) -> bool:
        return bool(self.router.live)

    @property
    def calibrated(self) -> bool:
        return (Path(self.config.folder) / REFERENCE_FILE).exists()

    async def _watch(self, number: int) -> None:
        while True:
            try:
                status = await self._call(number, "poll", seconds=POLL_SECONDS)
                if number not in self.router.live:  # started or recovered
                    self._lost[number].clear()
                    for stream in status["streams"]:
                        if self.router.replica_of(stream) in (None, number):
                            self.router.assign(stream, number)
                        else:  # others hold it by now
                            await self._call(number, "release", stream, seconds=POLL_SECONDS)
                    self.router.live.add(number)
                    log.info("a replica has joined", extra={"replica": number})
                self.processes[number] = status["pid"]
            except (ReplicaLostError, RequestError) as error:
                self._lose(number, str(error))
            except Exception as error:  # whatever it was, the replica is polled again
                log.error("a poll of a replica failed", exc_info=error)
            await asyncio.sleep(PAUSE)

    def _lose(self, number: int, reason: str) -> None:
        if number in self.router.live:
            log.warning("a replica is lost", extra={"replica": number, "reason": reason})
        self.router.lose(number)
        self._lost[number].set()

    async def _call(self, number: int, what: str, *given: Any, seconds: float) -> Any:
        """Call a replica; raises its refusals."""
        from ray.exceptions import RayError, RayTaskError
        from ray.serve.exceptions import RayServeException

        response = self._handles[number].ask.remote(what, *given)
        try:
            async with asyncio.timeout(seconds):
                kind, value = await response
        except RayTaskError:
            raise
        except (RayError, RayServeException, TimeoutError) as error:
            response.cancel()
            raise ReplicaLostError(f"replica {number}: {type(error).__name__}") from error
        if kind == "refused":
            status, words, again = value
            raise RequestError(status, words, retry_after=again)
        return value

    async def _ask(self, number: int, what: str, *given: Any) -> Any:
        """Call a replica; raises ReplicaLostError when it is lost, or after the timeout of clients."""
        seconds = ANSWER_SECONDS + POLL_SECONDS
        call = asyncio.ensure_future(self._call(number, what, *given, seconds=seconds))
        lost = asyncio.ensure_future(self._lost[number].wait())
        try:
            await asyncio.wait({call, lost}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise ReplicaLostError(f"replica {number}: it was lost")
            return call.result()
        except ReplicaLostError as error:
            self._lose(number, str(error))
            raise
        finally:
            call.cancel()
            lost.cancel()

    async def _ask_holder(self, stream: str, what: str, *given: Any) -> Any:
        """Call the replica of a stream, or its next one if that is lost."""
        for _ in range(TRIES):
            async with self.router.visit(stream) as number:
                if number is None:
                    break
                try:
                    return await self._ask(number, what, *given)
                except ReplicaLostError:
                    continue
        raise RequestError(503, "no replica answers at the moment; try again", retry_after=2)

    async def _release(self, number: int, stream: str) -> None:
        try:
            await self._ask(number, "release", stream)
            log.info("a stream moves", extra={"stream": stream, "replica": number})
        except ReplicaLostError:
            pass  # it holds nothing any more

    def _soon(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def ask_all(self, what: str, *given: Any) -> dict[int, Any]:
        """The answers of all live replicas, for callers in other threads."""

        async def ask() -> dict[int, Any]:
            numbers = sorted(self.router.live)
            found = await asyncio.gather(*(self._ask(n, what, *given) for n in numbers), return_exceptions=True)
            for answer in found:
                if isinstance(answer, BaseException) and not isinstance(answer, ReplicaLostError):
                    raise answer
            return {n: a for n, a in zip(numbers, found, strict=True) if not isinstance(a, BaseException)}

        return self._soon(ask()).result(ANSWER_SECONDS)

    def _ask_for(self, stream: str, what: str, *given: Any) -> Future[Any]:
        return self._soon(self._ask_holder(stream, what, *given))

    # The interface that `serve.app` uses

    def predict(self, images: Tensor, *, stream: str, adapt: bool) -> Future[RequestPrediction]:
        return self._ask_for(stream, "predict", stream, images, adapt)

    def give_feedback(self, labels: Sequence[tuple[str, int]]) -> list[Feedback | None]:
        """Send the labels to all replicas: each stores those of its own predictions."""
        found: list[Feedback | None] = [None] * len(labels)
        for answers in self.ask_all("give_feedback", list(labels)).values():
            found = [old or new for old, new in zip(found, answers, strict=True)]
        return found

    def act(self, name: str, action: str) -> Future[dict[str, Any]]:
        return self._ask_for(name, "act", name, action)

    def remove(self, name: str) -> Future[None]:
        async def remove() -> None:
            await self._ask_holder(name, "remove", name)
            self.router.forget(name)

        return self._soon(remove())

    def read_state(self, name: str) -> Future[bytes]:
        return self._ask_for(name, "read_state", name)

    def write_state(self, name: str, content: bytes | bytearray) -> Future[dict[str, Any]]:
        return self._ask_for(name, "write_state", name, content)

    def read_checkpoint(self, name: str) -> Future[bytes]:
        return self._ask_for(name, "read_checkpoint", name)

    def list_streams(self) -> list[dict[str, Any]]:
        summaries: dict[tuple[int | None, str], dict[str, Any]] = {
            (n, entry["name"]): entry for n, entries in self.ask_all("list_streams").items() for entry in entries
        }
        places = {name: self.router.replica_of(name) for name in stream_names(self.config.streams)}
        return [
            summaries.get((n, name), {"name": name, "loaded": False}) | {"replica": n} for name, n in places.items()
        ]

    def events(self, stream: str | None, limit: int) -> list[dict[str, Any]]:
        return merge_events(self.ask_all("events", stream, limit))[-limit:]

    def page_updates(self, since: float) -> dict[str, Any]:
        """The updates of all replicas, each stream once."""
        updates, replica_of = self.ask_all("page_updates", since), self.router.replica_of
        streams, names = list[dict[str, Any]](), set[str]()
        for replica, message in updates.items():
            own = {name for name in message["names"] if replica_of(name) in (None, replica)}
            streams += [stream for stream in message["streams"] if stream["name"] in own]
            names |= own
        for stream in streams:
            stream["number"] = self._shown.setdefault(stream["name"], len(self._shown) + 1)
        events = merge_events({replica: message["events"] for replica, message in updates.items()})
        now = min((message["now"] for message in updates.values()), default=time.time())
        return {"now": now, "names": sorted(names), "streams": streams, "events": events[-MAX_EVENTS:]}

    def metrics_text(self) -> bytes:
        """The metrics summed over all replicas and this process."""
        texts = self.ask_all("metrics_text")
        metrics = sum_metrics([self.metrics.text(), *texts.values()])
        streams = metrics.pop("trust_tta_streams", None)
        memory = sum(s.value for s in streams.samples if s.labels["place"] == "memory") if streams else 0
        places = {"memory": memory, "disk": len(stream_names(self.config.streams)) - memory}
        states = {"live": len(texts), "lost": len(self._handles) - len(texts)}
        more = [
            gauge("streams", "streams by where they are", "place", places),
            gauge("replicas", "replicas by whether they answer", "state", states),
        ]
        return as_text([*metrics.values(), *more])

    def replicas(self) -> list[dict[str, Any]]:
        names = stream_names(self.config.streams)
        return [
            {
                "replica": number,
                "live": number in self.router.live,
                "pid": self.processes.get(number),
                "streams": [name for name in names if self.router.replica_of(name) == number],
            }
            for number in sorted(self._handles)
        ]


def merge_events(by_replica: Mapping[int, Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The events of all replicas, oldest first, with unique ids."""
    events = [event | {"id": MAX_REPLICAS * event["id"] + n} for n, entries in by_replica.items() for event in entries]
    return sorted(events, key=lambda event: cast(float, event["time"]))


class ReplicatedApi(Api):
    """The API of the service, with a route that lists the replicas."""

    def start(self) -> None:
        super().start()
        self._replicated.start()

    def routes(self) -> list[Route]:
        return [self._route("/replicas", self.replicas), *super().routes()]

    async def replicas(self, request: Request) -> dict[str, Any]:
        return {"replicas": await asyncio.to_thread(self._replicated.replicas)}

    @property
    def _replicated(self) -> ReplicatedService:
        return cast(ReplicatedService, self.service)


def start_serving(config: ReplicaConfig, network: ServedNetwork, *, host: str, port: int, replicas: int) -> None:
    """Start Serve's proxy on one port of the head node, the replicas, and the ingress; `stop_serving` ends them."""
    from ray import serve

    http = {"host": host, "port": port, "keep_alive_timeout_s": 30}
    serve.start(proxy_location="HeadOnly", http_options=http, logging_config={"log_level": "WARNING"})
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # this process' own
    start_replicas(config, replicas)
    info = network.info()

    def build() -> Any:
        log_as_json()
        service = cast(Service, ReplicatedService(config, info))
        return make_app(ReplicatedApi(service, token=config.token, allowed_hosts=config.allowed_hosts))

    options = {"num_replicas": 1, "max_ongoing_requests": 2 * MAX_REQUESTS, "ray_actor_options": {"num_cpus": 0}}
    ingress = serve.deployment(serve.ingress(build)()).options(name="ingress", **options)
    serve.run(ingress.bind(), name=NAME, route_prefix="/")


def stop_serving() -> None:
    """Close the ingress, let the replicas finish their requests and write snapshots, then stop Serve."""
    from ray import serve

    serve.delete(NAME)
    closing = [replica_handle(number).ask.remote("stop") for number in replica_numbers(running=True)]
    deadline = time.monotonic() + CLOSE_SECONDS
    for response in closing:
        try:
            response.result(timeout_s=max(0.1, deadline - time.monotonic()))
        except Exception as error:  # it may be lost; the others must still be closed
            log.warning("a replica was not closed", extra={"reason": type(error).__name__})
    serve.shutdown()


def serve_until_signal(
    config: ReplicaConfig, network: ServedNetwork, *, host: str, port: int, replicas: int, on_ready: Callable[[], None]
) -> None:
    """Serve until SIGTERM or SIGINT, then stop as `stop_serving` does."""
    ended = threading.Event()
    before = {number: signal.signal(number, lambda *_: ended.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        try:
            start_serving(config, network, host=host, port=port, replicas=replicas)
        except (RuntimeError, ValueError) as error:  # raised by Serve if an application does not start
            raise StateError(f"the replicas do not start: {one_line(str(error), longest=300)}") from error
        on_ready()
        while not ended.wait(1.0):
            pass
    finally:
        stop_serving()
        for number, handler in before.items():
            signal.signal(number, handler)
