"""The service as Ray Serve applications: replicas that have streams, and an ingress that knows which has which.

Every replica is an application of its own, because streams are pinned: to ask Serve for any of several replicas would
split a stream's state. They share a folder of streams: one that is lost costs what its streams learned since their last
snapshots, and another replica goes on from these.
"""

from __future__ import annotations

import asyncio
import json
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
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from torch import Tensor

from trust_tta.bench.environment import choose_device
from trust_tta.errors import StateError, TrustError, one_line
from trust_tta.fleet.routing import Places
from trust_tta.live.guard import Guard
from trust_tta.live.stream import REFERENCE_FILE
from trust_tta.preprocessing import Preprocessing
from trust_tta.serve.app import Api, make_app, read_json_body, respond
from trust_tta.serve.board import MOST_EVENTS, TICK, Board
from trust_tta.serve.engine import Answer
from trust_tta.serve.journal import Label
from trust_tta.serve.metrics import Metrics
from trust_tta.serve.pool import stream_names
from trust_tta.serve.service import Network, Service, number_of_class, open_network
from trust_tta.serve.settings import RequestError, Settings

T = TypeVar("T")

NAME = "trust-tta"
MOST_REPLICAS = 1024
POLL_SECONDS = 3.0  # in which a replica must answer a look at it, or is taken for lost
TRIES = 4  # replicas that may be lost under one request
CLOSE_SECONDS = 30.0

log = logging.getLogger("trust_tta.fleet")


@dataclass(frozen=True)
class Plan:
    """What every replica is made of. Checkpoint and folder must be there, under the same paths, on every node."""

    checkpoint: str
    method: str
    folder: str
    token: str
    variant: str | None = None
    options: Mapping[str, Any] | None = None
    device: str = "cpu"
    settings: Settings = Settings()  # noqa: RUF009, it is frozen
    guard: Guard | None = None
    note: str = ""
    threads: int = 1
    cpus: float = 1.0
    gpus: float = 0.0

    @property
    def streams(self) -> Path:
        return Path(self.folder) / "streams"

    def open_network(self) -> Network:
        device = choose_device(self.device)
        return open_network(self.checkpoint, self.method, options=self.options, device=device, variant=self.variant)


@dataclass(frozen=True)
class Facts:
    """What the ingress must know of the network, which it does not load; `method` has a `name`."""

    name: str
    method: SimpleNamespace
    preprocessing: Preprocessing
    classes: tuple[str, ...] | None
    outputs: tuple[int, ...]

    @classmethod
    def of(cls, network: Network) -> Facts:
        named = SimpleNamespace(name=network.method.name)
        return cls(network.name, named, network.preprocessing, network.classes, network.outputs)


# A replica


class Replica:
    """A service without a port, which has those streams that it was asked for."""

    def __init__(self, plan: Plan, number: int) -> None:
        from trust_tta.serve.server import log_as_json

        log_as_json()
        torch.set_num_threads(plan.threads)
        folder = Path(plan.folder) / "replicas" / str(number)
        self.service = Service(
            plan.open_network(), folder, guard=plan.guard, settings=plan.settings, streams=plan.streams
        )
        self.service.board.listen()  # so that there is always something to tell
        self.service.start()

    def check_health(self) -> None:
        """Serve asks, and starts another in the place of one whose engine has died."""
        if not self.service.engine.alive:
            raise RuntimeError("the engine does not run")

    async def ask(self, what: str, *given: Any) -> tuple[str, Any]:
        """("done", what was asked for), or ("refused", (status, words, seconds to wait))."""
        try:
            found = await asyncio.to_thread(self._answers()[what], *given)
            return "done", await asyncio.wrap_future(found) if isinstance(found, Future) else found
        except RequestError as error:
            return "refused", (error.status, str(error), error.retry_after)
        except TrustError as error:
            log.error("failed", extra={"reason": str(error)})
            return "refused", (503, str(error), 2)

    def _answers(self) -> dict[str, Callable[..., Any]]:
        """What can be asked, and who knows it."""
        service = self.service
        return {
            "predict": self._predict,
            "feedback": service.give_feedback,
            "act": service.act,
            "fork": service.fork,
            "remove": service.remove,
            "release": service.release,
            "state": service.read_state,
            "checkpoint": service.read_checkpoint,
            "streams": service.streams,
            "events": lambda stream, most: service.journal.events(stream=stream, most=most),
            "metrics": lambda: service.metrics.text().decode(),
            "everything": service.board.everything,
            "poll": self._poll,
            "close": service.stop,
        }

    def _predict(self, stream: str, images: Any, adapt: bool) -> Future[Answer]:
        return self.service.predict(torch.tensor(images), stream=stream, adapt=adapt)

    def _poll(self) -> dict[str, Any]:
        """Who it is, what it has, and what is new on its board."""
        return {"pid": os.getpid(), "streams": self.service.pool.loaded, "news": self.service.board.tick()}


