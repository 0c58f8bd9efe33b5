"""The compiled CPU scan against the reference: output and every gradient, at awkward sizes and values."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.conftest import SetThreads
from tests.ops.cases import NAMES, assert_close, make_inputs, reference_in_float64, run_scan
from trust_tta.ops import reference
from trust_tta.ops.cpu.threads import SMALL, run_tasks
from trust_tta.ops.functional import selective_scan
from trust_tta.ops.operators import scan as scan_operator

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 8e-3, torch.float16: 1e-3}
SHORT = list(itertools.product([1, 7, 49, 63], [1, 8, 16], [1, 3], [(4, 1), (2, 2)]))
LONG = [(3136, 1, 1, (4, 1)), (3136, 1, 3, (2, 2)), (3136, 8, 1, (2, 2)), (3136, 16, 1, (4, 1))]

pytestmark = pytest.mark.usefixtures("nan_empty")


def scan(*tensors: Tensor | bool | None) -> Tensor:
    y: Tensor = scan_operator(*tensors, False)[0]
    return y


def case_id(case: object) -> str:
    return "x".join(map(str, case)) if isinstance(case, tuple) else str(case)


@pytest.mark.parametrize(("length", "n", "b", "gm"), SHORT + LONG, ids=case_id)
def test_output_and_gradients(length: int, n: int, b: int, gm: tuple[int, int]) -> None:
    inputs = [t.float() for t in make_inputs(b=b, g=gm[0], m=gm[1], c=3, n=n, length=length)]
    assert_close(run_scan(scan, inputs), reference_in_float64(inputs), TOLERANCE[torch.float32])


@pytest.mark.parametrize("length", [49, 196, 197, 784, 3136])
def test_one_group_of_sixteen_states(length: int, threads: SetThreads) -> None:
    """The scan of Mamba's one-dimensional networks: through the public function, and never by the reference."""
    threads(2)
    u, delta, A, B, C, D, bias = (t.float() for t in make_inputs(b=2, g=1, m=1, c=24, n=16, length=length))
    inputs = [u, delta, A, B, C, D, bias]

    def public(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, bias: Tensor, _: bool) -> Tensor:
        flat = (u[:, 0], delta[:, 0, 0], A[0, 0], B[:, 0], C[:, 0], D[0, 0], bias[0, 0])
        return selective_scan(*flat)[:, None]

    with mock.patch.object(reference, "scan_grouped", side_effect=AssertionError("the slow reference was called")):
        actual = run_scan(public, inputs)
    assert_close(actual, reference_in_float64(inputs), TOLERANCE[torch.float32])


@pytest.mark.parametrize("c", [1, 2, 4, 6, 13, 21])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_dtypes_and_channel_counts(dtype: torch.dtype, c: int) -> None:
    inputs = [t.to(dtype) for t in make_inputs(c=c, n=2, length=19)]
    actual = run_scan(scan, inputs)
    assert {t.dtype for t in actual.values()} == {dtype}
    dy = torch.arange(1, actual["y"].numel() + 1, dtype=torch.float64).cos().view(actual["y"].shape).to(dtype).double()
    assert_close(actual, reference_in_float64(inputs, dy=dy), TOLERANCE[dtype])


