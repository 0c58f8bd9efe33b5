"""Kernels compiled side by side before a pass, which finds them; nothing else changes. No GPU is needed."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from triton.runtime.interpreter import InterpretedFunction  # noqa: E402

from tests.methods.networks import same  # noqa: E402
from tests.ops.test_cuda_graphs import FAMILIES, OPTIONS, batches, make_model, small  # noqa: E402
from trust_tta.methods.registry import create_method  # noqa: E402
from trust_tta.ops import cuda_graphs  # noqa: E402
from trust_tta.ops.cuda_graphs import GraphedNetwork  # noqa: E402
from trust_tta.ops.triton import compilation  # noqa: E402

needs_processes = pytest.mark.skipif(vars(compilation)["AsyncCompileMode"] is None, reason="Triton before 3.5")


def passes(cache: Path, *python: Path) -> list[str]:
    """The lines of `compile_ahead.py`."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-W", "error::ResourceWarning", "-m", "tests.ops.compile_ahead", *map(str, python)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Error" not in done.stderr, done.stderr[-2000:]
    return done.stdout.splitlines()


@needs_processes
def test_kernels_are_compiled_in_processes_and_once(tmp_path: Path) -> None:
    """At the first pass, not at the second; from the folder in a new process, unless a marker says they are there."""
    first, second, restarted, marked = passes(tmp_path)
    assert first.startswith("compiled 0, cached 4")
    assert second.startswith("compiled 0, cached 0")
    assert restarted.startswith("compiled 0, cached 4")
    assert marked.startswith("compiled 0, cached 0")
    for line in (first, second, restarted):
        assert line.endswith("in the main thread 0, kept {'CompiledKernel'}")


@needs_processes
def test_folder_that_cannot_be_made_is_replaced_for_the_processes(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    assert passes(blocked / "cache")[0].startswith("compiled 0, cached 4")


@needs_processes
@pytest.mark.parametrize("name", ["application", "python-that-ends", "python-that-is-missing"])
def test_without_processes_threads_compile(name: str, tmp_path: Path) -> None:
    python = tmp_path / name
    if name != "python-that-is-missing":
        python.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
        python.chmod(0o755)
    lines = passes(tmp_path / "cache", python)
    assert lines[0] == "compiled 4, cached 0, in the main thread 0, kept {'CompiledKernel'}"
    assert (tmp_path / "started").exists() == (name == "python-that-ends")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[bool]:
    """Whether each launch of an interpreted kernel was for compilation; none runs."""
    found: list[bool] = []

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found.append(warmup)

    monkeypatch.setattr(InterpretedFunction, "run", run)
    monkeypatch.setattr(compilation, "JITFunction", InterpretedFunction)
    monkeypatch.setattr(cuda_graphs, "compiled_passes", set())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return found


def compile_ahead(graphed: GraphedNetwork, images: Tensor, directions: Tensor, *, learning: bool = False) -> None:
    graphed._compile_ahead(images, directions, (images.shape, learning), learning=learning)


def set_backend(network: nn.Module, backend: str) -> None:
    for module in network.modules():
        if hasattr(type(module), "backend"):
            module.backend = backend  # type: ignore[assignment]


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch, launches: list[bool]) -> None:
    """Compile for the first pass of a kind as on a GPU; the passes themselves run on the CPU's kernels."""
    call: Callable[..., Tensor] = GraphedNetwork.__call__
    seen: set[Any] = set()

    def compile_and_call(
        graphed: GraphedNetwork, images: Tensor, directions: Tensor | None = None, *, capture: bool = True
    ) -> Tensor:
        learning = torch.is_grad_enabled() and len(graphed.parameters) > 0
        key = (id(graphed), images.shape, learning)
        if capture and directions is not None and key not in seen:
            seen.add(key)
            set_backend(graphed.network, "triton")
            compile_ahead(graphed, images, directions, learning=learning)
            set_backend(graphed.network, "auto")
        return call(graphed, images, directions, capture=capture)

    monkeypatch.setattr(GraphedNetwork, "__call__", compile_and_call)


