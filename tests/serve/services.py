"""A small network to serve, images to send, and servers: within the process, and as processes of their own."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import save

from trust_tta.live.guard import Guard
from trust_tta.models.factory import create_model
from trust_tta.preprocessing import Preprocessing
from trust_tta.serve.server import address_of, bind, make_server
from trust_tta.serve.service import Network, Service, open_network
from trust_tta.serve.settings import Settings

CLASSES = ("ant", "bee", "cat", "dog")
SIZE = 16
MODEL = "tiny"
TOKEN = "a-token"
PRIVATE = {"Authorization": f"Bearer {TOKEN}"}
SHAPE: dict[str, Any] = {"depths": (1, 1), "dims": (8, 16), "norm": "batch"}
ROOT = Path(__file__).resolve().parents[2]


@cache
def checkpoint_bytes() -> bytes:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = create_model("vmamba_nano", num_classes=len(CLASSES), **SHAPE)
    about = {
        "variant": "vmamba_nano",
        "overrides": json.dumps(SHAPE),
        "num_classes": str(len(CLASSES)),
        "classes": json.dumps(CLASSES),
        "preprocessing": Preprocessing(size=SIZE, resize=SIZE).to_json(),
    }
    return save(model.state_dict(), about)


def write_checkpoint(folder: Path) -> Path:
    file = folder / f"{MODEL}.safetensors"
    file.write_bytes(checkpoint_bytes())
    return file


def make_network(folder: Path, method: str = "tide") -> Network:
    return open_network(str(write_checkpoint(folder)), method)


def pixels(count: int = 1, *, size: int = SIZE, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (count, size, size, 3), dtype=np.uint8)


def picture(kind: str = "PNG", *, size: int = SIZE, seed: int = 0) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels(size=size, seed=seed)[0]).save(buffer, kind)
    return buffer.getvalue()


@contextmanager
def serving(
    folder: Path, *, method: str = "tide", guard: Guard | None = None, **settings: Any
) -> Iterator[tuple[httpx.Client, Service]]:
    """A service within this process, on a free port, and a client of it."""
    network = make_network(folder, method)
    service = Service(network, folder / "state", guard=guard, settings=Settings(**settings))
    with running(service) as address, httpx.Client(base_url=address, timeout=60) as client:
        yield client, service


@contextmanager
def running(service: Service) -> Iterator[str]:
    """The address of a service, in a thread of its own until the block ends."""
    listener, ready = bind("127.0.0.1", 0), threading.Event()
    server = make_server(service, token=TOKEN, on_ready=ready.set)
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]))
    thread.start()
    try:
        assert ready.wait(60)
        yield address_of(listener)
    finally:
        server.stop()
        thread.join(60)
        assert not thread.is_alive()


@dataclass
class Process:
    """`trust-tta serve` as a process. `log`: its lines so far."""

    child: subprocess.Popen[str]
    address: str
    log: list[str] = field(default_factory=list)

    def kill(self) -> None:
        self.child.kill()
        self.child.wait(60)

    def stop(self) -> int:
        self.child.terminate()
        return self.child.wait(60)


@contextmanager
def process(folder: Path, *flags: str) -> Iterator[Process]:
    """The command on a free port, over the folder's state, until the end of the block at the latest."""
    checkpoint = write_checkpoint(folder)
    command = [sys.executable, "-m", "trust_tta", "serve", "--checkpoint", str(checkpoint), "--method", "tide"]
    command += ["--port", "0", "--token", TOKEN, "--state", str(folder / "state"), *flags]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    )
    assert child.stdout is not None
    assert child.stderr is not None
    running, errors = Process(child, ""), child.stderr
    reader = threading.Thread(target=lambda: running.log.extend(errors), daemon=True)
    reader.start()
    try:
        line = next((line for line in child.stdout if "http://" in line), "")
        assert line, (child.wait(10), running.log)
        running.address = line.split()[3]
        yield running
    finally:
        if child.poll() is None:
            child.kill()
        child.wait(60)
        reader.join(10)
        child.stdout.close()
        errors.close()


def post_until(client: httpx.Client, path: str, **content: Any) -> httpx.Response:
    """Post, and again while the service is busy."""
    for _ in range(100):
        response = client.post(path, **content)
        if response.status_code not in (429, 503):
            break
        time.sleep(0.05)
    return response
