"""The Triton scan against a float64 loop over the positions: on a CUDA device, or in Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

# Triton decides when it is imported whether it interprets.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from trust_tta.ops.tensors import ScanInputs  # noqa: E402
from trust_tta.ops.triton import (  # noqa: E402
    scan_backward,
    scan_forward,
    states_shape,
)
from trust_tta.ops.triton.tiling import Tile, Tiling, make_tiling  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("y", "u", "delta", "A", "B", "C", "D", "delta_bias")
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def draw(
    batch: int, groups: int, directions: int, channels: int, length: int, state: int, dtype: torch.dtype = torch.float32
) -> Inputs:
    """u, delta, A, B, C, D, delta_bias; steps of 0.02 to 3, as a trained network has them."""
    generator = torch.Generator().manual_seed(batch + 7 * channels + 31 * length + 101 * state)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    rows = (batch, groups, directions, state, length)
    wide = (normal(batch, groups, channels, length), normal(batch, groups, directions, channels, length))
    u, delta, B, C = (t.to(DEVICE, dtype) for t in (*wide, normal(*rows), normal(*rows)))
    A = -torch.exp(normal(groups, directions, channels, state)).to(DEVICE)
    D, bias = (normal(groups, directions, channels).to(DEVICE) for _ in range(2))
    return u, delta, A, B, C, D, bias - 1


def loop(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, bias: Tensor | None, softplus: bool
) -> Tensor:
    """The definition, one position after the other."""
    y = torch.zeros_like(u)
    for m in range(delta.shape[2]):
        d = delta[:, :, m] if bias is None else delta[:, :, m] + bias[:, m, :, None]
        d = torch.log1p(torch.exp(d)) if softplus else d
        h = torch.zeros_like(u[..., 0, None] * A[:, m])
        outputs = {}
        for t in range(u.shape[-1]) if m == 0 else reversed(range(u.shape[-1])):
            h = torch.exp(d[..., t, None] * A[:, m]) * h + (d * u)[..., t, None] * B[:, :, m, None, :, t]
            outputs[t] = (h * C[:, :, m, None, :, t]).sum(-1)
        y = y + torch.stack([outputs[t] for t in sorted(outputs)], -1)
        if D is not None:
            y = y + D[:, m, :, None] * u
    return y


def expected(inputs: Inputs, dy: Tensor, softplus: bool) -> list[Tensor | None]:
    """y and the gradient of every input that is there, in float64."""
    u, delta, A, B, C = (t.double().requires_grad_() for t in inputs[:5])
    D, bias = (None if t is None else t.double().requires_grad_() for t in inputs[5:])
    y = loop(u, delta, A, B, C, D, bias, softplus)
    present = [t for t in (u, delta, A, B, C, D, bias) if t is not None]
    gradients = iter(torch.autograd.grad(y, present, dy.double()))
    return [y.detach(), *(None if t is None else next(gradients) for t in inputs)]


def found(inputs: Inputs, dy: Tensor, softplus: bool, tiling: Tiling | None = None) -> list[Tensor | None]:
    """y and every gradient from the kernels."""
    given = ScanInputs(*inputs, softplus)
    y, states = scan_forward(given, tiling=tiling)
    gradients = scan_backward(dy, given, states, tiling=tiling)
    return [y, *(None if t is None else g for g, t in zip(gradients, inputs, strict=True))]


def check(inputs: Inputs, *, softplus: bool = True, tiling: Tiling | None = None, slack: float = 1.0) -> None:
    """Compare y and every gradient by norm, and their shapes and dtypes with the inputs'."""
    u = inputs[0]
    dy = torch.randn(u.shape, generator=torch.Generator().manual_seed(5)).to(u)
    pairs = zip(NAMES, found(inputs, dy, softplus, tiling), expected(inputs, dy, softplus), [u, *inputs], strict=True)
    for name, ours, theirs, source in pairs:
        if ours is None or theirs is None or source is None:
            assert ours is theirs is source, name
            continue
        assert (ours.shape, ours.dtype) == (source.shape, source.dtype), name
        assert ours.is_contiguous(), name
        # A single position has no past, so that its dA is zero.
        error = (ours.double() - theirs).norm().item() / (theirs.norm().item() or 1.0)
        assert error < slack * TOLERANCES[ours.dtype], f"{name}: relative error {error:.1e}"


