"""Engines of cells and trainings: this process, several processes, or a Ray cluster."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

from trust_tta.errors import ConfigError

if TYPE_CHECKING:
    from trust_tta.bench.processes import SweepEngine
    from trust_tta.distributed.sweeps import TaskResources


def add_engine_arguments(parser: ArgumentParser, *, task: str = "") -> None:
    """Flags for what runs the work, and where; for the resources of each `task`, if there are several."""
    add = parser.add_argument
    add("--engine", default="local", choices=("local", "ray"), metavar="NAME",
        help="local (default), or ray: a Ray cluster")  # fmt: skip
    head = "head of the Ray cluster, or auto for the one on this machine (default: start one here, on loopback)"
    add("--address", metavar="HOST:PORT", help=head)
    if task:
        add("--cpus", type=int, metavar="N", help=f"CPUs, and threads, of a {task} on the cluster (default 1)")
        shared = f"GPUs of a {task} on the cluster, such as 0.25 (default: 1 where it uses one)"
        add("--gpus", type=float, metavar="X", help=shared)


def check_engine(arguments: Namespace, *flags: str) -> None:
    """Refuse flags of a cluster without one, and impossible numbers, before PyTorch is loaded."""
    given = [flag for flag in ("address", *flags) if getattr(arguments, flag) is not None]
    if arguments.engine == "local" and given:
        raise ConfigError(f"--{given[0]} is for a cluster; add --engine ray, or omit it")
    for flag in ("processes", "cpus"):
        number = getattr(arguments, flag, None)
        if number is not None and number < 1:
            raise ConfigError(f"--{flag} {number}: give 1 or more")
    gpus = getattr(arguments, "gpus", None)
    if gpus is not None and not 0 <= gpus <= 1024:
        raise ConfigError(f"--gpus {gpus:g}: give 0 or more")


def local_engine(processes: int) -> SweepEngine | None:
    """An engine with several processes on this machine; None for one."""
    from trust_tta.bench.processes import run_in_processes

    return partial(run_in_processes, processes=processes) if processes > 1 else None


@contextmanager
def open_cluster(arguments: Namespace, *, device: str) -> Iterator[tuple[ModuleType, TaskResources]]:
    """Ray, connected as long as the context lasts, and the resources of each task."""
    from trust_tta.distributed.cluster import connected
    from trust_tta.distributed.sweeps import choose_resources

    cpus, started_here = arguments.cpus or 1, arguments.address is None
    most = arguments.processes * cpus if arguments.processes and started_here else None
    with connected(arguments.address, cpus=most) as ray:
        yield ray, choose_resources(device, ray.cluster_resources(), cpus=cpus, gpus=arguments.gpus)


@contextmanager
def make_engine(arguments: Namespace, *, device: str) -> Iterator[SweepEngine | None]:
    """The engine that was asked for, as long as the context lasts; None: this process itself."""
    if arguments.engine == "local":
        yield local_engine(arguments.processes or 1)
        return
    from trust_tta.distributed.sweeps import run_on_cluster

    with open_cluster(arguments, device=device) as (ray, resources):
        yield partial(run_on_cluster, ray=ray, resources_per_task=resources, max_tasks=arguments.processes)
