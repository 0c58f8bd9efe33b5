"""Replicas of the service, each a Ray Serve application of its own.

Streams are pinned to replicas, since Serve would spread the requests of one stream over all replicas of an application.
Replicas share a folder of streams: if one is lost, others continue its streams from their last snapshots.
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
from pathlib import Path
from typing import Any

import torch

from trust_tta.bench.environment import choose_device
from trust_tta.errors import TrustError
from trust_tta.serve.engine import RequestPrediction
from trust_tta.serve.network import NetworkSource, ServedNetwork, open_network
from trust_tta.serve.service import Service
from trust_tta.serve.settings import MAX_REQUESTS, RequestError, Settings

NAME = "trust-tta"
MAX_REPLICAS = 1024
CLOSE_SECONDS = 30.0
_REPLICA = re.compile(rf"{NAME}-replica-(\d+)")

log = logging.getLogger("trust_tta.distributed")


@dataclass(frozen=True)
class ReplicaConfig:
    """The configuration of every replica. Files and folder must exist, under the same paths, on every node."""

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
    """Ray resources of one replica: half of its part, at most half a CPU and GPU, to leave room for more."""
    cpus, gpus = (resources.get(kind, 0.0) / replicas for kind in ("CPU", "GPU"))
    claims = {"cpus": min(1.0, cpus) / 2, "gpus": min(1.0, gpus) / 2 if device != "cpu" else 0.0}
    return claims | {"threads": max(1, int(cpus))}


class ServiceReplica:
    """A service without a port, which holds the streams that the ingress routes to it."""

    def __init__(self, config: ReplicaConfig, number: int) -> None:
        from trust_tta.serve.server import log_as_json

        log_as_json()
        torch.set_num_threads(config.threads)
        folder = Path(config.folder) / "replicas" / str(number)
        self.service = Service(config.open_network(), folder, settings=config.settings, streams=config.streams)

    def check_health(self) -> None:
        """Called by Serve, which replaces a replica whose engine has died."""
        if not self.service.ready:
            raise RuntimeError("the engine does not run")

    async def ask(self, what: str, *given: Any) -> tuple[str, Any]:
        """Call `predict` or `poll`, or a method of the service.

        ("done", the result), or ("refused", (status, message, seconds to wait)).
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

    def predict(self, stream: str, images: torch.Tensor, adapt: bool) -> Future[RequestPrediction]:
        return self.service.predict(images, stream=stream, adapt=adapt)

    def poll(self) -> dict[str, Any]:
        """Its process and its streams."""
        return {"pid": os.getpid(), "streams": self.service.streams.loaded}


def start_replicas(config: ReplicaConfig, numbers: Sequence[int], *, wait: bool = True) -> None:
    """Start an application for each number, without an HTTP route."""
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
        serve.RunTarget(deployment.bind(config, number), name=_application(number), route_prefix=None)
        for number in numbers
    ]
    serve.run_many(targets, wait_for_applications_running=wait)


def replica_handle(number: int) -> Any:
    from ray import serve

    return serve.get_app_handle(_application(number))


def replica_numbers(*, running: bool = False) -> list[int]:
    """The numbers of all replicas, or of those that run."""
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
