"""CUDA graph capture and replay of forward and backward passes.

A pass launches hundreds of small kernels, and at small batches the device waits for the host; a captured pass is one
launch. The traversal order is data, so one graph serves all orders.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from trust_tta.errors import reason_of
from trust_tta.ops.functional import HAS_TRITON

MAX_GRAPHS = 8  # each holds the memory of a pass
MAX_SEEN = 64  # kinds of batches that are remembered to have come once

# Work that other threads start during a capture does not break it, unless it waits for the device.
CAPTURE_OPTIONS: dict[str, Any] = {"capture_error_mode": "thread_local"}

capture_lock = threading.Lock()  # CUDA forbids waiting for a device during a capture on it

compiled_passes: set[str] = set()  # the kinds of passes whose kernels were compiled ahead
compiling: ContextVar[bool] = ContextVar("compiling", default=False)  # in a pass that computes nothing


class GraphedNetwork:
    """Calls a network; on a CUDA device, replays a captured pass from the second batch of a shape and dtype on.

    Only networks whose order is a tensor are captured: others may not do the same in each pass. Gradients of a captured
    pass stay valid until the next pass. Later changes to the values of parameters and buffers take effect; new modules,
    hooks or settings do not. A replay draws the random numbers and updates the running statistics that a plain pass
    would.

    `cache_stem`: images that are the same tensor as in the last pass are taken for unchanged, and so are the weights
    that are not among the `parameters`; the stem and the casts of these weights then run once per batch.
    """

    def __init__(self, network: nn.Module, parameters: Sequence[Tensor], *, cache_stem: bool = False) -> None:
        self.network, self.parameters, self.cache_stem = network, list(parameters), cache_stem
        self.stems: dict[Hashable, StemGraph] = {}
        self.last_stem: StemGraph | None = None  # of the last replay
        self.graphs: dict[Hashable, PassGraphs] = {}
        self.seen: set[Hashable] = set()
        self.failed = False  # a capture that failed may leave the device unusable for another: no second try
        self.tensors: list[Tensor] = []  # the network's, collected once: walking through its modules is slow
        self.addresses: list[int] = []
        self.pool: Any = None  # the memory that the graphs share
        self.stream: torch.cuda.Stream | None = None  # of the last replay
        self.pending: weakref.ref[PendingBackward] | None = None  # a pass whose activations must not be overwritten

    def __call__(self, images: Tensor, directions: Tensor | None = None, *, capture: bool = True) -> Tensor:
        """Logits of images (n, ...) in the order of `directions` (4,) or (n, 4)."""
        graphs = (
            self._find_graphs(images, directions) if capture and directions is not None and images.is_cuda else None
        )
        if graphs is None or directions is None or (self.pending is not None and self.pending() is not None):
            return self.network(images) if directions is None else self.network(images, directions=directions)
        stream = torch.cuda.current_stream(images.device)
        if self.stream is not None and self.stream != stream:  # replays share memory
            stream.wait_stream(self.stream)
        self.stream = stream
        # The stem output of another kind of batch may have been overwritten by passes of this one.
        graphs.stem.load(images, reuse=self.cache_stem and self.last_stem is graphs.stem)
        self.last_stem = graphs.stem
        logits = graphs.replay(directions)
        if graphs.backward is not None:
            pending = PendingBackward()
            self.pending = weakref.ref(pending)
            logits = _ReplayedForward.apply(logits, graphs, pending, *self.parameters)  # type: ignore[no-untyped-call]
        return logits

    def __reduce__(self) -> tuple[Callable[..., GraphedNetwork], tuple[nn.Module, list[Tensor]]]:
        """Graphs hold addresses: a copy or a pickle starts without any."""
        return partial(GraphedNetwork, cache_stem=self.cache_stem), (self.network, self.parameters)

    def _find_graphs(self, images: Tensor, directions: Tensor) -> PassGraphs | None:
        """The graphs for batches of this shape and dtype, captured at the second one."""
        if self.failed or compiling.get() or torch.cuda.is_current_stream_capturing():
            return None
        self.tensors = self.tensors or list(self.network.parameters())
        addresses = list(map(Tensor.data_ptr, self.tensors))
        if addresses != self.addresses:  # the network was moved
            self.graphs, self.stems, self.seen, self.addresses = {}, {}, set(), addresses
        autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        learning = torch.is_grad_enabled() and len(self.parameters) > 0
        key = (images.shape, images.dtype, directions.shape, learning, autocast)
        if key in self.graphs:
            return self.graphs[key]
        if key not in self.seen:  # the first of a kind compiles kernels, which cannot be captured
            if len(self.seen) < MAX_SEEN:
                self.seen.add(key)
                self._compile_ahead(images, directions, key, learning=learning)
        elif len(self.graphs) < MAX_GRAPHS:
            try:
                self.graphs[key] = self._capture(images, directions, learning, autocast)
            except Exception as error:  # whatever it was, a plain pass will raise it again or not need it
                self.failed, self.graphs, self.stems = True, {}, {}
                warnings.warn(f"CUDA graphs are not used, so passes are slower ({reason_of(error)})", stacklevel=2)
        return self.graphs.get(key)

    def _compile_ahead(self, images: Tensor, directions: Tensor, key: Hashable, *, learning: bool) -> None:
        """Compile the kernels of a pass side by side, unless this process has; restores buffers and random state."""
        if not uses_triton(self.network, images) or has_hooks(self.network):
            return
        from trust_tta.ops.triton.compilation import compile_ahead

        def work() -> None:  # in a context of its own
            compiling.set(True)
            logits = self.network(images, directions=directions)
            if learning:
                gradients(logits, self.parameters, torch.zeros_like(logits))

        kind = repr((key, images.stride(), images.device, torch.is_grad_enabled(), settings(self.network)))
        # Whatever fails, the pass itself will raise it again or not need it.
        with suppress(Exception), capture_lock:
            if kind not in compiled_passes:
                compiled_passes.add(kind)
                with preserved_state(self.network, images.device):
                    compile_ahead(work, images, kind)

    def _capture(self, images: Tensor, directions: Tensor, learning: bool, autocast: torch.dtype | None) -> PassGraphs:
        if not self.graphs:  # a handle is dead once the graphs that used it are gone
            self.pool = torch.cuda.graph_pool_handle()
        # Weights cast before an update must not be used after it.
        cast: AbstractContextManager[Any] = nullcontext()
        if autocast is not None:
            cast = torch.autocast("cuda", autocast, cache_enabled=False)
        # A capture that fails can leave its stream in place.
        back = torch.cuda.stream(torch.cuda.current_stream(images.device))
        # Tensors made in inference mode could not be written to outside it; leaving it turns gradients on.
        ordinary = torch.inference_mode(False)
        with capture_lock, back, cast, ordinary, preserved_state(self.network, images.device):
            kind = (images.shape, images.dtype, autocast)
            if kind not in self.stems:
                stem = StemGraph(self.network, images)
                if self.cache_stem:
                    learned = {id(parameter) for parameter in self.parameters}
                    cast_once = {
                        n: p.detach() for n, p in cast_parameters(self.network).items() if id(p) not in learned
                    }
                    stem.capture({} if autocast is None else cast_once, self.pool, autocast)
                self.stems[kind] = stem
            with torch.set_grad_enabled(learning):
                return PassGraphs(
                    self.stems[kind], directions, self.parameters if learning else (), self.pool, autocast
                )


class PendingBackward:
    """Token that lives as long as a forward pass waits for its backward."""


class StemGraph:
    """Work shared by all passes over a batch: casts of frozen weights, and the network's stem.

    `images`: a copy of the batch at a fixed address. `weights`: those that are cast and not adapted, by name.
    `network`: what remains to be called with `given`, the images or the stem's output.
    """

    def __init__(self, network: nn.Module, images: Tensor) -> None:
        self.network, self.images = network, images.detach().clone()
        self.given = self.images
        self.weights: dict[str, Tensor] = {}
        self.graph: torch.cuda.CUDAGraph | None = None
        self.last: weakref.ref[Tensor] | None = None
        self.version = 0

    @torch.no_grad()
    def capture(self, frozen: Mapping[str, Tensor], pool: Any, autocast: torch.dtype | None) -> None:
        """Capture the casts and the stem, unless there is nothing to do."""
        stem: Callable[[Tensor], Tensor | None] = getattr(self.network, "forward_stem", lambda images: None)

        def work() -> tuple[dict[str, Tensor], Tensor | None]:
            weights = {} if autocast is None else cast_together(frozen, autocast)
            # As convolutions read them: the library would convert them in every pass.
            channels_last = {
                name: w.contiguous(memory_format=torch.channels_last) for name, w in weights.items() if w.dim() == 4
            }
            return {**weights, **channels_last}, stem(self.images)

        with side_stream(self.images.device) as stream:
            if work() == ({}, None):
                return
        self.graph = torch.cuda.CUDAGraph()
        with own_workspaces(), torch.cuda.graph(self.graph, pool=pool, stream=stream, **CAPTURE_OPTIONS):
            self.weights, output = work()
        if output is not None:
            self.network, self.given = NetworkAfterStem(self.network), output
            self.weights = {f"network.{name}": weight for name, weight in self.weights.items()}

    def load(self, images: Tensor, *, reuse: bool) -> None:
        """Run the stem on images (n, ...); with `reuse`, not again on those of the last call."""
        if reuse and self.last is not None and self.last() is images and self.version == images._version:
            return
        with torch.no_grad():
            self.images.copy_(images)
        if self.graph is not None:
            self.graph.replay()
            self.last, self.version = weakref.ref(images), images._version


class NetworkAfterStem(nn.Module):
    """The network from its stem's output on."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, stem_output: Tensor, *, directions: Tensor) -> Tensor:
        return self.network.forward_after_stem(stem_output, directions)


