"""Public scans: check the tensors, choose the backend by device, call it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from trust_tta import optional
from trust_tta.errors import BackendError, ConfigError, ShapeError
from trust_tta.ops import operators, portable, reference
from trust_tta.ops.tensors import Parameters

BACKENDS = ("auto", "reference", "cpu", "triton", "portable")
PLAIN = {"reference": reference, "portable": portable}  # in PyTorch's operators, differentiated by autograd
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
HAS_TRITON = optional.available("triton")  # looked up once: torch.compile cannot trace an import


def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    *,
    delta_softplus: bool = True,
    backend: str = "auto",
) -> Tensor:
    """h_t = exp(delta_t A) h_{t-1} + delta_t B_t u_t,  y_t = C_t h_t + D u_t, for k groups of channels.

    u and delta (b, k*c, l), A (k*c, n), B and C (b, k, n, l), D and delta_bias (k*c,); returns y (b, k*c, l).
    """
    _check_shapes(u, delta, A, B, C, D, delta_bias)
    groups = B.shape[1]
    y = grouped_scan(
        u.unflatten(1, (groups, -1)),
        delta.unflatten(1, (groups, 1, -1)),
        A.unflatten(0, (groups, 1, -1)),
        B.unsqueeze(2),
        C.unsqueeze(2),
        None if D is None else D.unflatten(0, (groups, 1, -1)),
        None if delta_bias is None else delta_bias.unflatten(0, (groups, 1, -1)),
        delta_softplus=delta_softplus,
        backend=backend,
    )
    return y.flatten(1, 2)


def grouped_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    delta_bias: Tensor | None,
    *,
    delta_softplus: bool = True,
    backend: str = "auto",
) -> Tensor:
    """Scan u (b, g, c, l) in one or two directions and sum them; shapes as in `ScanInputs`."""
    chosen = choose_backend(u, backend)
    inputs = (u, delta, A, B, C, D, delta_bias, delta_softplus)
    if chosen in PLAIN:
        return PLAIN[chosen].scan_grouped(*inputs)
    call = operators.run_scan if _is_bare(u) else operators.scan
    return call(*inputs, chosen == "triton")[0]


def scan_map(x: Tensor, directions: Tensor, parameters: Parameters, *, backend: str = "auto") -> Tensor:
    """SS2D's scan of the feature map x (b, c, h, w): SiLU(x) along rows and columns, both ways; y for `merge_norm`.

    y is (b, 2, c, h*w), or by the backend "cpu", which merges the sequences as it goes, (b, h, w, c).

    `directions` (4,) or (b, 4) names the parameter group that reads the rows forward, the rows backward, the columns
    forward and the columns backward: an order permutes parameters, never pixels.
    """
    chosen = choose_backend(x, backend)
    if chosen in PLAIN:
        return PLAIN[chosen].scan_map(x, directions, parameters)
    call = operators.run_scan_map if _is_bare(x) else operators.scan_map
    return call(x, directions, *parameters, chosen == "triton")[0]


def merge_norm(
    y: Tensor, height: int, width: int, weight: Tensor, bias: Tensor, eps: float, *, backend: str = "auto"
) -> Tensor:
    """Merge the y of `scan_map` into a map and normalize it over the channels: (b, c, height, width)."""
    chosen = choose_backend(y, backend)
    if chosen == "cpu":
        return F.layer_norm(y, y.shape[-1:], weight, bias, eps).permute(0, 3, 1, 2)
    if chosen in PLAIN:
        return PLAIN[chosen].merge_norm(y, height, width, weight, bias, eps)
    given = (y, height, width, weight, bias, eps)
    merged = operators.run_merge_norm(*given, keep=False) if _is_bare(y) else operators.merge_norm(*given)
    return merged[0].permute(0, 3, 1, 2)


def _is_bare(x: Tensor) -> bool:
    """Whether the call needs no autograd, no compiler and no fake tensors."""
    return type(x) is Tensor and not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def choose_backend(u: Tensor, backend: str = "auto") -> str:
    """Resolve "auto" by the device and dtype of `u`; refuse a backend that does not support them."""
    if backend not in BACKENDS:
        raise ConfigError(f"unknown scan backend {backend!r}; choose one of {', '.join(BACKENDS)}")
    if backend == "auto":
        if u.device.type == "cpu":
            return "cpu"
        usable = u.device.type == "cuda" and u.dtype != torch.float64 and HAS_TRITON
        return "triton" if usable else "reference"
    if backend == "cpu" and u.device.type != "cpu":
        raise BackendError(f"backend 'cpu' needs CPU tensors but u is on {u.device}; use backend='auto'")
    if backend == "triton" and not HAS_TRITON:
        raise BackendError("backend 'triton' needs the package triton; install 'trust-tta[triton]' or use 'auto'")
    if backend == "triton" and u.dtype == torch.float64:
        raise BackendError("backend 'triton' computes in float32 but u is float64; use backend='reference'")
    if backend == "triton" and u.device.type != "cuda" and not is_interpreted():
        raise BackendError(
            f"backend 'triton' needs CUDA tensors but u is on {u.device}; use backend='auto', "
            "or set TRITON_INTERPRET=1 to run its interpreter on a CPU"
        )
    return backend


def uses_triton(x: Tensor, backend: str = "auto") -> bool:
    """Whether Triton kernels with a backward of their own may take x: nothing compiles, transforms or wraps it."""
    if torch.compiler.is_compiling() or type(x) is not Tensor or x.dtype == torch.float64:
        return False
    return torch._C._functorch.peek_interpreter_stack() is None and choose_backend(x, backend) == "triton"


def is_interpreted() -> bool:
    """Triton kernels run in its interpreter, on a CPU."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


