"""Replicas of the service, each a Ray Serve application of its own.

Streams are pinned: to ask Serve for any of several replicas would split a stream's state. The replicas share a folder
of streams: a lost replica costs what its streams learned since their last snapshots, and another goes on from these.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from trust_tta.bench.environment import choose_device
from trust_tta.errors import TrustError
from trust_tta.live.guard import Guard
from trust_tta.serve.engine import Answer
from trust_tta.serve.service import Network, Service, open_network
from trust_tta.serve.settings import RequestError, Settings

NAME = "trust-tta"
MOST_REPLICAS = 1024
CLOSE_SECONDS = 30.0
_REPLICA = re.compile(rf"{NAME}-replica-(\d+)")

log = logging.getLogger("trust_tta.distributed")


@dataclass(frozen=True)
class Plan:
    """What every replica is made of. Checkpoint and folder must exist, under the same paths, on every node."""

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


def share_of(resources: Mapping[str, float], replicas: int, *, device: str) -> dict[str, Any]:
    """What a replica claims of a cluster: half of its share, at most of one CPU and GPU, so that the fleet can grow."""
    cpus, gpus = (resources.get(kind, 0.0) / replicas for kind in ("CPU", "GPU"))
    claims = {"cpus": min(1.0, cpus) / 2, "gpus": min(1.0, gpus) / 2 if device != "cpu" else 0.0}
    return claims | {"threads": max(1, int(cpus))}


class Replica:
    """A service without a port, which holds the streams it was asked for."""

    def __init__(self, plan: Plan, number: int) -> None:
        from trust_tta.serve.server import log_as_json

        log_as_json()
        torch.set_num_threads(plan.threads)
        folder = Path(plan.folder) / "replicas" / str(number)
        self.service = Service(
            plan.open_network(), folder, guard=plan.guard, settings=plan.settings, streams=plan.streams
        )
        self.service.board.listen()  # so that ticks always have news
        self.service.start()

    def check_health(self) -> None:
        """Called by Serve, which replaces a replica whose engine has died."""
        if not self.service.alive:
            raise RuntimeError("the engine does not run")

    async def ask(self, what: str, *given: Any) -> tuple[str, Any]:
        """Call `predict` or `poll`, or what has this dotted name in the service.

        ("done", the result), or ("refused", (status, message, seconds to wait)).
        """
        call = attrgetter(what)(self if what in ("predict", "poll") else self.service)
        try:
            found = await asyncio.to_thread(call, *given)
            return "done", await asyncio.wrap_future(found) if isinstance(found, Future) else found
        except RequestError as error:
            return "refused", (error.status, str(error), error.retry_after)
        except TrustError as error:
            log.error("failed", extra={"reason": str(error)})
            return "refused", (503, str(error), 2)

    def predict(self, stream: str, images: Any, adapt: bool) -> Future[Answer]:
        return self.service.predict(torch.tensor(images), stream=stream, adapt=adapt)

    def poll(self) -> dict[str, Any]:
        """Its process, its streams, and what is new on its board."""
        return {"pid": os.getpid(), "streams": self.service.pool.loaded, "news": self.service.board.tick()}


def start_replicas(plan: Plan, numbers: Sequence[int], *, wait: bool = True) -> None:
    """An application for each number, without a route."""
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
        serve.RunTarget(deployment.bind(plan, number), name=_application(number), route_prefix=None)
        for number in numbers
    ]
    serve.run_many(targets, wait_for_applications_running=wait)


def replica_handle(number: int) -> Any:
    from ray import serve

    return serve.get_app_handle(_application(number))


def replica_numbers(*, running: bool = False) -> list[int]:
    """The replicas that Serve knows, or those of them that run."""
    from ray import serve

    found = {_REPLICA.fullmatch(name): app for name, app in serve.status().applications.items()}
    return sorted(int(match[1]) for match, app in found.items() if match and (not running or app.status == "RUNNING"))


def close_replicas() -> None:
    """Let every replica answer what it has accepted and write its snapshots."""
    closing = [replica_handle(number).ask.remote("stop") for number in replica_numbers(running=True)]
    deadline = time.monotonic() + CLOSE_SECONDS
    for response in closing:
        try:
            response.result(timeout_s=max(0.1, deadline - time.monotonic()))
        except Exception as error:  # it may be lost; the others must still be closed
            log.warning("a replica was not closed", extra={"reason": type(error).__name__})


def _application(number: int) -> str:
    return f"{NAME}-replica-{number}"
