"""Measuring: repeats, spread, and rows that survive their failures. Nothing here depends on speed."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from tests.conftest import SetThreads
from trust_tta.bench.speed import (
    Shape,
    SpeedSettings,
    make_cases,
    over_reference,
    scan_cases,
    stage_shapes,
)
from trust_tta.bench.startup import fill_gpu_caches, startup_timings
from trust_tta.bench.timing import Case, Prepare, Timing, TimingLimits, Work, measure, repeat
from trust_tta.errors import ConfigError
from trust_tta.models.typed import create_model
from trust_tta.models.vmamba import VMamba

CPU = torch.device("cpu")
ONCE = TimingLimits(seconds=0.0, min_repeats=1, max_warmups=0)
TIMING = Timing(part="network", work="forward", backend="cpu", dtype="float32", batch=2, size=16)


@pytest.fixture
def model() -> VMamba:
    torch.manual_seed(0)
    return create_model("vmamba_nano", depths=(1, 1), dims=(8, 16)).eval()


@pytest.fixture
def one_thread(threads: SetThreads) -> None:
    """Threads that wait for each other's turn would make small work slow."""
    threads(1)


@pytest.mark.parametrize(
    ("limits", "seconds", "expected"),
    [
        (TimingLimits(seconds=1.0, min_repeats=3), 0.25, 4),
        (TimingLimits(seconds=1.0, min_repeats=3), 2.0, 3),
        (TimingLimits(seconds=1.0, min_repeats=3, max_seconds=5.0), 6.0, 1),
        (TimingLimits(seconds=1.0, min_repeats=3, max_repeats=7), 1e-3, 7),
        (ONCE, 0.0, 1),
    ],
    ids=["until the seconds", "min repeats", "one long repeat", "max repeats", "once"],
)
def test_number_of_repeats(limits: TimingLimits, seconds: float, expected: int) -> None:
    assert len(repeat(lambda: None, lambda work: seconds, limits)) == expected


def test_calls_that_compile_are_no_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel compiles in the first call, a graph is captured in the second, both far over the limits of a repeat."""
    values = iter([18.0, 2.0, 0.1, 0.1, *[0.1] * 30])
    monkeypatch.setattr("trust_tta.bench.timing.wall_clock", lambda device: lambda work: next(values))
    row = measure(Case(timing=TIMING, prepare=prepared(lambda: None), limits=TimingLimits(seconds=0.5)), CPU)
    assert row.first_ms == 18000
    assert [row.median_ms, row.p20_ms, row.p80_ms] == pytest.approx([100, 100, 100])


def test_median_and_spread_of_the_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    values = iter([9.0, 9.0, 5.0, 1.0, 3.0, 2.0, 4.0])  # two warm-up calls
    monkeypatch.setattr("trust_tta.bench.timing.wall_clock", lambda device: lambda work: next(values))
    case = Case(
        timing=TIMING,
        prepare=prepared(lambda: None),
        limits=TimingLimits(seconds=0, min_repeats=5, max_warmups=0),
    )
    row = measure(case, CPU)
    assert (row.median_ms, row.repeats) == (3000, 5)
    assert row.p20_ms == pytest.approx(1800)
    assert row.p80_ms == pytest.approx(4200)
    assert row.peak_bytes is None


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory.\nmore"), MemoryError(), ConfigError("no")], ids=repr
)
def test_a_row_survives_its_own_failure(error: Exception) -> None:
    cleaned = []

    def fail() -> None:
        raise error

    def prepare() -> Iterator[Work]:
        try:
            yield fail
        finally:
            cleaned.append(True)

    row = measure(Case(timing=TIMING, prepare=contextmanager(prepare), limits=ONCE), CPU)
    assert row.failed.startswith(type(error).__name__)
    assert "\n" not in row.failed
    assert (row.median_ms, row.repeats, cleaned) == (None, 0, [True])


def test_ratios_compare_like_with_like() -> None:
    fast, slow = replace(TIMING, median_ms=2.0), replace(TIMING, backend="reference", median_ms=7.0)
    other = replace(TIMING, batch=9, median_ms=2.0)
    failed = replace(TIMING, work="Tent", failed="out of memory")
    half = replace(TIMING, dtype="bf16", median_ms=1.0)
    assert over_reference([fast, slow, other, failed, half]) == {"network: forward, batch 2, size 16": 3.5}


def settings(**changes: object) -> SpeedSettings:
    once = {"seconds": 0.0, "repeats": 1, "warmups": 0}
    given = {"model": None, "batches": (7,), "size": 16, "dtypes": ("float32",)}
    return SpeedSettings(**{**given, **once, **changes})  # type: ignore[arg-type]


def test_shapes_of_the_scans_of_a_network(model: VMamba) -> None:
    assert stage_shapes(model, batch=4, size=20) == [Shape(4, 8, 100, 1), Shape(4, 16, 25, 1)]


@pytest.mark.usefixtures("one_thread")
def test_every_row_leaves_the_network_as_it_was(model: VMamba) -> None:
    before = {name: t.clone() for name, t in model.state_dict().items()}
    rows = [measure(case, CPU) for case in make_cases(settings(), model, device=CPU)]
    assert [row.failed for row in rows] == [""] * len(rows)
    steps = [row for row in rows if row.part == "network"]
    assert [row.work for row in steps if row.backend == "reference"] == [
        "forward", "forward and backward", "TRUST K=6 sequential",
    ]  # fmt: skip
    assert len([row for row in steps if row.backend == "cpu"]) == 9
    assert {row.backend for row in rows if row.part == "scan"} == {"cpu", "reference"}
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.usefixtures("one_thread")
def test_a_batch_of_one_runs_in_every_mode_but_split(model: VMamba) -> None:
    cases = make_cases(settings(batches=(1,), dtypes=("bf16",)), model, device=CPU)
    rows = [measure(case, CPU) for case in cases]
    assert [row.failed for row in rows] == [""] * len(rows)
    assert not [row for row in rows if "split" in row.work]


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_scan_rows(backend: str, dtype: str) -> None:
    shape = Shape(batch=2, channels=3, length=11, state=1)
    cases = scan_cases(shape, backend=backend, dtype=dtype, device=CPU, limits=ONCE)
    for case, work in zip(cases, ("forward", "backward"), strict=True):
        row = measure(case, CPU)
        assert (row.failed, row.work, row.size, row.channels) == ("", work, 11, 3)


def test_every_mistake_in_the_settings_at_once() -> None:
    with pytest.raises(ConfigError, match=r"batches is .*size is 3.*dtypes.*repeats is 0; give a value >= 1"):
        settings(batches=(), size=3, dtypes=("f8",), repeats=0)


class Tiny(torch.nn.Module):
    """A network of a user."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)
        self.head = torch.nn.Linear(4, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(self.conv(images)).relu().mean((2, 3)))
        return logits