class PassGraphs:
    """The graph of a forward and, where there are parameters, of its backward, over tensors at fixed addresses."""

    def __init__(
        self, stem: StemGraph, directions: Tensor, parameters: Sequence[Tensor], pool: Any, autocast: torch.dtype | None
    ) -> None:
        self.stem, self.directions, network = stem, directions.clone(), stem.network
        # Leaves of our own over the same memory: those of an earlier pass belong to another stream.
        leaves = [p.detach().requires_grad_() for p in parameters]
        names = {id(p): name for name, p in network.named_parameters()}
        weights = {names[id(p)]: leaf for p, leaf in zip(parameters, leaves, strict=True)}
        rest = {} if autocast is None else {n: p for n, p in cast_parameters(network).items() if n not in stem.weights}
        cast = {name: weights.get(name, p.detach()) for name, p in rest.items()}

        def call() -> Tensor:
            given = weights if autocast is None else {**weights, **stem.weights, **cast_together(cast, autocast)}
            return functional_call(network, given, (stem.given,), {"directions": self.directions})

        with side_stream(directions.device) as stream:  # libraries set up their workspace for a stream on first use
            logits = call()
            self.dlogits = torch.zeros_like(logits)
            if leaves:
                gradients(logits, leaves, self.dlogits)
        self.forward = torch.cuda.CUDAGraph()
        with own_workspaces(), torch.cuda.graph(self.forward, pool=pool, stream=stream, **CAPTURE_OPTIONS):
            logits = call()
        self.backward: torch.cuda.CUDAGraph | None = None
        self.gradients: list[Tensor | None] = []
        if leaves:
            self.backward = torch.cuda.CUDAGraph()
            with own_workspaces(), torch.cuda.graph(self.backward, pool=pool, stream=stream, **CAPTURE_OPTIONS):
                self.gradients = gradients(logits, leaves, self.dlogits)
        self.logits: Tensor = logits.detach()

    @torch.no_grad()
    def replay(self, directions: Tensor) -> Tensor:
        """Logits of the images that the stem has loaded."""
        self.directions.copy_(directions)
        self.forward.replay()
        return self.logits.clone()

    def replay_backward(self, dlogits: Tensor) -> list[Tensor | None]:
        """The gradients, valid until the next pass."""
        self.dlogits.copy_(dlogits)
        self.backward.replay()  # type: ignore[union-attr]
        return self.gradients


