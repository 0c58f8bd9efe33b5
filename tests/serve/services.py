"""A small network to serve, images to send, and servers: within the process, and as processes of their own."""

from __future__ import annotations

import io
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import save

from tests.processes import forking_context
from trust_tta.cli.main import main
from trust_tta.live.guard import Guard
from trust_tta.models.typed import create_model
from trust_tta.preprocessing import Preprocessing
from trust_tta.serve.app import Api
from trust_tta.serve.network import ServedNetwork, open_network
from trust_tta.serve.server import Server, address_of, bind
from trust_tta.serve.service import Service
from trust_tta.serve.settings import Settings

CLASSES = ("ant", "bee", "cat", "dog")
SIZE = 16
MODEL = "tiny"
TOKEN = "a-token"
PRIVATE = {"Authorization": f"Bearer {TOKEN}"}
SHAPE: dict[str, Any] = {"depths": (1, 1), "dims": (8, 16), "norm": "batch"}


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


def make_network(folder: Path, method: str = "tide") -> ServedNetwork:
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
    server = Server(Api(service, token=TOKEN), on_ready=ready.set)
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
    """`trust-tta serve` as a process. `log`: the lines that it wrote to stderr."""

    child: BaseProcess
    errors: Path
    address: str = ""

    @property
    def log(self) -> list[str]:
        return self.errors.read_text(encoding="utf-8").splitlines()

    def kill(self) -> None:
        self.child.kill()
        self.child.join(60)

    def stop(self) -> int | None:
        self.child.terminate()
        self.child.join(60)
        return self.child.exitcode


@contextmanager
def process(folder: Path, *flags: str, checkpoint: str | None = None) -> Iterator[Process]:
    """The command on a free port, over the folder's state, until the end of the block at the latest."""
    served = checkpoint or str(write_checkpoint(folder))
    command = ["serve", "--checkpoint", served, "--method", "tide", "--port", "0"]
    command += ["--token", TOKEN, "--state", str(folder / "state"), *flags]
    output, errors = folder / "output.txt", folder / "errors.txt"
    output.write_bytes(b"")
    child = forking_context().Process(target=_run_command, args=(command, output, errors))
    child.start()
    running = Process(child, errors)
    try:
        deadline = time.monotonic() + 120
        while "http://" not in (said := output.read_text(encoding="utf-8")):
            assert child.is_alive(), running.log
            assert time.monotonic() < deadline, said
            time.sleep(0.02)
        running.address = said.split("(page)")[0].split()[-1]
        yield running
    finally:
        running.kill()


def _run_command(command: list[str], output: Path, errors: Path) -> None:
    sys.stdout = output.open("w", encoding="utf-8", buffering=1)
    sys.stderr = errors.open("w", encoding="utf-8", buffering=1)
    sys.exit(main(command))


def post_until(client: httpx.Client, path: str, **content: Any) -> httpx.Response:
    """Post, and again while the service is busy."""
    for _ in range(100):
        response = client.post(path, **content)
        if response.status_code not in (429, 503):
            break
        time.sleep(0.05)
    return response
