"""The scans as operators of torch.library: schemas, fake kernels and autograd around the functions of a backend.

The last argument of the scans, `triton`, chooses the backend. Operators take and return flat rows of tensors, which
are named again on arrival. The `run_*` functions are the operators without torch.library, for calls in which nothing is
differentiated or compiled: its overhead is most of a small batch's time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from trust_tta.errors import BackendError
from trust_tta.ops import reference
from trust_tta.ops.tensors import Gathered, Parameters, Saved, ScanGradients, ScanInputs

_FIVE = "Tensor x_proj_weight, Tensor dt_projs_weight, Tensor dt_projs_bias, Tensor A_logs, Tensor Ds"
_INPUTS = "Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? delta_bias, bool delta_softplus"
_SAVED = "Tensor projected, Tensor states, Tensor u"
_GATHERED = "Tensor x_proj, Tensor dt_proj, Tensor A, Tensor D, Tensor dt_bias"


class Backend(Protocol):
    """Interface of the packages `ops.cpu` and `ops.triton`."""

    def scan_forward(self, inputs: ScanInputs) -> tuple[Tensor, Tensor]:
        """Return y (b, g, c, l) and the states that the backward starts from, float32 of `states_shape`."""

    def scan_backward(self, dy: Tensor, inputs: ScanInputs, states: Tensor) -> ScanGradients:
        """Return each gradient in the dtype of its input."""

    def states_shape(self, delta: Sequence[int], state: int) -> tuple[int, ...]:
        """Return the shape of the saved states for a `delta` of the given shape (b, g, m, c, l)."""

    def scan_map_forward(self, x: Tensor, directions: Tensor, parameters: Parameters) -> tuple[Tensor, Saved]:
        """Return y as `reference.scan_map` does, or merged into (b, h, w, c), and the tensors for the backward."""

    def scan_map_backward(
        self, dy: Tensor, x: Tensor, directions: Tensor, saved: Saved, *, train_projections: bool, train_scan: bool
    ) -> tuple[Tensor, Parameters]:
        """Return the gradients of x and, in A's dtype, of the parameters.

        The first two parameters' gradients are empty unless `train_projections`, the others unless `train_scan`.
        """


def get_backend(triton: bool) -> Backend:
    """Import the backend where it is first used: numba and Triton are slow to load."""
    if triton:
        from trust_tta.ops import triton as triton_backend

        return triton_backend
    from trust_tta.ops import cpu

    return cpu


def _define(
    name: str,
    run: Callable[..., object],
    schema: str,
    fake: Callable[..., object],
    *,
    save: Callable[..., None] | None = None,
    differentiate: Callable[..., object] | None = None,
) -> Any:
    """The operator `trust_tta::name` with one differentiable output, the first; or none, as that of a backward.

    `torch.library.custom_op` would import the compiler at the first call.
    """
    torch.library.define(f"trust_tta::{name}", schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(f"trust_tta::{name}", "default", run)
    operator = getattr(torch.ops.trust_tta, name).default
    torch.library.register_fake(operator, fake)

    def refuse(ctx: Any, *gradients: Tensor) -> None:
        raise BackendError(f"trust_tta::{name} has no derivative; use backend='reference' for second derivatives")

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        if save is not None:
            save(ctx, inputs, output)
            ctx.mark_non_differentiable(*output[1:])
            ctx.set_materialize_grads(False)  # PyTorch would fill a zero gradient for each saved output

    torch.library.register_autograd(operator, differentiate or refuse, setup_context=setup_context)
    return operator


# The grouped scan.


def run_scan(*arguments: Any) -> tuple[Tensor, Tensor]:
    """y (b, g, c, l) and the saved states."""
    *inputs, triton = arguments
    return get_backend(triton).scan_forward(ScanInputs(*inputs))


def run_scan_backward(dy: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """The gradients of the seven tensors; see `ScanGradients`."""
    *inputs, states, triton = arguments
    return tuple(get_backend(triton).scan_backward(dy, ScanInputs(*inputs), states))


def _fake_scan(*arguments: Any) -> tuple[Tensor, Tensor]:
    u, delta, A, *_, triton = arguments
    states = get_backend(triton).states_shape(delta.shape, A.shape[-1])
    return u.new_empty(u.shape), u.new_empty(states, dtype=torch.float32)


def _fake_scan_backward(dy: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    A = arguments[2]
    return tuple(A.new_empty(0) if t is None else t.new_empty(t.shape) for t in arguments[:7])


def _save_scan(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.delta_softplus, ctx.triton = inputs
    ctx.save_for_backward(*tensors, output[1])


def _differentiate_scan(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, states = ctx.saved_tensors
    gradients = scan_backward(dy, *tensors, ctx.delta_softplus, states, ctx.triton)
    return (*(None if t is None else g for g, t in zip(gradients, tensors, strict=True)), None, None)


# SS2D's scan of a map.


def run_scan_map(x: Tensor, directions: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """y (b, 2, c, h*w), on a CPU merged into (b, h, w, c), and the eight tensors of `Saved`."""
    *parameters, triton = arguments
    y, saved = get_backend(triton).scan_map_forward(x, directions, Parameters(*parameters))
    return y, *saved.flatten()


def run_scan_map_backward(dy: Tensor, x: Tensor, directions: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """The gradients of x and of the five parameters."""
    *saved, train_projections, train_scan, triton = arguments
    dx, gradients = get_backend(triton).scan_map_backward(
        dy, x, directions, Saved.unflatten(tuple(saved)), train_projections=train_projections, train_scan=train_scan
    )
    return dx, *gradients


def _fake_scan_map(x: Tensor, directions: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    *parameters, triton = arguments
    (b, c, h, w), rows = x.shape, parameters[0].shape[1]
    gathered = reference.gather(Parameters(*parameters), directions, x.dtype)
    batch, groups = (b, 2) if directions.dim() == 1 else (1, 2 * b)
    backend = get_backend(triton)
    states = backend.states_shape((batch, groups, 2, c, h * w), gathered.A.shape[-1])
    on_cpu = [(b, h, w, c), (b, h * w, 4, rows), (b, h * w, c)]
    shapes = [(b, 2, c, h * w), (b, 2, 2, rows, h * w), (0,)] if triton else on_cpu
    y, projected, u = (x.new_empty(shape) for shape in shapes)
    return y, *Saved(projected, x.new_empty(states, dtype=torch.float32), u, gathered).flatten()


def _fake_scan_map_backward(dy: Tensor, x: Tensor, directions: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    *saved, train_projections, train_scan, _ = arguments
    gathered = Gathered(*saved[3:])
    dx = x.new_empty((x.shape[0], *x.shape[2:], x.shape[1])).permute(0, 3, 1, 2)
    wanted = (train_projections,) * 2 + (train_scan,) * 3
    shapes = zip(gathered.parameter_shapes(), wanted, strict=True)
    return dx, *(gathered.A.new_empty(shape if w else 0) for shape, w in shapes)


def _save_scan_map(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.triton = inputs[-1]
    ctx.save_for_backward(*inputs[:2], *output[1:])


def _differentiate_scan_map(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    wanted = ctx.needs_input_grad[2:7]
    dx, *gradients = scan_map_backward(dy, *ctx.saved_tensors, any(wanted[:2]), any(wanted[2:]), ctx.triton)
    return (dx, None, *(g if w else None for g, w in zip(gradients, wanted, strict=True)), None)


# The merge of SS2D's sequences and the norm that follows it, on a GPU; on a CPU they are merged already.


def run_merge_norm(*arguments: Any, keep: bool = True) -> tuple[Tensor, ...]:
    """The normalized map (b, h, w, c), and to `keep` the merged map, its mean and 1 / deviation (b, h, w, 1)."""
    from trust_tta.ops.triton import merge_norm as triton_merge_norm

    return triton_merge_norm(*arguments, keep=keep)


def run_merge_norm_backward(
    dnorm: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor, bias: Tensor, train: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of y (b, 2, c, h*w), weight and bias (c,); the last two are empty unless `train`."""
    from trust_tta.ops.triton import merge_norm_backward as triton_merge_norm_backward

    dy, dweight, dbias = triton_merge_norm_backward(dnorm, x, mean, scale, weight, train=train)
    return dy, dweight.to(weight.dtype), dbias.to(bias.dtype)