def test_any_network_has_rows() -> None:
    model = create_model(f"{__name__}:Tiny").eval()
    rows = [measure(case, CPU) for case in make_cases(settings(batches=(8,)), model, device=CPU)]
    assert [row.failed for row in rows] == [""] * len(rows)
    assert [row.work for row in rows][-2:] == ["Tent", "tide"]


def test_startup_rows_are_timed_in_new_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, str]] = []

    def run(command: list[str], *, env: dict[str, str], **_: object) -> subprocess.CompletedProcess[str]:
        started.append(env)
        failed = "--help" in command
        return subprocess.CompletedProcess(command, int(failed), "1.5", "Traceback\nValueError: no")

    monkeypatch.setattr(subprocess, "run", run)
    rows = list(startup_timings("vmamba_nano", ["model"], device="cpu", backend="cpu", batch=2, size=16))
    works = ["import trust_tta", "trust-tta --help", "first model(x), cold cache", "first model(x), warm cache"]
    assert [row.work for row in rows] == works
    assert [row.median_ms for row in rows[2:]] == [1500, 1500]
    assert rows[1].failed == "ValueError: no"
    assert started[2]["NUMBA_CACHE_DIR"] == started[3]["NUMBA_CACHE_DIR"] != started[0].get("NUMBA_CACHE_DIR")


@pytest.mark.slow
def test_first_batches_of_all_methods_run_side_by_side() -> None:
    rows = fill_gpu_caches("vmamba_nano", device="cpu", batches=(8,), size=32)
    assert [row.failed for row in rows] == [""] * 10


def test_first_batches_are_of_several_sizes_and_of_all_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command[3:])
        return subprocess.CompletedProcess(command, 0, "1.5", "")

    monkeypatch.setattr(subprocess, "run", run)
    rows = fill_gpu_caches("vmamba_nano", batches=(16, 1), size=32)
    assert len(rows) == 10 + 8
    assert ["vmamba_nano", "", "trust split", "cuda", "16", "32", "bf16"] in commands
    assert not any(command[2] == "trust split" and command[4] == "1" for command in commands)


def prepared(work: Work) -> Prepare:
    def prepare() -> Iterator[Work]:
        yield work

    return contextmanager(prepare)
