"""Connecting: private by default, and every way that it can fail in one line."""

from __future__ import annotations

import os
import socket
from types import ModuleType

import pytest

from trust_tta.distributed import cluster
from trust_tta.distributed.cluster import connected
from trust_tta.errors import ConfigError, StateError
from trust_tta.optional import available

pytestmark = pytest.mark.skipif(not available("ray"), reason="Ray is not installed")


@pytest.mark.parametrize("address", ["head", "head:port", "ray://head:10001", ":6379", "head:0", "head:70000", ""])
def test_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"), connected(address):
        pass


def test_unreachable_address_is_refused() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with pytest.raises(ConfigError, match=f"{port}: no head node answers there"), connected(f"127.0.0.1:{port}"):
        pass


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            "RuntimeError: Version mismatch: The cluster was started with:\n Ray: 2.40.0\n Python: 3.11.1",
            "other versions",
        ),
        ("gcs_client.cc: Unauthenticated: RPC error\nConnectionError: Failed", "RAY_AUTH_TOKEN"),
        ("ConnectionError: Could not find any running Ray instance. Please specify", "ray start --head"),
        ("Traceback\nValueError: so it is", "ValueError: so it is"),
        ("", "no reason given"),
    ],
)
def test_errors_of_ray_are_one_line_with_a_remedy(said: str, words: str) -> None:
    explained = cluster._explain(said)
    assert words in explained
    assert "\n" not in explained


def test_local_cluster_listens_on_loopback_with_a_token(ray: ModuleType) -> None:
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert len(os.environ["RAY_AUTH_TOKEN"]) == 64
    assert {node["NodeManagerAddress"] for node in ray.nodes()} == {"127.0.0.1"}
    listening = _listening_of(os.getpid())
    assert listening
    assert {address for address in listening if address not in ("127.0.0.1", "::ffff:127.0.0.1", "::1")} == set()


def test_second_connection_is_refused(ray: ModuleType) -> None:
    with pytest.raises(StateError, match="connected to a Ray cluster already"), connected():
        pass


def _listening_of(parent: int) -> list[str]:
    """The addresses on which the children of a process listen, from the system's own tables."""
    children = _descendants(parent)
    inodes: set[str] = set()
    for pid in children:
        try:
            links = [os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
        except OSError:
            continue
        inodes |= {link[8:-1] for link in links if link.startswith("socket:[")}
    found = []
    for table in ("tcp", "tcp6"):
        with open(f"/proc/net/{table}", encoding="ascii") as file:
            rows = [line.split() for line in file.readlines()[1:]]
        found += [_address(row[1].rpartition(":")[0]) for row in rows if row[3] == "0A" and row[9] in inodes]
    return found


def _descendants(parent: int) -> set[int]:
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                    parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
            except OSError:
                continue
    family = {parent}
    while more := {pid for pid, above in parents.items() if above in family} - family:
        family |= more
    return family


def _address(text: str) -> str:
    packed = bytes.fromhex(text)
    words = b"".join(packed[i : i + 4][::-1] for i in range(0, len(packed), 4))
    return socket.inet_ntop(socket.AF_INET if len(words) == 4 else socket.AF_INET6, words)