def results(name: str, options: dict[str, Any]) -> Any:
    """Everything that a method gives, has and leaves behind after three batches."""
    torch.manual_seed(0)
    method = create_method(name, make_model("cpu"), **options)
    vars(method.model).update(unchecked_batches=5)
    outputs = [method(images) for images in batches(2, device="cpu")]
    frozen = method.evaluate(outputs[0].new_ones(8, 3, 32, 32))
    left = vars(method.model)["unchecked_batches"], torch.get_rng_state()
    buffers = dict(method.model.named_buffers())
    return [outputs, frozen, method.state_dict(), buffers, left, method.logits_before]


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
def test_compilation_leaves_no_trace_in_a_method(
    name: str, options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    expected = results(name, options)
    for fixture in ("nan_empty", "launches", "ahead"):
        request.getfixturevalue(fixture)
    assert same(results(name, options), expected)
    launches = request.getfixturevalue("launches")
    assert all(launches)
    assert launches or options.get("split_statistics") == "batch"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kernel_of_a_network_is_met_before_the_pass(
    family: str, launches: list[bool], nan_empty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values that were never computed stop no network on the way: the pass itself launches as many kernels."""
    network, images = small(family), torch.randn(2, 3, 32, 32)
    set_backend(network, "triton")
    parameters = [p.requires_grad_() for p in network.parameters() if p.is_floating_point()]
    graphed, directions = GraphedNetwork(network, parameters), network.scan_directions(None, len(images))
    compile_ahead(graphed, images, directions, learning=True)
    assert all(launches)
    met = len(launches)
    logits = network(images, directions=directions)
    torch.autograd.grad(logits, parameters, torch.zeros_like(logits), allow_unused=True)
    assert launches == [True] * met + [False] * met


def test_a_kind_of_pass_is_compiled_for_once_per_process(launches: list[bool]) -> None:
    network, images = make_model("cpu"), batches(1, device="cpu")[0]
    set_backend(network, "triton")
    directions = network.scan_directions(None, len(images))
    counts = []
    for copied, some in ((network, images), (copy.deepcopy(network), images), (network, images[:5]), (network, images)):
        compile_ahead(GraphedNetwork(copied, []), some, directions)
        counts.append(len(launches))
    network.train()
    compile_ahead(GraphedNetwork(network, []), images, directions)
    first = counts[0]
    assert counts == [first, first, 2 * first, 2 * first]
    assert len(launches) > 2 * first


def test_training_keeps_random_draws_and_running_statistics(launches: list[bool], nan_empty: None) -> None:
    network = make_model("cpu").train()
    network.set_stochastic_depth(True)
    set_backend(network, "triton")
    before = {name: value.clone() for name, value in network.state_dict().items()}
    state = torch.get_rng_state()
    images = batches(1, device="cpu")[0]
    graphed = GraphedNetwork(network, list(network.parameters()))
    compile_ahead(graphed, images, network.scan_directions(None, len(images)), learning=True)
    assert launches
    assert same(dict(network.state_dict()), before)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in network.parameters())


def test_hooks_are_not_called(launches: list[bool]) -> None:
    network = make_model("cpu")
    called: list[nn.Module] = []
    handle = network.heads()[0].register_forward_hook(lambda module, *_: called.append(module))
    images = batches(1, device="cpu")[0]
    directions = network.scan_directions(None, len(images))
    compile_ahead(GraphedNetwork(network, []), images, directions)
    assert called == []
    assert launches == []
    handle.remove()
    with nn.modules.module.register_module_forward_hook(lambda module, *_: called.append(module)):
        compile_ahead(GraphedNetwork(network, []), images, directions)
    assert called == []


@pytest.mark.parametrize(("backend", "dtype"), [("reference", torch.float32), ("triton", torch.float64)], ids=str)
def test_network_without_kernels_is_not_called_twice(backend: str, dtype: torch.dtype) -> None:
    network, images = make_model("cpu").to(dtype), batches(1, device="cpu")[0].to(dtype)
    set_backend(network, backend)
    called: list[int] = []
    network.forward = lambda *_, **__: called.append(1)  # type: ignore[assignment]
    compile_ahead(GraphedNetwork(network, []), images, network.scan_directions(None, len(images)))
    assert called == []


def test_network_inside_a_network_captures_nothing_meanwhile(launches: list[bool]) -> None:
    found: list[Any] = []

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = make_model("cpu")
            self.inner = GraphedNetwork(self.network, [])

        def forward(self, images: Tensor, directions: Tensor) -> Tensor:
            found.append(self.inner._find_graphs(images, directions))
            logits: Tensor = self.network(images, directions=directions)
            return logits

    outer, images = Outer(), batches(1, device="cpu")[0]
    compile_ahead(GraphedNetwork(outer, []), images, outer.network.scan_directions(None, len(images)))
    assert found == [None]
    assert outer.inner.seen == set()
    assert not cuda_graphs.compiling.get()


def test_errors_are_left_to_the_pass(launches: list[bool]) -> None:
    network, run = make_model("cpu"), InterpretedFunction.run
    compile_ahead(GraphedNetwork(network, []), torch.zeros(2, 7, 32, 32), network.scan_directions(None, 2))
    assert InterpretedFunction.run is run
    assert not cuda_graphs.capture_lock.locked()


def test_without_triton_s_mode_nothing_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "AsyncCompileMode", None)
    compilation.compile_ahead(lambda: pytest.fail("called"), torch.zeros(()), "")
