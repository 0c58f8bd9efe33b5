"""The network's passes, recorded as CUDA graphs.

A pass is hundreds of small kernels, and at small batches the device waits while the host launches each of them; a
recorded pass is one launch. The traversal order is data, so one recording serves all orders.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from trust_tta.errors import reason_of

MOST_RECORDINGS = 8  # each holds the memory of a pass
MOST_SEEN = 64  # kinds of batches that are remembered to have come once

# Work that other threads start while a pass is recorded does not break it, unless it waits for the device.
SETTINGS: dict[str, Any] = {"capture_error_mode": "thread_local"}

# What a network makes of images before it looks at the order: a map and, if they serve, its moments.
Begun = tuple[Tensor, tuple[Tensor, Tensor] | None]

one_at_a_time = threading.Lock()  # CUDA forbids waiting for a device while a pass on it is being recorded


class Recorder:
    """Calls a network; from the second batch of a kind on, on a CUDA device, by replaying a recorded pass.

    Only networks whose order is a tensor are recorded: others may not do the same in each pass. Gradients of a recorded
    pass stay valid until the next pass. Later changes to the values of parameters and buffers take effect; new modules,
    hooks or settings do not. A replayed pass draws the random numbers and updates the running statistics that a plain
    one would.

    With `lasting`, images that are the same tensor as in the last pass are taken for unchanged, and so are the weights
    that are not among the `parameters`: what passes over a batch have in common is then done once.
    """

    def __init__(self, network: nn.Module, parameters: Sequence[Tensor], *, lasting: bool = False) -> None:
        self.network, self.parameters, self.lasting = network, list(parameters), lasting
        self.beginnings: dict[Hashable, Beginning] = {}
        self.present: Beginning | None = None  # that of the last replay
        self.recordings: dict[Hashable, Recording] = {}
        self.seen: set[Hashable] = set()
        self.failed = False  # a recording that broke off may leave the device unusable for another: no second try
        self.tensors: list[Tensor] = []  # the network's, looked up once: walking through its modules is slow
        self.addresses: list[int] = []
        self.pool: Any = None  # the memory that the recordings share
        self.stream: torch.cuda.Stream | None = None  # of the last replay
        self.unfinished: weakref.ref[Token] | None = None  # a pass whose activations must not be overwritten

    def __call__(self, images: Tensor, directions: Tensor | None = None) -> Tensor:
        """Logits of images (n, ...) in the order of `directions` (4,) or (n, 4)."""
        recording = None if directions is None else self._recording(images, directions)
        if directions is None or recording is None or (self.unfinished is not None and self.unfinished() is not None):
            return self.plain(images, directions)
        self._wait_for_last(torch.cuda.current_stream(images.device))
        # What another kind of batch has begun with may lie where this one's passes work.
        recording.beginning.take(images, lasting=self.lasting and self.present is recording.beginning)
        self.present = recording.beginning
        logits = recording.replay(directions)
        if recording.backward is not None:
            token = Token()
            self.unfinished = weakref.ref(token)
            logits = _Differentiable.apply(logits, recording, token, *self.parameters)  # type: ignore[no-untyped-call]
        return logits

    def plain(self, images: Tensor, directions: Tensor | None = None) -> Tensor:
        """The same without a recording."""
        logits: Tensor = self.network(images) if directions is None else self.network(images, directions=directions)
        return logits

    def __reduce__(self) -> tuple[Callable[..., Recorder], tuple[nn.Module, list[Tensor]]]:
        """Recordings hold addresses: a copy or a pickle starts without any."""
        return partial(Recorder, lasting=self.lasting), (self.network, self.parameters)

    def _recording(self, images: Tensor, directions: Tensor) -> Recording | None:
        if not images.is_cuda or self.failed or torch.cuda.is_current_stream_capturing():
            return None
        self._forget_if_moved()
        low = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        learning = torch.is_grad_enabled() and len(self.parameters) > 0
        key = (images.shape, images.dtype, directions.shape, learning, low)
        if key in self.recordings:
            return self.recordings[key]
        if key not in self.seen:  # the first of a kind compiles kernels, which cannot be recorded
            if len(self.seen) < MOST_SEEN:
                self.seen.add(key)
        elif len(self.recordings) < MOST_RECORDINGS:
            try:
                self.recordings[key] = self._record(images, directions, learning, low)
            except Exception as error:  # whatever it was, a plain pass will raise it again or not need it
                self.failed, self.recordings, self.beginnings = True, {}, {}
                problem = reason_of(error)
                warnings.warn(f"passes are not recorded as CUDA graphs and stay slow ({problem})", stacklevel=2)
        return self.recordings.get(key)

    def _wait_for_last(self, stream: torch.cuda.Stream) -> None:
        """The replays share memory: one on another stream begins when the last one has ended."""
        if self.stream is not None and self.stream != stream:
            stream.wait_stream(self.stream)
        self.stream = stream

    def _record(self, images: Tensor, directions: Tensor, learning: bool, low: torch.dtype | None) -> Recording:
        if not self.recordings:  # a handle is dead once the recordings that used it are gone
            self.pool = torch.cuda.graph_pool_handle()
        # Weights cast before an update must not serve after it.
        cast: AbstractContextManager[Any] = nullcontext()
        if low is not None:
            cast = torch.autocast("cuda", low, cache_enabled=False)
        # A recording that breaks off can leave its stream in place.
        back = torch.cuda.stream(torch.cuda.current_stream(images.device))
        untouched = kept_state(self.network, images.device)
        # Tensors made in inference mode could not be written to outside it; leaving it turns gradients on.
        ordinary = torch.inference_mode(False)
        with one_at_a_time, back, cast, ordinary, untouched:
            kind = (images.shape, images.dtype, low)
            if kind not in self.beginnings:
                beginning = Beginning(self.network, images)
                if self.lasting:
                    beginning.record({} if low is None else self._frozen(), self.pool, low)
                self.beginnings[kind] = beginning
            with torch.set_grad_enabled(learning):
                return Recording(self.beginnings[kind], directions, self.parameters if learning else (), self.pool, low)

    def _frozen(self) -> dict[str, Tensor]:
        """The parameters that autocast casts and nothing adapts, by name."""
        learned = {id(parameter) for parameter in self.parameters}
        return {name: p.detach() for name, p in cast_parameters(self.network).items() if id(p) not in learned}

    def _forget_if_moved(self) -> None:
        self.tensors = self.tensors or list(self.network.parameters())
        addresses = list(map(Tensor.data_ptr, self.tensors))
        if addresses != self.addresses:
            self.recordings, self.beginnings, self.seen, self.addresses = {}, {}, set(), addresses


class Token:
    """Lives as long as a pass waits to be differentiated."""


class Beginning:
    """What the passes over a batch have in common, over tensors at fixed addresses.

    `images`: a copy of the batch. `weights`: those that are cast and not adapted, by name. `network`: what is yet to be
    done with `given`, the images or what a network that can `begin` with them made of them.
    """

    def __init__(self, network: nn.Module, images: Tensor) -> None:
        self.network, self.images = network, images.detach().clone()
        self.given: Tensor | Begun = self.images
        self.weights: dict[str, Tensor] = {}
        self.graph: torch.cuda.CUDAGraph | None = None
        self.last: weakref.ref[Tensor] | None = None
        self.version = 0

    @torch.no_grad()
    def record(self, frozen: Mapping[str, Tensor], pool: Any, low: torch.dtype | None) -> None:
        """Cast the weights, and begin with the images, in a graph of their own, unless there is nothing to do."""
        begin: Callable[[Tensor], Begun | None] = getattr(self.network, "begin", lambda images: None)

        def work() -> tuple[dict[str, Tensor], Begun | None]:
            weights = {} if low is None else cast_together(frozen, low)
            # As convolutions read them: the library would move them in every pass.
            moved = {
                name: w.contiguous(memory_format=torch.channels_last) for name, w in weights.items() if w.dim() == 4
            }
            return {**weights, **moved}, begin(self.images)

        with side_stream(self.images.device) as stream:
            if work() == ({}, None):
                return
        self.graph = torch.cuda.CUDAGraph()
        with own_workspaces(), torch.cuda.graph(self.graph, pool=pool, stream=stream, **SETTINGS):
            self.weights, begun = work()
        if begun is not None:
            self.network, self.given = Continuation(self.network), begun
            self.weights = {f"network.{name}": weight for name, weight in self.weights.items()}

    def take(self, images: Tensor, *, lasting: bool) -> None:
        """Begin with images (n, ...); nothing is done if they are those of the last call and that is `lasting`."""
        if lasting and self.last is not None and self.last() is images and self.version == images._version:
            return
        with torch.no_grad():
            self.images.copy_(images)
        if self.graph is not None:
            self.graph.replay()
            self.last, self.version = weakref.ref(images), images._version


class Continuation(nn.Module):
    """A network that goes on from what it has begun with."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, begun: Begun, *, directions: Tensor) -> Tensor:
        logits: Tensor = self.network.forward_begun(begun, directions)
        return logits


