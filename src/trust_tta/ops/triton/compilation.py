"""Compilation of a pass's kernels side by side, before it runs: Triton by itself compiles one launch after another."""

# mypy: ignore-errors
from __future__ import annotations

import contextvars
import hashlib
import os
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from trust_tta import __version__
from trust_tta.ops.triton.cache import temporary_folder

try:
    from triton.runtime._async_compile import AsyncCompileMode
    from triton.runtime.cache import triton_key

    from trust_tta.ops.compiler_processes import CompilerProcesses
except ImportError:  # before Triton 3.5: each kernel is compiled when it is launched
    AsyncCompileMode = None

MAX_PROCESSES = 16  # each takes 200 MB


def compile_ahead(work: Callable[[], object], like: Tensor, kind: str) -> None:
    """Compile the kernels that `work` launches, and load them onto the device of `like`, without launching them.

    Their outputs stay uninitialized, so the results of `work` are undefined. One thread at a time may call this.
    `kind`: description of `work`. A marker of it in Triton's cache makes later processes load the kernels as they go,
    which is faster than a pass to find them.
    """
    if AsyncCompileMode is None:
        return
    device = torch.cuda.get_device_name(like.device) if like.is_cuda else "cpu"
    key = repr((kind, device, triton.__version__, __version__))
    marker = Path(knobs.cache.dir, f"trust_tta-{hashlib.sha256(key.encode()).hexdigest()[:32]}")
    if marker.exists():
        threading.Thread(target=triton_key, daemon=True).start()  # which the first kernel waits for
        return
    thread, run = threading.get_ident(), JITFunction.run
    with KernelCompiler(like) as compiler:
        prepared = compiler.prepare()

        def compile_only(kernel: JITFunction, *arguments: Any, warmup: bool, **options: Any) -> Any:
            ours = threading.get_ident() == thread  # other threads launch theirs
            if ours:
                prepared.result()
            return run(kernel, *arguments, warmup=warmup or ours, **options)

        def work_here() -> None:
            # Triton's mode holds for this thread alone, and so the backward must run in it.
            with AsyncCompileMode(compiler, ignore_errors=True), torch.autograd.set_multithreading_enabled(False):
                work()

        JITFunction.run = compile_only
        try:
            contextvars.copy_context().run(work_here)
        finally:
            JITFunction.run = run
    with suppress(OSError):
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()


class KernelCompiler(ThreadPoolExecutor):
    """Threads that load kernels onto the device of `like`, once processes have compiled them, one for each core."""

    def __init__(self, like: Tensor) -> None:
        count = min(os.cpu_count() or 1, MAX_PROCESSES)
        super().__init__(count)
        self.like = like
        self.processes = CompilerProcesses(count, temporary_folder())
        self.loading = defaultdict(threading.Lock)  # by kernel: its variants share their launchers

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.processes.close()

    def prepare(self) -> Future[None]:
        """Do what the first kernel waits for: Triton builds its driver, and hashes 500 MB of its own files."""

        def work() -> None:
            with suppress(Exception), torch.cuda.device_of(self.like):
                driver.active.get_current_target()
            triton_key()

        return super().submit(work)

    def submit(self, compile_kernel: Callable[[], Any], /) -> Future[Any]:
        """Compile a kernel, build its launcher and load it, the last two of which Triton leaves to the first launch."""

        def work() -> Any:
            self.processes.compile(compile_kernel)
            kernel = compile_kernel()
            try:
                with self.loading[kernel.name], torch.cuda.device_of(self.like):
                    _ = kernel.run
            except Exception:
                kernel._run = None  # the launch tries again, and says what is wrong
            return kernel

        return super().submit(work)
