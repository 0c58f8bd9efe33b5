"""The public functions: golden numbers through every backend, and errors that name the tensor."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.golden import load_golden, relative_error
from tests.ops.cases import NAMES, Scan
from trust_tta.errors import BackendError, ConfigError, ShapeError
from trust_tta.ops import functional
from trust_tta.ops.functional import choose_backend
from trust_tta.ops.selfcheck import usable_backends

selective_scan: Scan = functional.selective_scan


def make_arguments() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 6, 5), (2, 6, 5), (6, 4), (2, 3, 4, 5), (2, 3, 4, 5), (6,), (6,))
    named = {k: torch.randn(s, generator=generator) for k, s in zip(NAMES, shapes, strict=True)}
    return named | {"A": -named["A"].exp()}


FILES = ("scan_n1", "scan_n16", "scan_n1_long")
BACKENDS = {"auto": "cpu"} | usable_backends()
INTERPRETED = BACKENDS.get("triton") == "cpu"


@pytest.mark.parametrize(
    ("backend", "file"),
    [
        pytest.param(b, f, marks=[pytest.mark.slow] if INTERPRETED and b == "triton" and f != "scan_n1" else [])
        for b, f in product(BACKENDS, FILES)
    ],
)
@pytest.mark.usefixtures("nan_empty")
def test_golden(backend: str, file: str) -> None:
    golden, device = load_golden(f"{file}.npz"), BACKENDS[backend]
    inputs = {name: torch.from_numpy(golden[name]).to(device).requires_grad_() for name in NAMES}
    y = selective_scan(**inputs, backend=backend)
    y.backward(torch.from_numpy(golden["dy"]).to(device))
    errors = {"y": relative_error(y.detach().cpu().numpy(), golden["y"])}
    for name, tensor in inputs.items():
        assert tensor.grad is not None
        errors[name] = relative_error(tensor.grad.cpu().numpy(), golden[f"grad_{name}"])
    assert all(error <= 1e-5 for error in errors.values()), errors  # ten times below what golden/README.md asks


def test_groups_share_B_and_C() -> None:  # noqa: N802
    """Each group of channels alone gives its part of the whole."""
    inputs = make_arguments()
    whole = selective_scan(**inputs)
    for k in range(3):
        rows, group = slice(2 * k, 2 * k + 2), slice(k, k + 1)
        part = {n: inputs[n][:, rows] for n in ("u", "delta")} | {n: inputs[n][:, group] for n in ("B", "C")}
        part |= {n: inputs[n][rows] for n in ("A", "D", "delta_bias")}
        torch.testing.assert_close(selective_scan(**part), whole[:, rows], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("softplus", [True, False], ids=["softplus", "plain"])
def test_backends_agree_on_options(softplus: bool) -> None:
    inputs = {k: v for k, v in make_arguments().items() if k not in ("D", "delta_bias")}
    inputs["delta"] = inputs["delta"].abs()
    results = [selective_scan(**inputs, delta_softplus=softplus, backend=b) for b in ("cpu", "reference")]
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)


WRONG = {
    "u": (torch.zeros(6, 5), r"u has shape \(6, 5\)"),
    "delta": (torch.zeros(2, 6, 4), r"delta has shape \(2, 6, 4\); the scan needs \(2, 6, 5\)"),
    "A": (torch.zeros(5, 4), r"A has shape \(5, 4\); the scan needs \(6, state\)"),
    "B": (torch.zeros(2, 3, 4, 6), r"B has shape \(2, 3, 4, 6\)"),
    "C": (torch.zeros(2, 2, 4, 5), r"C has shape \(2, 2, 4, 5\); the scan needs \(2, 3, 4, 5\)"),
    "D": (torch.zeros(3), r"D has shape \(3,\); the scan needs \(6,\)"),
    "delta_bias": (torch.zeros(6, 1), r"delta_bias has shape \(6, 1\)"),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_shape_names_the_tensor(name: str) -> None:
    wrong, message = WRONG[name]
    with pytest.raises(ShapeError, match=message) as caught:
        selective_scan(**(make_arguments() | {name: wrong}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_dtype_names_the_tensor(name: str) -> None:
    inputs = make_arguments()
    with pytest.raises(ShapeError, match=f"^{name} is torch.int64"):
        selective_scan(**(inputs | {name: inputs[name].long()}))


@pytest.mark.parametrize("name", NAMES[1:])
def test_a_wrong_device_names_the_tensor(name: str) -> None:
    inputs = make_arguments()
    with pytest.raises(ShapeError, match=f"^{name} is on meta but u is on cpu"):
        selective_scan(**(inputs | {name: inputs[name].to("meta")}))


def test_groups_must_divide_the_channels() -> None:
    rows = torch.zeros(2, 4, 4, 5)
    with pytest.raises(ShapeError, match="B has shape .* divides 6 channels"):
        selective_scan(**(make_arguments() | {"B": rows, "C": rows}))


@pytest.mark.parametrize("shape", [(0, 6, 5), (2, 6, 0), (2, 0, 5)], ids=str)
def test_empty_inputs_are_refused(shape: tuple[int, int, int]) -> None:
    empty = torch.zeros(shape)
    with pytest.raises(ShapeError, match="u has shape .* none of them zero"):
        selective_scan(**(make_arguments() | {"u": empty, "delta": empty}))


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown scan backend 'gpu'; choose one of auto, reference, cpu, triton"):
        selective_scan(**make_arguments(), backend="gpu")


def test_backends_refuse_tensors_they_cannot_take() -> None:
    with pytest.raises(BackendError, match="backend 'cpu' needs CPU tensors but u is on meta"):
        choose_backend(torch.zeros(1, device="meta"), "cpu")
    pytest.importorskip("triton")
    with pytest.raises(BackendError, match="float64; use backend='reference'"):
        choose_backend(torch.zeros(1, dtype=torch.float64), "triton")


def test_auto_chooses_by_device() -> None:
    assert choose_backend(torch.zeros(1)) == "cpu"
    assert choose_backend(torch.zeros(1, device="meta")) == "reference"


PROBE = """
import torch, trust_tta as tt
from trust_tta.errors import BackendError
{block}
row = torch.ones(1, 1, 1, 2)
try:
    tt.selective_scan(torch.ones(1, 1, 2), torch.ones(1, 1, 2), -torch.ones(1, 1), row, row, backend="triton")
except BackendError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("", "backend 'triton' needs CUDA tensors but u is on cpu"),
        ("import sys; sys.modules['triton'] = None", "backend 'triton' needs the package triton"),
    ],
    ids=["on-a-cpu", "not-installed"],
)
def test_triton_where_it_cannot_run(block: str, message: str) -> None:
    if not block:
        pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    code = PROBE.format(block=block)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert message in result.stdout
    assert result.stdout.count("\n") == 1


def test_numpy_agrees_with_a_direct_loop() -> None:
    """The formula once more, in numpy and without any of the package's code."""
    inputs = {k: v.double().numpy() for k, v in make_arguments().items()}
    expected = np.empty((2, 6, 5))
    for b, c in np.ndindex(2, 6):
        h = np.zeros(4)
        for t in range(5):
            d = np.logaddexp(0, inputs["delta"][b, c, t] + inputs["delta_bias"][c])
            h = np.exp(d * inputs["A"][c]) * h + d * inputs["B"][b, c // 2, :, t] * inputs["u"][b, c, t]
            expected[b, c, t] = h @ inputs["C"][b, c // 2, :, t] + inputs["D"][c] * inputs["u"][b, c, t]
    actual = selective_scan(**{k: torch.from_numpy(v) for k, v in inputs.items()})
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-12)
