"""Replicas as real actors: they become one, and survive their coordinator."""

from __future__ import annotations

from types import ModuleType

import numpy as np

from trust_tta.distributed.actors import ReplicaSpec, start_replica_actors
from trust_tta.distributed.averaging import AveragingConfig


def test_actors_average_and_go_on_when_their_coordinator_is_killed(ray: ModuleType) -> None:
    spec = ReplicaSpec("vmamba_nano_cifar10", policy=AveragingConfig(every=16, patience=5.0))
    coordinator, replicas = start_replica_actors(ray, spec, replicas=2, cpus=0.5)
    images = np.random.default_rng(0).standard_normal((8, 3, 32, 32)).astype(np.float32)
    first = ray.get([replica.predict.remote(images) for replica in replicas])
    assert np.array_equal(first[0], first[1])
    assert [r["taken"] for r in ray.get([replica.report.remote() for replica in replicas])] == [1, 1]
    ray.kill(coordinator, no_restart=False)
    ray.get([replica.predict.remote(images) for replica in replicas])
    after = ray.get([replica.predict.remote(images) for replica in replicas])
    assert all(np.isfinite(logits).all() for logits in after)
    reports = ray.get([replica.report.remote() for replica in replicas])
    assert all(r["taken"] + r["alone"] >= 2 for r in reports)
    ray.kill(coordinator)
    for replica in replicas:
        ray.kill(replica)
