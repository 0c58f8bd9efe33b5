"""Compiled CPU kernels: shipped IR against the sources, and the cache folder in every condition."""

from __future__ import annotations

import functools
import gzip
import os
import resource
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest
import torch

from trust_tta.methods.registry import create_method
from trust_tta.models.typed import create_model
from trust_tta.ops.cpu import native
from trust_tta.ops.cpu.onednn import gelu_and_slope
from trust_tta.ops.selfcheck import check_backend

SHIPPED = [
    (name, dtype) for name in native.KERNELS for dtype in ("float32", "float64") if (name, dtype) != ("gelu", "float64")
]

# GELU by its kernel in a new process: prints its sum and which compilers were imported.
RUN = """
import sys, torch
import trust_tta.models.factory, trust_tta.models.vmamba
from trust_tta.ops.cpu.onednn import gelu_and_slope
x = torch.linspace(-3, 3, 64); out = torch.empty(64)
gelu_and_slope(x, out)
print(round(float(out.sum()), 4), *sys.modules.keys() & {"numba", "torch._dynamo", "triton"})
"""
EXPECTED = round(float(torch.nn.functional.gelu(torch.linspace(-3, 3, 64)).sum()), 4)


def start(cache: Path, **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "TRUST_TTA_CACHE": str(cache), **variables}
    return subprocess.Popen([sys.executable, "-c", RUN], env=environment, stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> list[str]:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return output.split()


def gelu_with(cache: Path, monkeypatch: pytest.MonkeyPatch) -> float:
    """The sum of GELU by a kernel that is loaded anew with this cache folder."""
    monkeypatch.setenv("TRUST_TTA_CACHE", str(cache))
    monkeypatch.setattr("trust_tta.ops.cpu.onednn.load_kernel", functools.cache(native.load_kernel.__wrapped__))
    x, out = torch.linspace(-3, 3, 64), torch.empty(64)
    gelu_and_slope(x, out)
    return round(float(out.sum()), 4)


@pytest.mark.parametrize(("name", "dtype"), SHIPPED)
def test_shipped_ir_is_of_the_present_sources(name: str, dtype: str) -> None:
    file = resources.files("trust_tta") / "assets" / "kernels" / f"{native.symbol(name, dtype)}.ll.gz"
    first_line = gzip.decompress(file.read_bytes()).decode().splitlines()[0]
    assert first_line == f"; {native.source_hash()}", "kernels were edited: run `make kernels`"


@pytest.mark.skipif((sys.platform, os.uname().machine) != native.PLATFORM, reason="shipped IR is for x86-64 Linux")
def test_shipped_ir_and_numba_compute_the_same() -> None:
    """The grouped scan's forward, which compiles fastest."""
    from trust_tta.ops.cpu import scan_kernels

    generator = torch.Generator().manual_seed(0)
    b, g, m, c, n, length = 2, 1, 2, 5, 2, 9
    shapes = [(b, g, c, length), (b, g, m, c, length), (g, m, c, n), *[(b, g, m, n, length)] * 2, *[(g, m, c)] * 2]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    tensors[2] = -tensors[2].exp()
    scratch, ours, theirs = torch.zeros(3, 4, length), *torch.zeros(2, *shapes[0])
    native.load_kernel("scan_forward", torch.float32)(*native.array_fields(scratch, *tensors, ours), 1, 4, 0, b * g * 4)
    scan_kernels.scan_forward(scratch.numpy(), *(t.numpy() for t in (*tensors, theirs)), 1, 4, 0, b * g * 4)
    assert ours.abs().max() > 0.1
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_adaptation_with_kernels_of_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two batches of Tent with the kernels that numba compiles against the shipped ones."""
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))

    def adapt() -> torch.Tensor:
        model = create_model("vmamba_nano", checkpoint="vmamba_nano_cifar10")
        method = create_method("tent", model, lr=1e-3)
        method(images)
        return method(images)

    shipped = adapt()
    monkeypatch.setattr(native, "source_hash", lambda: "edited")
    for module in ("onednn", "scan", "ss2d"):
        load = functools.cache(native.load_kernel.__wrapped__)
        monkeypatch.setattr(f"trust_tta.ops.cpu.{module}.load_kernel", load)
    torch.testing.assert_close(adapt(), shipped, rtol=1e-3, atol=1e-3)
    assert check_backend("cpu", "cpu").passed


def test_two_processes_with_one_empty_cache_import_no_compiler(tmp_path: Path) -> None:
    results = [finish(process) for process in [start(tmp_path) for _ in range(2)]]
    assert results == [[str(EXPECTED)]] * 2
    assert len(list((tmp_path / "kernels").iterdir())) == 1


def test_a_second_load_reads_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gelu_with(tmp_path, monkeypatch) == EXPECTED
    monkeypatch.setattr(native, "compile_ir", lambda code: pytest.fail("compiled again"))
    assert gelu_with(tmp_path, monkeypatch) == EXPECTED


@pytest.mark.parametrize("damage", [b"", b"another version's file" * 9])
def test_a_damaged_file_is_replaced(damage: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gelu_with(tmp_path, monkeypatch)
    (file,) = (tmp_path / "kernels").iterdir()
    intact = file.read_bytes()
    file.write_bytes(damage)
    assert gelu_with(tmp_path, monkeypatch) == EXPECTED
    assert file.read_bytes() == intact


def test_a_cache_that_cannot_be_written_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file where the folder should be fails as a read-only folder does, also for root."""
    (tmp_path / "file").write_text("")
    assert gelu_with(tmp_path / "file", monkeypatch) == EXPECTED


def test_a_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on the size of files fails in the midst of writing, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        assert gelu_with(tmp_path, monkeypatch) == EXPECTED
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list((tmp_path / "kernels").iterdir()) == []


def test_edited_sources_are_compiled_by_numba(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "source_hash", lambda: "edited")
    assert gelu_with(tmp_path, monkeypatch) == EXPECTED
    assert not (tmp_path / "kernels").exists()


def test_an_older_llvm_leaves_the_kernels_to_numba(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "MIN_LLVM", 1000)
    assert gelu_with(tmp_path, monkeypatch) == EXPECTED
    assert not (tmp_path / "kernels").exists()