def _fake_merge_norm(y: Tensor, height: int, width: int, *arguments: Any) -> tuple[Tensor, ...]:
    b, _, c, _ = y.shape
    norm, x = (y.new_empty((b, height, width, c)) for _ in range(2))
    mean, scale = (y.new_empty((b, height, width, 1), dtype=torch.float32) for _ in range(2))
    return norm, x, mean, scale


def _fake_merge_norm_backward(dnorm: Tensor, x: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    _, _, weight, bias, train = arguments
    b, h, w, c = x.shape
    return x.new_empty((b, 2, c, h * w)), *(t.new_empty(t.shape if train else 0) for t in (weight, bias))


def _save_merge_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, _, weight, bias, _ = inputs
    ctx.save_for_backward(*output[1:], weight, bias)


def _differentiate_merge_norm(ctx: Any, dnorm: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    train = any(ctx.needs_input_grad[3:5])
    dy, dweight, dbias = merge_norm_backward(dnorm, *ctx.saved_tensors, train)
    return (dy, None, None, dweight if train else None, dbias if train else None, None)


def _tensors(count: int) -> str:
    return f"({', '.join(['Tensor'] * count)})"


scan = _define(
    "scan", run_scan, f"({_INPUTS}, bool triton) -> {_tensors(2)}", _fake_scan,
    save=_save_scan, differentiate=_differentiate_scan,
)  # fmt: skip
scan_backward = _define(
    "scan_backward",
    run_scan_backward,
    f"(Tensor dy, {_INPUTS}, Tensor states, bool triton) -> {_tensors(7)}",
    _fake_scan_backward,
)
scan_map = _define(
    "scan_map", run_scan_map, f"(Tensor x, Tensor directions, {_FIVE}, bool triton) -> {_tensors(9)}", _fake_scan_map,
    save=_save_scan_map, differentiate=_differentiate_scan_map,
)  # fmt: skip
scan_map_backward = _define(
    "scan_map_backward",
    run_scan_map_backward,
    f"(Tensor dy, Tensor x, Tensor directions, {_SAVED}, {_GATHERED}, "
    f"bool train_projections, bool train_scan, bool triton) -> {_tensors(6)}",
    _fake_scan_map_backward,
)
merge_norm = _define(
    "merge_norm", run_merge_norm,
    f"(Tensor y, SymInt height, SymInt width, Tensor weight, Tensor bias, float eps) -> {_tensors(4)}",
    _fake_merge_norm, save=_save_merge_norm, differentiate=_differentiate_merge_norm,
)  # fmt: skip
merge_norm_backward = _define(
    "merge_norm_backward",
    run_merge_norm_backward,
    torch.library.infer_schema(run_merge_norm_backward, mutates_args=()),
    _fake_merge_norm_backward,
)
