"""Compilation by Triton, without a device, over cache folders that cannot be written."""

from __future__ import annotations

import errno
import warnings
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.runtime.cache import FileCacheManager  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from trust_tta.errors import TrustWarning  # noqa: E402
from trust_tta.ops.triton import cache  # noqa: E402


def zero(p_x):  # type: ignore[no-untyped-def]
    triton.language.store(p_x, 0.0)


def compile_zero() -> Any:
    """The kernel's binary for an H100."""
    source = ASTSource(JITFunction(zero), {"p_x": "*fp32"})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": True}).asm["cubin"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "cache"))
    monkeypatch.setattr(knobs.cache, "manager_class", cache.FallbackCache)
    cache._warn_once.cache_clear()
    return tmp_path / "cache"


def refuse_writes(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A folder on a full disk: nothing can be put there."""
    put = FileCacheManager.put

    def full(self: FileCacheManager, *arguments: Any, **options: Any) -> Any:
        if Path(self.cache_dir).is_relative_to(folder):
            raise OSError(errno.ENOSPC, "No space left on device")
        return put(self, *arguments, **options)

    monkeypatch.setattr(FileCacheManager, "put", full)


def test_folder_that_cannot_be_made_is_replaced_with_one_warning(folder: Path) -> None:
    expected = compile_zero()
    blocked = folder.parent / "file"
    blocked.write_bytes(b"")
    knobs.cache.dir = str(blocked / "cache")
    with pytest.warns(TrustWarning, match=r"file/cache' cannot be written .* set TRITON_CACHE_DIR") as caught:
        assert compile_zero() == expected
    assert len(caught) == 1


def test_full_disk_is_replaced_with_one_warning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_writes(monkeypatch, folder)
    with pytest.warns(TrustWarning, match="No space left on device") as caught:
        compile_zero()
    assert len(caught) == 1
    assert not [path for path in folder.rglob("*") if path.is_file()]


def test_filled_cache_is_read_without_writing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = compile_zero()
    refuse_writes(monkeypatch, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error", TrustWarning)
        assert compile_zero() == expected


def test_cache_manager_of_the_user_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs.cache, "manager_class", FileCacheManager)
    cache.use_fallback()
    assert knobs.cache.manager_class is FileCacheManager
