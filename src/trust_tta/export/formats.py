"""The formats of PyTorch itself: an exported program, a compiled library, a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trust_tta.export.network import quiet
from trust_tta.models.weights import encode_weights
from trust_tta.ops.portable import scan_in_chunks

METADATA_FILE = "metadata.json"


def write_program(program: torch.export.ExportedProgram, path: Path, about: Mapping[str, str]) -> None:
    """A .pt2 of ATen's operators alone, with `about` as the file `metadata.json` in it."""
    with quiet(), torch.no_grad():
        plain = take_apart(program)
        torch.export.save(plain, path, extra_files={METADATA_FILE: json.dumps(dict(about))})


def take_apart(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program in ATen's operators alone, with our scan in chunks."""
    table: dict[Any, Any] = torch.export.default_decompositions()
    table[torch.ops.trust_tta.scan_linear.default] = scan_in_chunks
    plain: torch.export.ExportedProgram = program.run_decompositions(table)
    return plain


def open_program(path: Path) -> Callable[[Tensor], Tensor]:
    with quiet():
        module = torch.export.load(path).module()
    return lambda images: module(images)


def write_compiled(program: torch.export.ExportedProgram, path: Path, about: Mapping[str, str]) -> None:
    """A library for this type of processor, compiled by AOTInductor; needs a C++ compiler."""
    with quiet(), torch.no_grad():
        plain = take_apart(program)
        torch._inductor.aoti_compile_and_package(
            plain, package_path=str(path), inductor_configs={"aot_inductor.metadata": dict(about)}
        )


def open_compiled(path: Path) -> Callable[[Tensor], Tensor]:
    runner = torch._inductor.aoti_load_package(str(path))
    return lambda images: runner(images)


def write_checkpoint(network: nn.Module, path: Path, about: Mapping[str, str]) -> None:
    """The weights alone, as safetensors that `create_model` and every command take as a checkpoint."""
    path.write_bytes(encode_weights(network.state_dict(), about))