Work = Callable[[Tensor, float], tuple[Tensor, ...]]


class GraphedFunction:
    """Calls `work` with images (n, ...) and a number; on a CUDA device, replays it from the second such call on.

    `work` writes to tensors at fixed addresses, and neither reads values from the device nor copies any to it. Its
    results are valid until the next call.
    """

    def __init__(self, work: Work) -> None:
        self.work = work
        self.graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Tensor, tuple[Tensor, ...]]] = {}
        self.seen: set[Hashable] = set()
        self.failed = False  # a capture that failed may leave the device unusable for another: no second try
        self.stream: torch.cuda.Stream | None = None  # of the last replay

    def __reduce__(self) -> tuple[type, tuple[Work]]:
        """Copies and pickles hold no CUDA graphs."""
        return type(self), (self.work,)

    def __call__(self, images: Tensor, number: float) -> tuple[Tensor, ...]:
        if not images.is_cuda or self.failed or compiling.get() or torch.cuda.is_current_stream_capturing():
            return self.work(images, number)
        key = (images.shape, images.stride(), images.dtype, images.device, number)
        if key not in self.graphs and key in self.seen and len(self.graphs) < MAX_GRAPHS:
            try:
                self.graphs[key] = self._capture(images, number)
            except Exception as error:  # whatever it was, plain work will raise it again or not need it
                self.failed, self.graphs = True, {}
                warnings.warn(f"CUDA graphs are not used, so statistics are slower ({reason_of(error)})", stacklevel=2)
        if len(self.seen) < MAX_SEEN:  # the first of a kind loads kernels, which cannot be captured
            self.seen.add(key)
        if key not in self.graphs:
            return self.work(images, number)
        stream = torch.cuda.current_stream(images.device)
        if self.stream is not None and self.stream != stream:  # replays share memory
            stream.wait_stream(self.stream)
        self.stream = stream
        graph, copied, results = self.graphs[key]
        copied.copy_(images)
        graph.replay()
        return results

    def _capture(self, images: Tensor, number: float) -> tuple[torch.cuda.CUDAGraph, Tensor, tuple[Tensor, ...]]:
        """A graph that is not yet replayed, the images that it reads, and the results that it writes."""
        graph = torch.cuda.CUDAGraph()
        # A capture that fails can leave its stream in place; tensors of inference mode cannot be written to.
        back = torch.cuda.stream(torch.cuda.current_stream(images.device))
        with capture_lock, back, torch.inference_mode(False), torch.no_grad():
            copied = images.detach().clone()
            stream = torch.cuda.Stream(images.device)
            stream.wait_stream(torch.cuda.current_stream(images.device))
            with torch.cuda.graph(graph, stream=stream, **CAPTURE_OPTIONS):
                results = self.work(copied, number)
        return graph, copied, results


