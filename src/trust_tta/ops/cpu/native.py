"""Machine code of the CPU kernels: shipped as LLVM IR, compiled for this CPU when first needed, cached on disk.

Most of a compilation is numba's front end, from Python to LLVM IR. It runs once for all, in `build`; llvmlite does the
rest in a fraction of the time. Where the shipped IR does not fit (another platform, an older LLVM, edited kernels),
numba compiles the same functions.
"""

from __future__ import annotations

import ctypes
import functools
import gzip
import hashlib
import importlib
import platform
import sys
import time
from collections.abc import Callable
from importlib import resources
from typing import Any

import torch
from torch import Tensor

from trust_tta.errors import BackendError
from trust_tta.ops.cache import read_cached, write_cached

# Module and function, dimensions of the arrays, number of the integers that follow them.
KERNELS = {
    "ss2d_forward": ("ss2d_kernels", "scan_forward", (1, 3, 4, 3, 3), 7),
    "ss2d_backward": ("ss2d_kernels", "scan_backward", (1, 3, 3, 4, 3, 3, 5, 3), 9),
    "scan_forward": ("scan_kernels", "scan_forward", (3, 4, 5, 4, 5, 5, 3, 3, 4), 4),
    "scan_backward": ("scan_kernels", "scan_backward", (3, 4, 4, 5, 4, 5, 5, 3, 3, 4, 5, 5, 6, 6, 4, 4), 4),
    "gelu": ("gelu_kernel", "gelu_and_slope", (1, 1), 0),
}
SOURCES = ("gelu_kernel.py", "scan_kernels.py", "ss2d_kernels.py", "tiling.py", "vector_math.py")
PLATFORM = ("linux", "x86_64")  # of the shipped IR
MIN_LLVM = 22  # version that wrote the shipped IR

_RESULT = ctypes.create_string_buffer(16)  # numba's functions store a null result, and an exception that never comes


@functools.cache
def load_kernel(name: str, dtype: torch.dtype) -> Callable[..., object]:
    """A kernel as a function of the fields of its arrays, see `array_fields`, and integers; it releases the GIL."""
    kind = str(dtype).removeprefix("torch.")
    address = _load_shipped(name, kind)
    if not address:
        compiled = numba_result(name, kind)
        address = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
    _, _, dimensions, integers = KERNELS[name]
    arguments: list[Any] = [ctypes.c_void_p] * 2
    for n in dimensions:
        arguments += [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 2 + [ctypes.c_void_p] + [ctypes.c_int64] * (2 * n)
    function = ctypes.CFUNCTYPE(ctypes.c_int32, *arguments, *[ctypes.c_int64] * integers)(address)
    function.errcheck = _check_status  # type: ignore[assignment]
    result = ctypes.addressof(_RESULT)
    return functools.partial(function, result, result + 8)


def load_all() -> dict[str, float]:
    """Compile, or read from the cache, every kernel in float32; seconds of each by name."""
    seconds = {}
    for name in KERNELS:
        begin = time.perf_counter()
        load_kernel(name, torch.float32)
        seconds[name] = time.perf_counter() - begin
    return seconds


def array_fields(*tensors: Tensor) -> list[int | None]:
    """Contiguous tensors as numba's functions take arrays: two unused pointers, sizes, address, shape, strides."""
    fields: list[int | None] = []
    for t in tensors:
        size = t.element_size()
        fields += [None, None, t.numel(), size, t.data_ptr(), *t.shape, *(size * stride for stride in t.stride())]
    return fields


def _check_status(status: int, function: object, arguments: tuple[Any, ...]) -> int:
    if status:
        raise BackendError(f"a CPU kernel failed with status {status}; use backend='reference' and report this")
    return status


def symbol(name: str, dtype: str) -> str:
    """Name of a kernel in its shipped IR."""
    return f"trust_tta_{name}_{dtype}"


@functools.cache
def source_hash() -> str:
    """Hash of the kernels' sources, by which shipped IR that is out of date is known."""
    folder = resources.files("trust_tta") / "ops" / "cpu"
    return hashlib.sha256(b"".join((folder / name).read_bytes() for name in SOURCES)).hexdigest()


def _load_shipped(name: str, dtype: str) -> int:
    """Address of a kernel made of the shipped IR, 0 where that does not fit."""
    file = resources.files("trust_tta") / "assets" / "kernels" / f"{symbol(name, dtype)}.ll.gz"
    if (sys.platform, platform.machine()) != PLATFORM or not file.is_file():
        return 0
    code = gzip.decompress(file.read_bytes()).decode()
    if not code.startswith(f"; {source_hash()}\n"):
        return 0
    import llvmlite.binding as llvm

    if llvm.llvm_version_info[0] < MIN_LLVM:
        return 0
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    host = (*llvm.llvm_version_info, llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())
    key = f"kernels/{name}_{dtype}_{hashlib.sha256((repr(host) + code).encode()).hexdigest()[:32]}.o"
    machine_code = read_cached(key)
    if machine_code is None:
        try:
            machine_code = compile_ir(code)
        except RuntimeError:  # IR that a later LLVM refuses
            return 0
        write_cached(key, machine_code)
    engine = _engine()
    engine.add_object_file(llvm.object_file.ObjectFileRef.from_data(machine_code))
    engine.finalize_object()
    return int(engine.get_function_address(symbol(name, dtype)))


def compile_ir(code: str) -> bytes:
    """Object file of a module, optimized for this CPU."""
    import llvmlite.binding as llvm

    module, machine = llvm.parse_assembly(code), _target_machine()
    optimize(module, machine, level=3, vectorize=True)
    return bytes(machine.emit_object(module))


def optimize(module: Any, machine: Any, *, level: int, vectorize: bool) -> None:
    """Run LLVM's standard passes on a module; without `vectorize`, those that suit every CPU."""
    import llvmlite.binding as llvm

    options = llvm.create_pipeline_tuning_options(speed_level=level)
    options.loop_vectorization = options.slp_vectorization = vectorize
    options.loop_unrolling = options.loop_interleaving = vectorize
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)


def _target_machine() -> Any:
    import llvmlite.binding as llvm

    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        reloc="default",
        codemodel="jitdefault",
        jit=True,
    )


@functools.cache
def _engine() -> Any:
    """Holder of the machine code; never freed, as functions point into it."""
    import llvmlite.binding as llvm

    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine())


def numba_result(name: str, dtype: str) -> Any:
    """A kernel compiled, and cached, by numba."""
    from numba import types

    module, function, dimensions, integers = KERNELS[name]
    kernel = getattr(importlib.import_module(f"trust_tta.ops.cpu.{module}"), function)
    arrays = [types.Array(getattr(types, dtype), n, "C") for n in dimensions]
    signature = (*arrays, *(types.int64,) * integers)
    kernel.compile(signature)
    return kernel.overloads[signature]
