"""Replicas and their coordinator as Ray actors."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trust_tta.distributed.averaging import AveragingConfig, MergeResult, ReplicaUpdate
from trust_tta.distributed.coordinator import Coordinator, SynchronizedReplica
from trust_tta.distributed.replicas import Replica, source_of
from trust_tta.live.guard import Guard
from trust_tta.live.stream import Stream
from trust_tta.methods.base import Method
from trust_tta.methods.registry import create_method
from trust_tta.models.checkpoint import Checkpoint

ANSWER_SECONDS = 10.0  # after the patience of a round, before a replica continues alone


@dataclass(frozen=True)
class ReplicaSpec:
    """Recipe for building every replica; the checkpoint must be available under this path or name on every node."""

    checkpoint: str
    method: str = "tide"
    policy: AveragingConfig = AveragingConfig()  # noqa: RUF009, it is frozen
    threads: int = 1

    def make(self) -> Method:
        return create_method(self.method, Checkpoint.open(self.checkpoint).load())


class ReplicaActor:
    """A synchronized replica in its own process."""

    def __init__(self, spec: ReplicaSpec, name: str, coordinator: Any, replicas: int) -> None:
        torch.set_num_threads(spec.threads)
        replica = Replica(Stream(spec.make(), guard=Guard()), name, replicas=replicas)
        self.wait = spec.policy.patience + ANSWER_SECONDS
        self.coordinator = coordinator
        self.member = SynchronizedReplica(replica, self._exchange, spec.policy, replicas=replicas)

    def predict(self, images: NDArray[np.float32]) -> NDArray[np.float32]:
        """Logits (n, classes) of images (n, c, h, w), adapting on them."""
        logits: NDArray[np.float32] = self.member(torch.tensor(images)).logits.float().cpu().numpy()
        return logits

    def report(self) -> dict[str, int]:
        member = self.member
        return {"taken": member.taken, "returned": member.returned, "alone": member.alone, "base": member.replica.base}

    def _exchange(self, update: ReplicaUpdate) -> MergeResult | None:
        import ray

        merge: MergeResult | None = ray.get(self.coordinator.exchange.remote(update), timeout=self.wait)
        return merge


def start_replica_actors(
    ray: ModuleType, spec: ReplicaSpec, *, replicas: int, cpus: float = 1.0
) -> tuple[Any, list[Any]]:
    """Start the coordinator, which is restarted if it dies, and the replicas."""
    source = source_of(spec.make())
    options = {"num_cpus": 0, "max_restarts": -1, "max_concurrency": 4 * replicas + 16}
    coordinator = ray.remote(**options)(Coordinator).remote(source, spec.policy, replicas=replicas)
    actor = ray.remote(num_cpus=cpus)(ReplicaActor)
    return coordinator, [actor.remote(spec, f"replica {i}", coordinator, replicas) for i in range(replicas)]
