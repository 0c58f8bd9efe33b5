"""Processes that start within a moment: forked from one that has the imports behind it, and nothing else."""

from __future__ import annotations

from multiprocessing import get_context
from multiprocessing.context import ForkServerContext

IMPORTS = ["trust_tta.serve.server", "torch._dynamo"]


def forking_context() -> ForkServerContext:
    context = get_context("forkserver")
    context.set_forkserver_preload(IMPORTS)
    return context