class Recording:
    """One forward pass, and one backward pass where there are parameters, over tensors at fixed addresses."""

    def __init__(
        self, beginning: Beginning, directions: Tensor, parameters: Sequence[Tensor], pool: Any, low: torch.dtype | None
    ) -> None:
        self.beginning, self.directions, network = beginning, directions.clone(), beginning.network
        # Leaves of our own over the same memory: those of an earlier pass belong to another stream.
        leaves = [p.detach().requires_grad_() for p in parameters]
        names = {id(p): name for name, p in network.named_parameters()}
        weights = {names[id(p)]: leaf for p, leaf in zip(parameters, leaves, strict=True)}
        rest = {} if low is None else {n: p for n, p in cast_parameters(network).items() if n not in beginning.weights}
        cast = {name: weights.get(name, p.detach()) for name, p in rest.items()}

        def call() -> Tensor:
            given = weights if low is None else {**weights, **beginning.weights, **cast_together(cast, low)}
            logits: Tensor = functional_call(network, given, (beginning.given,), {"directions": self.directions})
            return logits

        with side_stream(directions.device) as stream:  # libraries set up their workspace for a stream on first use
            logits = call()
            self.dlogits = torch.zeros_like(logits)
            if leaves:
                self._differentiate(logits, leaves)
        self.forward = torch.cuda.CUDAGraph()
        with own_workspaces(), torch.cuda.graph(self.forward, pool=pool, stream=stream, **SETTINGS):
            logits = call()
        self.backward: torch.cuda.CUDAGraph | None = None
        self.gradients: list[Tensor | None] = []
        if leaves:
            self.backward = torch.cuda.CUDAGraph()
            with own_workspaces(), torch.cuda.graph(self.backward, pool=pool, stream=stream, **SETTINGS):
                self.gradients = self._differentiate(logits, leaves)
        self.logits: Tensor = logits.detach()

    def _differentiate(self, logits: Tensor, leaves: list[Tensor]) -> list[Tensor | None]:
        return list(torch.autograd.grad(logits, leaves, self.dlogits, allow_unused=True))

    @torch.no_grad()
    def replay(self, directions: Tensor) -> Tensor:
        """Logits of the images that the beginning has taken."""
        self.directions.copy_(directions)
        self.forward.replay()
        return self.logits.clone()

    def replay_backward(self, dlogits: Tensor) -> list[Tensor | None]:
        """The gradients, valid until the next pass."""
        self.dlogits.copy_(dlogits)
        self.backward.replay()  # type: ignore[union-attr]
        return self.gradients