# As `torch.compiler.assume_constant_result` does, which imports the compiler: more than a second of every process.
is_interpreted._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _check_shapes(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, delta_bias: Tensor | None
) -> None:
    """Name the first tensor whose rank, shape, dtype or device does not fit the others."""
    named: dict[str, Tensor | None] = {"u": u, "delta": delta, "A": A, "B": B, "C": C, "D": D, "delta_bias": delta_bias}
    for name, tensor in named.items():
        if tensor is None:
            continue
        if tensor.dtype not in FLOATS:
            raise ShapeError(f"{name} is {tensor.dtype}; the scan takes float32, float64, bfloat16 or float16")
        if tensor.device != u.device:
            raise ShapeError(f"{name} is on {tensor.device} but u is on {u.device}; move them to one device")
    _expect("u", u, u.dim() == 3 and u.numel() > 0, "(batch, channels, length), none of them zero")
    batch, channels, length = u.shape
    _expect("delta", delta, delta.shape == u.shape, f"{tuple(u.shape)} as u")
    _expect("A", A, A.dim() == 2 and A.shape[0] == channels and A.shape[1] > 0, f"({channels}, state)")
    state = A.shape[1]
    for name, tensor in (("B", B), ("C", C)):
        fits = tensor.dim() == 4 and tensor.shape[0] == batch and tensor.shape[2:] == (state, length)
        _expect(name, tensor, fits, f"({batch}, groups, {state}, {length})")
    groups = B.shape[1]
    _expect("B", B, groups > 0 and channels % groups == 0, f"a number of groups that divides {channels} channels")
    _expect("C", C, C.shape == B.shape, f"{tuple(B.shape)} as B")
    for name, vector in (("D", D), ("delta_bias", delta_bias)):
        if vector is not None:
            _expect(name, vector, vector.shape == (channels,), f"({channels},)")


def _expect(name: str, tensor: Tensor, fits: bool, wanted: str) -> None:
    if not fits:
        raise ShapeError(f"{name} has shape {tuple(tensor.shape)}; the scan needs {wanted}")