def gradients(logits: Tensor, parameters: Sequence[Tensor], dlogits: Tensor) -> list[Tensor | None]:
    """Gradients of the parameters, given those of the logits; None where they are not used."""
    number = _GivenGradient.apply(logits, dlogits)  # type: ignore[no-untyped-call]
    return list(torch.autograd.grad(number, parameters, allow_unused=True))


def uses_triton(network: nn.Module, images: Tensor) -> bool:
    """Whether a pass over the images launches Triton kernels."""
    kernels = any(getattr(module, "backend", None) in ("auto", "triton") for module in network.modules())
    return HAS_TRITON and kernels and images.dtype != torch.float64


def has_hooks(network: nn.Module) -> bool:
    """Whether passes call hooks, of the network's modules or of all modules."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    own = any(getattr(module, kind) for module in network.modules() for kind in kinds)
    return own or any(getattr(nn.modules.module, f"_global{kind}") for kind in kinds)


def settings(network: nn.Module) -> Hashable:
    """Everything that decides the kernels of a pass: classes, plain attributes, and the kinds of tensors."""
    return tuple(
        (
            type(module),
            *((name, value) for name, value in vars(module).items() if isinstance(value, bool | int | float | str)),
            *((t.shape, t.dtype, t.requires_grad) for t in (*module._parameters.values(), *module._buffers.values())
              if t is not None),
        )
        for module in network.modules()
    )  # fmt: skip


def cast_parameters(network: nn.Module) -> dict[str, Tensor]:
    """The parameters that autocast casts before anything reads them, by name.

    Layer classes list theirs; those of convolutions are read by them alone.
    """
    found = {}
    for name, module in network.named_modules():
        leaves = ("weight", "bias") if isinstance(module, nn.Conv2d) else getattr(type(module), "cast_parameters", ())
        found.update({f"{name}.{leaf}": p for leaf in leaves if (p := module._parameters.get(leaf)) is not None})
    return found


def cast_together(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Copies in `dtype`, by few kernels instead of one for each tensor."""
    if not tensors:
        return {}
    copies = _Cast.apply(dtype, *tensors.values())  # type: ignore[no-untyped-call]
    return dict(zip(tensors, copies, strict=True))