class ReplicaLostError(Exception):
    """It does not answer any more, or not in time."""


# The ingress


class Fleet:
    """What `serve.app` wants of a service, over replicas. Its coroutines run in the event loop that `start` finds."""

    def __init__(self, plan: Plan, facts: Facts) -> None:
        self.plan, self.network, self.settings = plan, facts, plan.settings
        self.board, self.metrics = FleetBoard(self), FleetMetrics(self)
        self.engine = self.journal = self  # they know whether it is alive, and the events
        self.places = Places(self._release)
        self.processes: dict[int, int] = {}
        self._handles: dict[int, Any] = {}
        self._lost: dict[int, asyncio.Event] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        from ray import serve

        self._loop = asyncio.get_running_loop()
        found = [re.fullmatch(f"{NAME}-replica-(\\d+)", name) for name in serve.status().applications]
        for number in sorted(int(match[1]) for match in found if match):
            self.follow(number)

    def stop(self) -> None:
        """Replicas end by themselves."""

    @property
    def alive(self) -> bool:
        return bool(self.places.live)

    @property
    def calibrated(self) -> bool:
        return (Path(self.plan.folder) / REFERENCE_FILE).exists()

    def follow(self, number: int) -> None:
        """Look at a replica twice a second from now on."""
        from ray import serve

        self._handles[number] = serve.get_app_handle(replica_name(number))
        self._lost[number] = asyncio.Event()
        self._tasks.append(asyncio.get_running_loop().create_task(self._watch(number)))

    async def _watch(self, number: int) -> None:
        while True:
            try:
                told = await self._call(number, "poll", seconds=POLL_SECONDS)
                if number not in self.places.live:
                    await self._welcome(number, told["streams"])
                self.processes[number] = told["pid"]
                self.board.take(number, told["news"])
            except (ReplicaLostError, RequestError) as error:
                self._lose(number, str(error))
            except Exception as error:  # whatever it was, it is looked at again
                log.error("a look at a replica failed", exc_info=error)
            await asyncio.sleep(TICK)

    async def _welcome(self, number: int, streams: Sequence[str]) -> None:
        """A replica is there, for the first time or again; what others have by now it must let go of."""
        self._lost[number].clear()
        for stream in streams:
            if self.places.of(stream) in (None, number):
                self.places.put(stream, number)
            else:
                await self._call(number, "release", stream, seconds=POLL_SECONDS)
        self.places.live.add(number)
        log.info("a replica is there", extra={"replica": number})

    def _lose(self, number: int, reason: str) -> None:
        if number in self.places.live:
            log.warning("a replica is lost", extra={"replica": number, "reason": reason})
        self.places.lose(number)
        self._lost[number].set()

    # Asking replicas

    async def _call(self, number: int, what: str, *given: Any, seconds: float) -> Any:
        """What a replica answers; a refusal is raised here."""
        from ray.exceptions import RayError, RayTaskError
        from ray.serve.exceptions import RayServeException

        response = self._handles[number].ask.remote(what, *given)
        try:
            kind, value = await asyncio.wait_for(_awaited(response), seconds)
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
        """The same, but not longer than the replica is there; who asks gives up before it is taken for lost."""
        seconds = self.settings.answer_seconds + POLL_SECONDS
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

    async def _of_stream(self, stream: str, what: str, *given: Any) -> tuple[int, Any]:
        """Ask the replica that has a stream, or the next one where that is lost; with its number."""
        for _ in range(TRIES):
            async with self.places.visit(stream) as number:
                if number is None:
                    break
                try:
                    return number, await self._ask(number, what, *given)
                except ReplicaLostError:
                    continue
        raise RequestError(503, "no replica answers for now; try again", retry_after=2)

    async def _of_all(self, what: str, *given: Any) -> dict[int, Any]:
        """What all replicas that are there answer."""
        numbers = sorted(self.places.live)
        found = await asyncio.gather(*(self._ask(n, what, *given) for n in numbers), return_exceptions=True)
        for answer in found:
            if isinstance(answer, BaseException) and not isinstance(answer, ReplicaLostError):
                raise answer
        return {n: answer for n, answer in zip(numbers, found, strict=True) if not isinstance(answer, BaseException)}

    async def _release(self, number: int, stream: str) -> None:
        try:
            await self._ask(number, "release", stream)
            log.info("a stream moves", extra={"stream": stream, "replica": number})
        except ReplicaLostError:
            pass  # it has let go of everything

    def _soon(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def ask_all(self, what: str, *given: Any) -> dict[int, Any]:
        """The same from another thread, which waits."""
        return self._soon(self._of_all(what, *given)).result(self.settings.answer_seconds)

    # What `serve.app` asks for

    def predict(self, images: Tensor, *, stream: str, adapt: bool) -> Future[Answer]:
        return self._soon(self._answer(stream, "predict", stream, images.numpy(), adapt))

    async def _answer(self, stream: str, what: str, *given: Any) -> Any:
        return (await self._of_stream(stream, what, *given))[1]

    def give_feedback(self, labels: Sequence[tuple[str, int]]) -> list[Label | None]:
        """Every replica keeps those of its own predictions."""
        found: list[Label | None] = [None] * len(labels)
        for answers in self.ask_all("feedback", list(labels)).values():
            found = [old or new for old, new in zip(found, answers, strict=True)]
        return found

    def read_label(self, given: Any) -> int:
        return number_of_class(given, self.network.outputs[0], self.network.classes)

    def act(self, name: str, action: str) -> Future[dict[str, Any]]:
        return self._soon(self._answer(name, "act", name, action))

    def fork(self, name: str, new: str) -> Future[dict[str, Any]]:
        async def fork() -> dict[str, Any]:
            number, made = await self._of_stream(name, "fork", name, new)
            self.places.put(new, number)
            return cast(dict[str, Any], made)

        return self._soon(fork())

    def remove(self, name: str) -> Future[None]:
        async def remove() -> None:
            await self._of_stream(name, "remove", name)
            self.places.forget(name)

        return self._soon(remove())

    def read_state(self, name: str) -> Future[bytes]:
        return self._soon(self._answer(name, "state", name))

    def read_checkpoint(self, name: str) -> Future[bytes]:
        return self._soon(self._answer(name, "checkpoint", name))

    def streams(self) -> list[dict[str, Any]]:
        """Every stream, as the replica knows it that has it."""
        told = {n: {entry["name"]: entry for entry in entries} for n, entries in self.ask_all("streams").items()}
        found = []
        for name in stream_names(self.plan.streams):
            number = self.places.of(name)
            entry = told.get(number, {}).get(name) if number is not None else None
            found.append((entry or {"name": name, "loaded": False}) | {"replica": number})
        return found

    def events(self, *, stream: str | None = None, most: int = 100) -> list[dict[str, Any]]:
        return joined_events(self.ask_all("events", stream, most))[-most:]

    def replicas(self) -> list[dict[str, Any]]:
        """Every replica: whether it is there, its process, and the streams that it has."""
        names = stream_names(self.plan.streams)
        return [
            {
                "replica": number,
                "live": number in self.places.live,
                "pid": self.processes.get(number),
                "streams": [name for name in names if self.places.of(name) == number],
            }
            for number in sorted(self._handles)
        ]


async def _awaited(response: Any) -> Any:
    return await response


def joined_events(told: Mapping[int, Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The events of all replicas, oldest first, with numbers that none of them shares with another."""
    events = [event | {"id": MOST_REPLICAS * event["id"] + n} for n, entries in told.items() for event in entries]
    return sorted(events, key=lambda event: cast(float, event["time"]))


class FleetBoard(Board):
    """The boards of all replicas as one; each stream as the replica shows it that has it."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet.network.preprocessing, classes=fleet.network.classes)
        self._fleet = fleet
        self._told: list[tuple[int, str]] = []
        self._numbers: dict[str, int] = {}

    def take(self, number: int, news: str) -> None:
        """What is new at a replica."""
        if news and self.listeners:
            self._told.append((number, news))

    def tick(self) -> str:
        told, self._told = self._told, []
        return json.dumps(self.join(told)) if told else ""

    def everything(self) -> str:
        whole = self.join(list(self._fleet.ask_all("everything").items()))
        return json.dumps(whole | {"events": whole["events"][-MOST_EVENTS:]})

    def join(self, told: Sequence[tuple[int, str]]) -> dict[str, Any]:
        """One message of several; of a stream that moved, what its last replica tells."""
        streams, gone, events = list[dict[str, Any]](), list[str](), dict[int, list[dict[str, Any]]]()
        for number, text in told:
            message, place = json.loads(text), self._fleet.places.of
            for stream in message["streams"]:
                if place(stream["name"]) in (None, number):
                    order = self._numbers.setdefault(stream["name"], len(self._numbers) + 1)
                    streams.append(stream | {"number": order})
            gone += [name for name in message["gone"] if place(name) is None]
            events.setdefault(number, []).extend(message["events"])
        return {"streams": streams, "events": joined_events(events), "gone": gone}


class FleetMetrics(Metrics):
    """The sums of all replicas' and of the ingress' own."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__()
        self._fleet = fleet

    def text(self) -> bytes:
        fleet = self._fleet
        told = fleet.ask_all("metrics")
        metrics = add_up([super().text().decode(), *told.values()])
        memory = sum(
            sample.value for sample in metrics["trust_tta_streams"].samples if "memory" in sample.labels.values()
        )
        streams = Metric("trust_tta_streams", "streams by where they are", "gauge")
        streams.add_sample("trust_tta_streams", {"place": "memory"}, memory)
        streams.add_sample("trust_tta_streams", {"place": "disk"}, len(stream_names(fleet.plan.streams)) - memory)
        replicas = Metric("trust_tta_replicas", "replicas by whether they answer", "gauge")
        for place, count in {"live": len(told), "lost": len(fleet.replicas()) - len(told)}.items():
            replicas.add_sample("trust_tta_replicas", {"state": place}, count)
        registry = CollectorRegistry()
        registry.register(_Given([*(metrics | {"trust_tta_streams": streams}).values(), replicas]))
        return generate_latest(registry)


class _Given(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics


def add_up(texts: Sequence[str]) -> dict[str, Metric]:
    """The metrics of several processes by name, equal ones summed."""
    sums: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    kinds: dict[str, Metric] = {"trust_tta_streams": Metric("trust_tta_streams", "", "gauge")}
    for text in texts:
        for family in text_string_to_metric_families(text):
            kinds[family.name] = family
            own = sums.setdefault(family.name, {})
            for sample in family.samples:
                key = sample.name, tuple(sorted(sample.labels.items()))
                own[key] = own.get(key, 0.0) + sample.value
    found = {}
    for name, family in kinds.items():
        found[name] = Metric(name, family.documentation, family.type)
        for (series, labels), value in sums.get(name, {}).items():
            found[name].add_sample(series, dict(labels), value)
    return found


class FleetApi(Api):
    """The routes of the service, and those of a fleet."""

    def routes(self) -> list[Route]:
        fleet = [
            self._route("/replicas", self.replicas),
            self._route("/replicas", self.grow, "POST", private=True),
        ]
        return [*fleet, *super().routes()]

    async def replicas(self, request: Request) -> Response:
        return respond({"replicas": await self._in_thread(self._fleet.replicas)})

    async def grow(self, request: Request) -> Response:
        """Start more replicas; streams whose home they are move there as they are asked for."""
        content = read_json_body(await self._body(request))
        count, there = content.get("replicas") if isinstance(content, dict) else None, len(self._fleet.replicas())
        if type(count) is not int or not there <= count <= MOST_REPLICAS:
            raise RequestError(
                400, f'give {{"replicas": N}} with N from {there}, as many as there are, to {MOST_REPLICAS}'
            )
        numbers = range(there, count)
        await self._in_thread(lambda: start_replicas(self._fleet.plan, numbers, wait=False))
        for number in numbers:
            self._fleet.follow(number)
        return respond({"replicas": count})

    @property
    def _fleet(self) -> Fleet:
        return cast(Fleet, self.service)


# Applications


def replica_name(number: int) -> str:
    return f"{NAME}-replica-{number}"


def start_replicas(plan: Plan, numbers: Sequence[int], *, wait: bool = True) -> None:
    """An application for each, none of which has a route."""
    from ray import serve

    deployment = serve.deployment(Replica).options(
        name="replica",
        num_replicas=1,
        max_ongoing_requests=4 * plan.settings.most_requests,
        ray_actor_options={"num_cpus": plan.cpus, "num_gpus": plan.gpus},
        health_check_period_s=2,
        graceful_shutdown_timeout_s=CLOSE_SECONDS,
    )
    targets = [
        serve.RunTarget(deployment.bind(plan, number), name=replica_name(number), route_prefix=None)
        for number in numbers
    ]
    serve.run_many(targets, wait_for_applications_running=wait)


def start_ingress(plan: Plan, facts: Facts) -> None:
    from ray import serve

    def build() -> Any:
        from trust_tta.serve.server import log_as_json

        log_as_json()
        service = cast(Service, Fleet(plan, facts))
        return make_app(service, token=plan.token, note=plan.note, api=FleetApi)

    ingress = serve.deployment(serve.ingress(build)()).options(
        name="ingress",
        num_replicas=1,
        max_ongoing_requests=2 * plan.settings.most_requests,
        ray_actor_options={"num_cpus": 0},
    )
    serve.run(ingress.bind(), name=NAME, route_prefix="/")


def share_of(resources: Mapping[str, float], replicas: int, *, device: str) -> dict[str, Any]:
    """What a replica claims of a cluster: half of its part, so that the fleet may grow, of one CPU and GPU at most."""
    cpus, gpus = (resources.get(kind, 0.0) / replicas for kind in ("CPU", "GPU"))
    claims = {"cpus": min(1.0, cpus) / 2, "gpus": min(1.0, gpus) / 2 if device != "cpu" else 0.0}
    return claims | {"threads": max(1, int(cpus))}


def serve_until_signal(
    plan: Plan, network: Network, *, host: str, port: int, replicas: int, on_ready: Callable[[], None]
) -> None:
    """Serve until SIGTERM or SIGINT; then let every replica answer what it has taken and write its snapshots."""
    ended = threading.Event()
    before = {number: signal.signal(number, lambda *_: ended.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        try:
            start_serving(plan, network, host=host, port=port, replicas=replicas)
        except (RuntimeError, ValueError) as error:  # what Serve says of an application that does not start
            raise StateError(f"the replicas do not start: {one_line(str(error), longest=300)}") from error
        on_ready()
        while not ended.wait(1.0):
            pass
    finally:
        stop_serving()
        for number, handler in before.items():
            signal.signal(number, handler)


def start_serving(plan: Plan, network: Network, *, host: str, port: int, replicas: int) -> None:
    """Serve's proxy on one port of the head node, the replicas, and the ingress, until `stop_serving`."""
    from ray import serve

    http = {"host": host, "port": port, "keep_alive_timeout_s": 30}
    serve.start(proxy_location="HeadOnly", http_options=http, logging_config={"log_level": "WARNING"})
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # this process' own
    start_replicas(plan, range(replicas))
    start_ingress(plan, Facts.of(network))


def stop_serving() -> None:
    """Let every replica answer what it has taken and write its snapshots; then end them."""
    from ray import serve

    serve.delete(NAME)
    applications = serve.status().applications.items()
    names = [name for name, app in applications if name.startswith(f"{NAME}-replica-") and app.status == "RUNNING"]
    closing = [serve.get_app_handle(name).ask.remote("close") for name in names]
    deadline = time.monotonic() + CLOSE_SECONDS
    for response in closing:
        try:
            response.result(timeout_s=max(0.1, deadline - time.monotonic()))
        except Exception as error:  # it may be lost; the others must be asked
            log.warning("a replica was not closed", extra={"reason": type(error).__name__})
    serve.shutdown()