def cast_parameters(network: nn.Module) -> dict[str, Tensor]:
    """The parameters that autocast casts before anything reads them, by name.

    Classes of layers tell theirs; those of PyTorch's convolutions are read by them alone.
    """
    return {
        f"{name}.{leaf}": parameter
        for name, module in network.named_modules()
        for leaf in getattr(type(module), "cast_parameters", ("weight", "bias") if type(module) is nn.Conv2d else ())
        if (parameter := module._parameters.get(leaf)) is not None
    }


def cast_together(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Copies in `dtype`, made by few kernels: a hundred small ones would take longer than what they move."""
    if not tensors:
        return {}
    copies = _Cast.apply(dtype, *tensors.values())  # type: ignore[no-untyped-call]
    return dict(zip(tensors, copies, strict=True))


@contextmanager
def side_stream(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """Work inside goes to a stream of its own, after what the current one has to do and before what it will be given.

    Also where it breaks off: what it reads of the current stream's memory is free for others from then on.
    """
    current, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            yield stream
    finally:
        current.wait_stream(stream)


@contextmanager
def kept_state(network: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore the device's random state and the network's running statistics afterwards: passes inside do not count."""
    before = [(buffer, buffer.clone()) for buffer in network.buffers()]
    try:
        with torch.random.fork_rng(devices=[device]):
            yield
    finally:
        for buffer, value in before:
            if not torch.equal(buffer, value):  # a pass that waits for its backward may need the others untouched
                buffer.copy_(value)


@contextmanager
def own_workspaces() -> Iterator[None]:
    """Let cuBLAS take its workspaces from the recording's memory and free them: otherwise every stream keeps some."""
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


class _Differentiable(torch.autograd.Function):
    """Logits of a replayed pass, with its recorded gradients; the device works while autograd notes the parameters."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, recording: Recording, token: Token, *parameters: Tensor) -> Tensor:
        ctx.recording, ctx.token = recording, token
        return logits.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dlogits: Tensor) -> tuple[Tensor | None, ...]:
        del ctx.token  # what the pass has saved may be overwritten from here on
        return (None, None, None, *ctx.recording.replay_backward(dlogits))