@contextmanager
def side_stream(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """Run the block on a stream of its own, ordered after the current one's work and before its later work.

    Also where it fails: the current stream's memory that it reads is free for others from then on.
    """
    current, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            yield stream
    finally:
        current.wait_stream(stream)


@contextmanager
def preserved_state(network: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore the device's random state and the network's buffers afterwards; no batch is checked meanwhile."""
    before = [(buffer, buffer.clone()) for buffer in network.buffers()]
    checks = [(vars(m), vars(m)["unchecked_batches"]) for m in network.modules() if "unchecked_batches" in vars(m)]
    try:
        for fields, _ in checks:
            fields["unchecked_batches"] = 0
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        for fields, count in checks:
            fields["unchecked_batches"] = count
        for buffer, value in before:
            if not torch.equal(buffer, value):  # a forward that waits for its backward may need the others untouched
                buffer.copy_(value)


@contextmanager
def own_workspaces() -> Iterator[None]:
    """Allocate cuBLAS workspaces from the graph's memory and free them: otherwise every stream keeps some."""
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.dtypes = [t.dtype for t in tensors]
        ctx.set_materialize_grads(False)
        copies = [torch.empty_like(t, dtype=dtype) for t in tensors]
        torch._foreach_copy_(copies, list(tensors))
        learned = ctx.needs_input_grad[1:]
        ctx.mark_non_differentiable(*(copy for copy, wanted in zip(copies, learned, strict=True) if not wanted))
        return tuple(copies)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        wanted = [None if g is None else torch.empty_like(g, dtype=d) for g, d in zip(given, ctx.dtypes, strict=True)]
        pairs = [(w, g) for w, g in zip(wanted, given, strict=True) if w is not None and g is not None]
        if pairs:
            torch._foreach_copy_([w for w, _ in pairs], [g for _, g in pairs])
        return None, *wanted


class _GivenGradient(torch.autograd.Function):
    """A number whose gradient is `dlogits`: given one for the logits, `torch.autograd.grad` imports sympy in 1.6 s."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, dlogits: Tensor) -> Tensor:
        ctx.save_for_backward(dlogits)
        return logits.new_zeros(())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None


class _ReplayedForward(torch.autograd.Function):
    """Logits of a replayed forward, whose backward replays the captured gradients."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, graphs: PassGraphs, pending: PendingBackward, *parameters: Tensor) -> Tensor:
        ctx.graphs, ctx.pending = graphs, pending
        return logits.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dlogits: Tensor) -> tuple[Tensor | None, ...]:
        del ctx.pending  # what the pass has saved may be overwritten from here on
        return (None, None, None, *ctx.graphs.replay_backward(dlogits))
