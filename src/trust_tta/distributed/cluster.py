"""Connect to a running Ray cluster, or start one on this machine, on loopback and with a token."""

from __future__ import annotations

import os
import platform
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

from trust_tta import __version__
from trust_tta.errors import ConfigError, StateError, one_line
from trust_tta.optional import require

CONNECT_SECONDS = 3.0  # for a port to answer
JOIN_SECONDS = 30.0  # to find out whether what answers is a cluster

# Ray binds to all interfaces on Linux unless it is told that this machine is not for clusters.
LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
_JOIN = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False, logging_level='error')"


@contextmanager
def connected(address: str | None = None, *, cpus: int | None = None) -> Iterator[ModuleType]:
    """Connect Ray to the cluster at `address` ("auto", or HOST:PORT of its head), or start one; yields the module.

    A cluster started here has `cpus` (default: all), listens on loopback only and ends with this context.
    """
    if address is not None:
        _check_address(address)
    else:
        _keep_private()
    ray = require("ray", extra="ray")
    if ray.is_initialized():
        raise StateError("this process is connected to a Ray cluster already; call ray.shutdown() first")
    if address is not None:
        _try_joining(address)
    where: dict[str, Any] = {"address": "local", "num_cpus": cpus, "include_dashboard": False}
    try:
        try:
            ray.init(**(where if address is None else {"address": address}), **_QUIET)
        except Exception as error:  # Ray has no common base class for these errors
            first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
            place = f"at {address}" if address else "on this machine"
            raise ConfigError(f"no Ray cluster could be used {place}: {one_line(first, longest=300)}") from error
        yield ray
    finally:
        with suppress(Exception):
            ray.shutdown()


def _keep_private() -> None:
    """Set the environment of a cluster started here: loopback, a token kept in memory, no telemetry."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # workers are not nicer than local processes
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # the future default, without a warning
    if os.environ.setdefault(LOOPBACK, "0") == "0" and (read := sys.modules.get("ray._private.ray_constants")):
        read.ENABLE_RAY_CLUSTER = False  # type: ignore[attr-defined]  # Ray read the variable when it was imported
    if "ray" not in sys.modules:  # afterwards it is too late; the default from Ray 2.59 on
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    if os.environ.get("RAY_AUTH_MODE", "token") == "token" and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def _check_address(address: str) -> None:
    """Refuse an address where nothing answers: Ray itself would wait for a minute."""
    if address == "auto":
        return
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdigit() and 0 < int(port) < 65536) or "/" in address:
        raise ConfigError(f"--address {address}: give auto or HOST:PORT of the head node, as `ray start` shows it")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--address {address}: no head node answers there ({error}); check HOST:PORT") from error


def _try_joining(address: str) -> None:
    """Join from a separate process first: Ray may hang, or end the process, if no cluster answers."""
    command = [sys.executable, "-c", _JOIN, address]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=JOIN_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        refused = f"--address {address}: what answers there is no Ray cluster that lets this process join"
        raise ConfigError(f"{refused}; check the address, RAY_AUTH_MODE and RAY_AUTH_TOKEN") from error
    if done.returncode:
        raise ConfigError(f"--address {address}: {_explain(done.stderr)}")


def _explain(output: str) -> str:
    """The last error in the output of a process in one line, with a remedy."""
    lowered = output.lower()
    if "version mismatch" in lowered:
        mine = f"Ray {require('ray', extra='ray').__version__} and Python {platform.python_version()}"
        return f"the cluster runs other versions than this process, which has {mine}; install the same on all nodes"
    if "authentication" in lowered or "unauthenticated" in lowered:
        return "the cluster wants a token; set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN as on its head node"
    if "could not find any running ray instance" in lowered:
        return "no Ray cluster runs on this machine; start one with `ray start --head`, or omit --address"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return f"no Ray cluster can be joined there: {one_line(lines[-1], longest=300) if lines else 'no reason given'}"


def versions() -> dict[str, str]:
    """The versions that must be the same on every node."""
    import numpy
    import torch

    found = {"trust-tta": __version__, "torch": str(torch.__version__), "numpy": numpy.__version__}
    return found | {"Python": ".".join(platform.python_version_tuple()[:2])}