def test_each_gradient_has_the_dtype_of_its_input() -> None:
    dtypes = [torch.bfloat16, torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float32, torch.float64]
    inputs = [t.to(d) for t, d in zip(make_inputs(length=11), dtypes, strict=True)]
    actual = run_scan(scan, inputs)
    assert actual["y"].dtype == torch.bfloat16
    assert [actual[f"grad_{name}"].dtype for name in NAMES] == dtypes
    assert_close(actual, reference_in_float64(inputs), TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("missing", [("D",), ("delta_bias",), ("D", "delta_bias")], ids="+".join)
def test_without_optional_inputs(missing: tuple[str, ...]) -> None:
    inputs = [None if name in missing else t.float() for name, t in zip(NAMES, make_inputs(n=3), strict=True)]
    assert_close(run_scan(scan, inputs), reference_in_float64(inputs), TOLERANCE[torch.float32])


def test_without_softplus() -> None:
    u, delta, *rest = (t.float() for t in make_inputs(n=3, length=20))
    inputs = [u, delta.abs(), *rest]
    inputs[-1] = inputs[-1].abs()
    actual = run_scan(scan, inputs, softplus=False)
    assert_close(actual, reference_in_float64(inputs, softplus=False), TOLERANCE[torch.float32])


def test_inputs_of_any_strides() -> None:
    u, delta, A, B, C, D, bias = (t.float() for t in make_inputs(n=4, length=21))
    strided = [
        u.transpose(2, 3).contiguous().transpose(2, 3),
        delta.flip(0)[[1, 0]].repeat_interleave(2, dim=-1)[..., ::2],
        A.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        torch.cat((C, B, B), dim=3)[:, :, :, 4:8],
        C.transpose(3, 4).contiguous().transpose(3, 4),
        D[:1, :1].expand_as(D),
        bias.repeat(1, 1, 2)[..., :5],
    ]
    assert not any(t.is_contiguous() for t in strided)
    actual = run_scan(scan, strided, dy=torch.ones(2, 1, 1, 1).expand_as(u))
    plain = run_scan(scan, [t.contiguous() for t in strided], dy=torch.ones_like(u))
    assert all(torch.equal(actual[k], plain[k]) for k in plain)
    assert_close(actual, reference_in_float64(strided, dy=torch.ones_like(u)), TOLERANCE[torch.float32])


EXTREMES = {
    "steps-near-zero": ({"delta": -200.0}, {}),
    "steps-small": ({"delta": -14.0}, {}),
    "steps-large": ({"delta": 60.0}, {}),
    "steps-huge": ({"delta": 3e4}, {}),
    "decay-at-once": ({}, {"A": 1e6}),
    "no-decay": ({}, {"A": 1e-9}),
    "large-inputs": ({}, {"u": 1e9, "B": 1e6}),
    "tiny-inputs": ({}, {"u": 1e-12, "C": 1e-8}),
}


@pytest.mark.parametrize("name", EXTREMES)
def test_extreme_values(name: str) -> None:
    shifts, scales = EXTREMES[name]
    inputs = [
        (t * scales.get(k, 1.0) + shifts.get(k, 0.0)).float()
        for k, t in zip(NAMES, make_inputs(n=2, length=33), strict=True)
    ]
    actual = run_scan(scan, inputs)
    assert all(t.isfinite().all() for t in actual.values())
    expected = reference_in_float64(inputs)
    # Below float32's normal range a relative error means nothing: such gradients count as zero.
    for key, want in expected.items():
        floor = max(want.abs().max().item(), 1e-30)
        assert (actual[key].double() - want).abs().max().item() <= 2e-5 * floor, key


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_what_is_not_finite_stays_visible(name: str, value: float) -> None:
    """A method refuses an update by looking at the loss and the gradients, so the scan must not launder a NaN."""
    inputs = [t.float() for t in make_inputs(n=2)]
    inputs[NAMES.index(name)].view(-1)[0] = value
    assert not scan(*inputs, True).isfinite().all()


def test_threads_change_no_bit(threads: SetThreads) -> None:
    inputs = [t.float() for t in make_inputs(b=3, c=13, n=2, length=500)]
    assert inputs[1].numel() >= SMALL
    results = []
    for count in (1, 2, 5):
        threads(count)
        results.append(run_scan(scan, inputs))
    for other in results[1:]:
        assert all(torch.equal(other[key], results[0][key]) for key in other)


def test_calls_from_several_threads_at_once(threads: SetThreads) -> None:
    threads(2)
    cases = [[t.float() for t in make_inputs(b=2, c=13, length=700, seed=seed)] for seed in range(4)]
    assert cases[0][1].numel() >= SMALL
    alone = [run_scan(scan, inputs) for inputs in cases]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda i: run_scan(scan, cases[i % 4]), range(16)))
    for i, result in enumerate(together):
        assert all(torch.equal(result[key], alone[i % 4][key]) for key in result)


@pytest.mark.parametrize("tasks", [1, 2, 7, 64])
def test_every_task_runs_once(tasks: int, threads: SetThreads) -> None:
    for count in (1, 2, 5):
        threads(count)
        spans: list[tuple[int, int]] = []
        run_tasks(lambda first, last, done=spans: done.append((first, last)), tasks, SMALL)  # type: ignore[misc]
        assert sorted(i for first, last in spans for i in range(first, last)) == list(range(tasks))
        assert len(spans) == min(count, tasks)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_in_any_thread_reaches_the_caller(failing: int, threads: SetThreads) -> None:
    threads(3)

    def work(first: int, last: int) -> None:
        if first <= failing < last:
            raise RuntimeError(f"task {failing}")

    with pytest.raises(RuntimeError, match=f"task {failing}"):
        run_tasks(work, 3, SMALL)


SPINNING = """
import os, time
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
import torch, trust_tta as tt
torch.set_num_threads(2)
u, rows = torch.rand(4, 16, 1024), torch.rand(4, 1, 1, 1024)
tt.selective_scan(u, u, -torch.ones(16, 1), rows, rows)
large, spent = torch.zeros(1 << 20), 0.0
for _ in range(20):
    large.add_(1)
    before = time.process_time()
    time.sleep(0.02)
    spent += time.process_time() - before
print(spent)
"""


@pytest.mark.skipif(sys.platform != "linux" or (os.cpu_count() or 1) < 2, reason="needs GNU OpenMP and two CPUs")
@pytest.mark.parametrize("chosen", [{}, {"GOMP_SPINCOUNT": "300000"}], ids=["by-itself", "as-the-user-says"])
def test_threads_of_pytorch_sleep_between_operations(chosen: dict[str, str]) -> None:
    """Processor time that passes while nothing is computed is what PyTorch's threads spend on waiting."""
    governing = ("OMP_", "GOMP_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(governing)} | chosen
    command = [sys.executable, "-c", SPINNING]
    spent = float(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert (spent > 0.015) == bool(chosen)


FREEING = """
import resource, torch, trust_tta as tt
u, rows = torch.rand(4, 16, 1024), torch.rand(4, 1, 1, 1024)
tt.selective_scan(u, u, -torch.ones(16, 1), rows, rows)
def faults():
    for _ in range(4):
        maps = [torch.ones(5 << 20) for _ in range(4)]
        del maps
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
before = faults()
print(faults() - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs GNU's C library")
@pytest.mark.parametrize("chosen", [{}, {"MALLOC_TRIM_THRESHOLD_": "131072"}], ids=["by-itself", "as-the-user-says"])
def test_freed_memory_is_kept_for_the_next_pass(chosen: dict[str, str]) -> None:
    """Memory returned to the system comes back page by page, each a fault."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")} | chosen
    command = [sys.executable, "-c", FREEING]
    faults = int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert (faults > 4 * 4 * 5000) == bool(chosen)
    assert faults > 4 * 4 * 5000 or faults < 2000
