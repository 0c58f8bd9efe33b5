"""The ingress of a fleet: it serves HTTP, knows which replica has which stream, and shows all replicas as one."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar, cast

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from torch import Tensor

from trust_tta.distributed.routing import Places
from trust_tta.distributed.serving import (
    MOST_REPLICAS,
    NAME,
    Plan,
    close_replicas,
    replica_handle,
    replica_numbers,
    start_replicas,
)
from trust_tta.errors import StateError, one_line
from trust_tta.live.stream import REFERENCE_FILE
from trust_tta.serve.app import Api, make_app, read_json_body, respond
from trust_tta.serve.dashboard import MOST_EVENTS, TICK, Board
from trust_tta.serve.engine import Answer
from trust_tta.serve.event_log import Label
from trust_tta.serve.metrics import Metrics, add_up, as_text, gauge
from trust_tta.serve.pool import stream_names
from trust_tta.serve.service import Network, NetworkFacts, Service
from trust_tta.serve.settings import RequestError

T = TypeVar("T")

POLL_SECONDS = 3.0  # within which a replica must answer a poll, or is taken for lost
TRIES = 4  # replicas that may be lost during one request

log = logging.getLogger("trust_tta.distributed")


class ReplicaLostError(Exception):
    """A replica that no longer answers, or not in time."""


class Fleet:
    """The service that `serve.app` wants, over replicas. Its coroutines run in the event loop that calls `start`."""

    def __init__(self, plan: Plan, facts: NetworkFacts) -> None:
        self.plan, self.network, self.settings = plan, facts, plan.settings
        self.board, self.metrics = FleetBoard(self), FleetMetrics(self)
        self.places = Places(self._release)
        self.processes: dict[int, int] = {}
        self._handles: dict[int, Any] = {}
        self._lost: dict[int, asyncio.Event] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        for number in replica_numbers():
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
        """Poll a replica twice a second from now on."""
        self._handles[number] = replica_handle(number)
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
            except Exception as error:  # whatever it was, the replica is polled again
                log.error("a poll of a replica failed", exc_info=error)
            await asyncio.sleep(TICK)

    async def _welcome(self, number: int, streams: Sequence[str]) -> None:
        """A replica has started, or is back; it must release the streams that others have by now."""
        self._lost[number].clear()
        for stream in streams:
            if self.places.of(stream) in (None, number):
                self.places.put(stream, number)
            else:
                await self._call(number, "release", stream, seconds=POLL_SECONDS)
        self.places.live.add(number)
        log.info("a replica has joined", extra={"replica": number})

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
        """The same, unless the replica is lost meanwhile; clients give up before a slow replica counts as lost."""
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

    async def _ask_holder(self, stream: str, what: str, *given: Any) -> tuple[int, Any]:
        """The number and the answer of the replica that has a stream; of the next one where that is lost."""
        for _ in range(TRIES):
            async with self.places.visit(stream) as number:
                if number is None:
                    break
                try:
                    return number, await self._ask(number, what, *given)
                except ReplicaLostError:
                    continue
        raise RequestError(503, "no replica answers at the moment; try again", retry_after=2)

    async def _ask_live(self, what: str, *given: Any) -> dict[int, Any]:
        """What all live replicas answer, by number."""
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
            pass  # it holds nothing any more

    def _soon(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def ask_all(self, what: str, *given: Any) -> dict[int, Any]:
        """What all live replicas answer, for another thread, which waits."""
        return self._soon(self._ask_live(what, *given)).result(self.settings.answer_seconds)

    def _ask_for(self, stream: str, what: str, *given: Any) -> Future[Any]:
        async def ask() -> Any:
            return (await self._ask_holder(stream, what, *given))[1]

        return self._soon(ask())

    # What `serve.app` asks for

    def predict(self, images: Tensor, *, stream: str, adapt: bool) -> Future[Answer]:
        return self._ask_for(stream, "predict", stream, images.numpy(), adapt)

    def give_feedback(self, labels: Sequence[tuple[str, int]]) -> list[Label | None]:
        """Every replica keeps the labels of its own predictions."""
        found: list[Label | None] = [None] * len(labels)
        for answers in self.ask_all("give_feedback", list(labels)).values():
            found = [old or new for old, new in zip(found, answers, strict=True)]
        return found

    def act(self, name: str, action: str) -> Future[dict[str, Any]]:
        return self._ask_for(name, "act", name, action)

    def fork(self, name: str, new: str) -> Future[dict[str, Any]]:
        async def fork() -> dict[str, Any]:
            number, made = await self._ask_holder(name, "fork", name, new)
            self.places.put(new, number)
            return cast(dict[str, Any], made)

        return self._soon(fork())

    def remove(self, name: str) -> Future[None]:
        async def remove() -> None:
            await self._ask_holder(name, "remove", name)
            self.places.forget(name)

        return self._soon(remove())

    def read_state(self, name: str) -> Future[bytes]:
        return self._ask_for(name, "read_state", name)

    def write_state(self, name: str, content: bytes) -> Future[dict[str, Any]]:
        return self._ask_for(name, "write_state", name, content)

    def read_checkpoint(self, name: str) -> Future[bytes]:
        return self._ask_for(name, "read_checkpoint", name)

    def streams(self) -> list[dict[str, Any]]:
        """Every stream, as the replica that has it describes it."""
        told: dict[tuple[int | None, str], dict[str, Any]] = {
            (n, entry["name"]): entry for n, entries in self.ask_all("streams").items() for entry in entries
        }
        places = {name: self.places.of(name) for name in stream_names(self.plan.streams)}
        return [told.get((n, name), {"name": name, "loaded": False}) | {"replica": n} for name, n in places.items()]

    def events(self, stream: str | None, most: int) -> list[dict[str, Any]]:
        return joined_events(self.ask_all("events", stream, most))[-most:]

    def replicas(self) -> list[dict[str, Any]]:
        """Every replica: whether it is live, its process, and its streams."""
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
    """The events of all replicas, oldest first, with numbers that are unique in the fleet."""
    events = [event | {"id": MOST_REPLICAS * event["id"] + n} for n, entries in told.items() for event in entries]
    return sorted(events, key=lambda event: cast(float, event["time"]))


class FleetBoard(Board):
    """The boards of all replicas as one; each stream as the replica that has it shows it."""

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
        whole = self.join(list(self._fleet.ask_all("board.everything").items()))
        return json.dumps(whole | {"events": whole["events"][-MOST_EVENTS:]})

    def join(self, told: Sequence[tuple[int, str]]) -> dict[str, Any]:
        """One message of several; a stream that moved is described by its last replica."""
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
    """The sums over all replicas and the ingress itself."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__()
        self._fleet = fleet

    def text(self) -> bytes:
        fleet = self._fleet
        told = fleet.ask_all("metrics.text")
        metrics = add_up([super().text(), *told.values()])
        streams = metrics.pop("trust_tta_streams", None)
        memory = sum(s.value for s in streams.samples if s.labels["place"] == "memory") if streams else 0
        places = {"memory": memory, "disk": len(stream_names(fleet.plan.streams)) - memory}
        states = {"live": len(told), "lost": len(fleet.replicas()) - len(told)}
        return as_text(
            [
                *metrics.values(),
                gauge("streams", "streams by where they are", "place", places),
                gauge("replicas", "replicas by whether they answer", "state", states),
            ]
        )