@pytest.fixture
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory holds NaN, so that what a kernel does not write is seen."""

    def poison(create: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: create(*args, **kwargs).fill_(float("nan"))

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poison(getattr(torch, name)))
    monkeypatch.setattr(Tensor, "new_empty", poison(Tensor.new_empty))


@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize(
    ("batch", "groups", "directions", "channels", "length", "state"),
    [
        pytest.param(1, 2, 2, 5, 1, 1, id="one position"),
        pytest.param(3, 2, 2, 5, 7, 1, id="short"),
        pytest.param(1, 2, 2, 24, 7, 1, id="several blocks of channels"),
        pytest.param(1, 4, 1, 5, 7, 8, id="one direction, eight states"),
        pytest.param(1, 2, 2, 5, 49, 1, id="last stage"),
        pytest.param(1, 4, 1, 3, 63, 1, id="one direction, odd length"),
        pytest.param(1, 1, 2, 5, 63, 3, id="three states"),
        pytest.param(1, 1, 2, 1, 20, 16, id="sixteen states"),
        pytest.param(1, 1, 2, 3, 300, 1, id="several chunks"),
        pytest.param(1, 1, 1, 3, 300, 2, id="several chunks, one direction"),
    ],
)
def test_output_and_every_gradient(
    batch: int, groups: int, directions: int, channels: int, length: int, state: int
) -> None:
    check(draw(batch, groups, directions, channels, length, state))


@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize(
    ("forward", "backward"), [(16, 16), (32, 16), (16, 32), (64, 16)], ids=lambda positions: f"{positions}"
)
def test_any_chunks_give_the_same(directions: int, forward: int, backward: int) -> None:
    tiling = make_tiling(3, 63, forward=Tile(2, forward, 1), backward=Tile(2, backward, 1))
    check(draw(1, 1, directions, 3, 63, 2), tiling=tiling)


@pytest.mark.parametrize(("has_D", "has_bias"), [(False, True), (True, False), (False, False)])
@pytest.mark.parametrize("softplus", [True, False], ids=["softplus", "plain"])
def test_what_is_optional(has_D: bool, has_bias: bool, softplus: bool) -> None:
    u, delta, A, B, C, D, bias = draw(1, 1, 2, 3, 10, 1)
    steps = delta if softplus else delta.abs()
    check((u, steps, A, B, C, D if has_D else None, bias if has_bias else None), softplus=softplus)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision(dtype: torch.dtype) -> None:
    check(draw(1, 1, 2, 3, 49, 2, dtype))


def test_each_input_has_its_own_dtype() -> None:
    u, delta, A, B, C, D, bias = draw(1, 1, 2, 3, 20, 1)
    check((u, delta.bfloat16(), A, B.half(), C, D, bias))


def test_non_contiguous_inputs() -> None:
    u, delta, A, B, C, D, bias = draw(2, 1, 2, 3, 11, 2)
    u, delta = u.mT.contiguous().mT, delta.movedim(0, 4).contiguous().movedim(4, 0)
    projected = torch.cat((B, C, B), 3)
    check((u, delta, A, projected[..., :2, :], projected[..., 2:4, :], D, bias))
    check((u, delta, A, B.mT.contiguous().mT, C, D, bias))


@pytest.mark.parametrize(
    # Of tiny steps the sum dA keeps little: plain float32 loses as much of it.
    ("shift", "slack"),
    [(-12.0, 15.0), (8.0, 1.0), (30.0, 1.0)],
    ids=["tiny steps", "long steps", "no memory"],
)
def test_extreme_steps(shift: float, slack: float) -> None:
    u, delta, A, B, C, D, bias = draw(1, 1, 2, 3, 20, 1)
    assert bias is not None
    check((u, delta, A, B, C, D, bias + shift), slack=slack)


def test_two_backward_runs_agree_bit_for_bit() -> None:
    inputs = draw(2, 1, 2, 3, 20, 1)
    dy = torch.ones_like(inputs[0])
    tiling = make_tiling(3, 20, forward=Tile(2, 16, 1), backward=Tile(2, 16, 1))
    for first, second in zip(found(inputs, dy, True, tiling), found(inputs, dy, True, tiling), strict=True):
        assert first is not None
        assert second is not None
        assert torch.equal(first, second)


@pytest.mark.parametrize("length", [1, 49, 128, 129])
def test_states_shape_is_what_forward_saves(length: int) -> None:
    _, states = scan_forward(ScanInputs(*draw(1, 1, 1, 1, length, 2)))
    assert states.shape == states_shape((1, 1, 1, 1, length), 2)
    assert states.dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("groups", "directions"), [(2, 2), (4, 1)])
@pytest.mark.parametrize(("channels", "length"), [(96, 3136), (192, 784), (384, 196), (768, 49)])
def test_shapes_of_a_network(channels: int, length: int, groups: int, directions: int, dtype: torch.dtype) -> None:
    check(draw(2, groups, directions, channels, length, 1, dtype), slack=5.0)


@pytest.mark.gpu
def test_more_than_two_billion_elements() -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < 40 << 30:
        pytest.skip("needs 40 GiB of device memory")
    batch, length = 1 << 16, 1 << 15
    u = torch.ones(batch, 1, 1, length, device=DEVICE, dtype=torch.bfloat16)
    one = torch.ones(1, 1, 1, device=DEVICE)
    rows = torch.ones(1, 1, 1, 1, length, device=DEVICE).expand(batch, 1, 1, 1, length)
    y, _ = scan_forward(ScanInputs(u, u[:, :, None], -one[..., None], rows, rows, None, None, False))
    assert torch.equal(y[0], y[-1])
