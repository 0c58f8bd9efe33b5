"""Replicas and their coordinator as Ray actors."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trust_tta.distributed.averaging import Averaging, Merge, Offer
from trust_tta.distributed.coordinator import Coordinator, Member
from trust_tta.distributed.replicas import Replica, source_of
from trust_tta.live.guard import Guard
from trust_tta.live.stream import Stream
from trust_tta.methods.base import Method
from trust_tta.methods.registry import create_method
from trust_tta.models.checkpoint import Checkpoint

ANSWER_SECONDS = 10.0  # beyond the patience of a round, before a replica continues alone


@dataclass(frozen=True)
class Recipe:
    """What every replica is made of; the checkpoint must be available under this path or name on every node."""

    checkpoint: str
    method: str = "tide"
    policy: Averaging = Averaging()  # noqa: RUF009, it is frozen
    threads: int = 1

    def make(self) -> Method:
        return create_method(self.method, Checkpoint.open(self.checkpoint).load())


class ReplicaActor:
    """A member of a fleet in a process of its own."""

    def __init__(self, recipe: Recipe, name: str, coordinator: Any, replicas: int) -> None:
        torch.set_num_threads(recipe.threads)
        replica = Replica(Stream(recipe.make(), guard=Guard()), name, fleet=replicas)
        self.wait = recipe.policy.patience + ANSWER_SECONDS
        self.coordinator = coordinator
        self.member = Member(replica, self._meet, recipe.policy, replicas=replicas)

    def predict(self, images: NDArray[np.float32]) -> NDArray[np.float32]:
        """Logits (n, classes) of images (n, c, h, w), adapting on them."""
        logits: NDArray[np.float32] = self.member(torch.tensor(images)).logits.float().cpu().numpy()
        return logits

    def report(self) -> dict[str, int]:
        member = self.member
        return {"taken": member.taken, "returned": member.returned, "alone": member.alone, "base": member.replica.base}

    def _meet(self, offer: Offer) -> Merge | None:
        import ray

        merge: Merge | None = ray.get(self.coordinator.meet.remote(offer), timeout=self.wait)
        return merge


def start_fleet(ray: ModuleType, recipe: Recipe, *, replicas: int, cpus: float = 1.0) -> tuple[Any, list[Any]]:
    """Start the coordinator, which is restarted if it dies, and the replicas."""
    source = source_of(recipe.make())
    options = {"num_cpus": 0, "max_restarts": -1, "max_concurrency": 4 * replicas + 16}
    coordinator = ray.remote(**options)(Coordinator).remote(source, recipe.policy, replicas=replicas)
    actor = ray.remote(num_cpus=cpus)(ReplicaActor)
    return coordinator, [actor.remote(recipe, f"replica {i}", coordinator, replicas) for i in range(replicas)]
