"""Compilation of Triton kernels in processes of their own: half of it, in Python, would hold the caller's lock.

`python -m trust_tta.ops.compiler_processes` imports Triton and forks the workers. That is safe there, without threads
or a CUDA device, and would not be in the caller; it does not import the caller's main module either.
"""

# mypy: ignore-errors
from __future__ import annotations

import fcntl
import importlib
import inspect
import io
import os
import pickle
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable
from contextlib import ExitStack, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import Any

import triton
from triton import knobs
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITFunction

MAX_SECONDS = 60  # after which a worker is given up


class CompilerProcesses:
    """Worker processes that compile kernels into Triton's cache; where that fails, the caller compiles them itself.

    `fallback`: the folder that serves where the cache cannot be written.
    """

    def __init__(self, count: int, fallback: str) -> None:
        self.idle: SimpleQueue[Connection | None] = SimpleQueue()  # None: a worker that was given up
        self.answered = False
        pipes = [Pipe() for _ in range(count)]
        theirs = [pipe.fileno() for _, pipe in pipes]
        command = [sys.executable, "-P", "-W", "ignore", "-m", __name__, knobs.cache.dir, fallback, *map(str, theirs)]
        self.process: subprocess.Popen[bytes] | None = None
        # An application with Python inside would start itself again.
        with suppress(OSError):
            if Path(sys.executable or "").name.startswith("python"):
                self.process = subprocess.Popen(
                    command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, pass_fds=theirs,
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )  # fmt: skip
        for ours, their in pipes:
            their.close()
            self.idle.put(ours)

    def compile(self, compile_kernel: Callable[[], Any]) -> None:
        """Let a worker compile what `compile_kernel`, made by Triton, then finds in the cache."""
        worker = self.idle.get()
        try:
            made_of = inspect.getclosurevars(compile_kernel).nonlocals
            request = io.BytesIO()
            _Pickler(request).dump((made_of["src"], made_of["target"], made_of["options"].__dict__))
            worker.send_bytes(request.getbuffer())
            if not worker.poll(MAX_SECONDS):
                raise TimeoutError
            worker.recv_bytes()
            self.answered = True
        except Exception:  # whatever it was, the caller compiles the kernel
            worker = None
        finally:
            self.idle.put(worker)

    def close(self) -> None:
        """End the workers, upon which the process that has forked them ends, too; before the first answer, kill it."""
        while not self.idle.empty():
            with suppress(Exception), self.idle.get() as worker:
                worker.send_bytes(b"")
        if self.process is not None:
            try:
                self.process.wait(timeout=0.5 if self.answered else 0)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


class _Pickler(pickle.Pickler):
    """Names kernels instead of their code."""

    def persistent_id(self, value: object) -> tuple[str, str] | None:
        return (value.fn.__module__, value.fn.__qualname__) if isinstance(value, JITFunction) else None


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, names: tuple[str, str]) -> JITFunction:
        return getattr(importlib.import_module(names[0]), names[1])


def work(worker: Connection) -> None:
    """Compile kernels until the caller ends this or is gone."""
    while request := worker.recv_bytes():
        with suppress(Exception):  # the caller compiles the kernel, and says what is wrong
            source, target, options = _Unpickler(io.BytesIO(request)).load()
            with ExitStack() as stack:
                with suppress(OSError):  # a cache that cannot be written has no lock
                    Path(knobs.cache.dir).mkdir(parents=True, exist_ok=True)
                    lock = stack.enter_context(Path(knobs.cache.dir, "trust_tta.lock").open("a"))
                    fcntl.lockf(lock, fcntl.LOCK_EX, 1, zlib.crc32(request))  # others may compile the same kernel
                triton.compile(source, target=target, options=options)
        worker.send_bytes(b"")


def main(cache: str, fallback: str, *workers: str) -> None:
    """Fork a process for each of the file descriptors `workers`."""
    # Kernels need Triton alone; PyTorch, for their launchers, takes two seconds to import.
    sys.modules["torch"] = ModuleType("torch")
    sys.modules["torch"].Tensor = object
    from trust_tta.ops.triton.cache import FallbackCache

    knobs.cache.dir, FallbackCache.fallback = cache, fallback
    triton_key()  # once, for all of them
    for descriptor in workers:
        if os.fork() == 0:
            with suppress(EOFError, OSError):
                work(Connection(int(descriptor)))
            os._exit(0)
    for _ in workers:
        os.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