class FleetApi(Api):
    """The routes of the service, and those of a fleet."""

    def routes(self) -> list[Route]:
        fleet = [self._route("/replicas", self.replicas), self._route("/replicas", self.grow, "POST", private=True)]
        return [*fleet, *super().routes()]

    async def replicas(self, request: Request) -> Response:
        return respond({"replicas": await self._in_thread(self._fleet.replicas)})

    async def grow(self, request: Request) -> Response:
        """Start more replicas; the streams that belong there move with their next request."""
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


def start_ingress(plan: Plan, facts: NetworkFacts) -> None:
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


def start_serving(plan: Plan, network: Network, *, host: str, port: int, replicas: int) -> None:
    """Start Serve's proxy on one port of the head node, the replicas, and the ingress; `stop_serving` ends them."""
    from ray import serve

    http = {"host": host, "port": port, "keep_alive_timeout_s": 30}
    serve.start(proxy_location="HeadOnly", http_options=http, logging_config={"log_level": "WARNING"})
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # this process' own
    start_replicas(plan, range(replicas))
    start_ingress(plan, network.facts())


def stop_serving() -> None:
    """Close the ingress, then the replicas, then Serve."""
    from ray import serve

    serve.delete(NAME)
    close_replicas()
    serve.shutdown()


def serve_until_signal(
    plan: Plan, network: Network, *, host: str, port: int, replicas: int, on_ready: Callable[[], None]
) -> None:
    """Serve until SIGTERM or SIGINT; then let every replica answer what it has accepted and write its snapshots."""
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
