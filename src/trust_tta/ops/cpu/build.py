"""Writes the shipped LLVM IR of the CPU kernels: `make kernels`, after any change of their sources."""

from __future__ import annotations

import gzip
import os
import tempfile
from pathlib import Path

from trust_tta.atomic import write_whole
from trust_tta.errors import BackendError
from trust_tta.ops.cpu import native

FOLDER = Path(__file__).resolve().parents[2] / "assets" / "kernels"
# Functions that the IR may call: of LLVM and of the C library.
ALLOWED = ("llvm.", "exp", "log1p", "memset", "memcpy", "memmove")


def build(folder: Path) -> None:
    """Write one file for each kernel and dtype."""
    for name in native.KERNELS:
        for dtype in ("float32",) if name == "gelu" else ("float32", "float64"):
            code = f"; {native.source_hash()}\n{generate_ir(name, dtype)}"
            write_whole(folder / f"{native.symbol(name, dtype)}.ll.gz", gzip.compress(code.encode(), mtime=0))


def generate_ir(name: str, dtype: str) -> str:
    """LLVM IR of a kernel by numba: inlined and simplified, but not yet for one CPU."""
    import llvmlite.binding as llvm
    from numba import config

    if config.OPT:
        raise BackendError("numba must not optimize the IR to be shipped; set NUMBA_OPT=0")
    compiled = native.numba_result(name, dtype)
    module = llvm.parse_assembly(compiled.library.get_llvm_str())
    kept = compiled.fndesc.llvm_func_name
    for value in (*module.functions, *module.global_variables):
        if not value.is_declaration and value.name != kept:
            value.linkage = "internal"
    module.get_function(kept).name = native.symbol(name, dtype)
    machine = llvm.Target.from_triple(module.triple).create_target_machine(opt=1)
    native.optimize(module, machine, level=1, vectorize=False)
    called = [f.name for f in module.functions if f.is_declaration and not f.name.startswith(ALLOWED)]
    if called:
        raise BackendError(f"the kernel {name} calls {', '.join(called)}, which only numba provides")
    return str(module)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:  # code that is not optimized must not stay in the user's cache
        os.environ |= {"NUMBA_OPT": "0", "NUMBA_CACHE_DIR": cache}
        build(FOLDER)
