"""Export a network to a file and compare the file with the network."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from trust_tta.atomic import replacing
from trust_tta.errors import ConfigError
from trust_tta.export import check, onnx
from trust_tta.export.network import InputSpec, PixelInputNetwork, Pixels, quiet, require_any_size, trace
from trust_tta.export.source import ExportSource, Origin, load_source
from trust_tta.models.checkpoint import Checkpoint
from trust_tta.models.weights import encode_weights
from trust_tta.ops.portable import scan_in_chunks
from trust_tta.optional import require
from trust_tta.preprocessing import Preprocessing
from trust_tta.progress import SILENT, Progress
from trust_tta.schema import did_you_mean, show

Size: TypeAlias = int | Literal["any"] | None

FORMATS = {"onnx": ".onnx", "pt2": ".pt2", "aoti": ".aoti.pt2", "safetensors": ".safetensors"}


@dataclass(frozen=True)
class Exported:
    """An exported file and its agreement with the network.

    `details`: bytes, and for an ONNX file its opset, nodes and operators.
    """

    path: Path
    to: str
    about: dict[str, str]
    agreement: check.Agreement
    details: dict[str, Any]


def export_network(
    origin: Origin | None,
    to: str = "onnx",
    out: str | PathLike[str] | None = None,
    *,
    checkpoint: str | PathLike[str] | None = None,
    variant: str | None = None,
    preprocessing: Preprocessing | None = None,
    classes: tuple[str, ...] | None = None,
    size: Size = None,
    pixels: Pixels = "float",
    int8: bool = False,
    images: str | PathLike[str] | None = None,
    progress: Progress = SILENT,
) -> Exported:
    """Write a network to a file that runs without this package, after comparing it with PyTorch.

    `origin`, `checkpoint`, `variant`, `preprocessing`, `classes`: see `source.load_source`.
    `out`: the file; by default named after the network.
    `size`: of the images; by default that of training; "any", for ONNX, accepts any height and width.
    `pixels`: the input of the file, "float" (n, 3, h, w) from 0 to 1, or "uint8" (n, h, w, 3).
    `int8`: quantize the weights of an ONNX file's linear layers: less than half the size, with small differences.
    `images`: a folder of real images for the comparison; by default some that ship with the package.
    """
    _check_options(to, size, pixels, int8)
    source = load_source(origin, checkpoint=checkpoint, variant=variant, preprocessing=preprocessing, classes=classes)
    path = Path(out).expanduser() if out is not None else Path(source.name + FORMATS[to])
    if size == "any":
        require_any_size(source.network)
    elif size is not None:
        source = source.resized(size)
    compared = check.comparison_images(Path(images) if images is not None else None, source.preprocessing)
    spec = InputSpec(pixels, None if size == "any" else source.preprocessing.size)
    about = {**source.about, "weights": "int8" if int8 else "float32"}
    if to != "safetensors":
        about |= {"input": json.dumps(spec.as_dict()), "output": json.dumps({"name": "logits", "dtype": "float32"})}
    progress.start(3, f"export to {to}")
    with tempfile.TemporaryDirectory(prefix="trust-tta-") as folder:
        file = Path(folder, f"network{FORMATS[to]}")
        run = _write(source, to, file, spec, about, int8=int8)
        progress.advance()
        ours = PixelInputNetwork(source.network, source.preprocessing, pixels, backend="auto")
        agreement = check.compare(run, ours, check.batches(compared, spec))
        agreement.require(path, tolerance=check.INT8_TOLERANCE if int8 else check.TOLERANCE)
        progress.advance()
        with replacing(path) as temporary:
            shutil.copyfile(file, temporary)
        details = onnx.describe(file) if to == "onnx" else {"bytes": file.stat().st_size}
    progress.advance()
    progress.finish()
    return Exported(path, to, about, agreement, details)


def _check_options(to: str, size: Size, pixels: Pixels, int8: bool) -> None:
    if to not in FORMATS:
        raise ConfigError(f"unknown format {show(to)}; {did_you_mean(to, FORMATS)}")
    if pixels not in ("float", "uint8"):
        raise ConfigError(f"pixels is {show(pixels)}; give 'float' or 'uint8'")
    if int8 and to != "onnx":
        raise ConfigError(f"int8 is for the format 'onnx', and '{to}' is asked for; omit it")
    if size not in (None, "any") and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ConfigError(f"size is {show(size)}; give a number of pixels >= 1, 'any', or omit it")
    if size == "any" and to != "onnx":
        raise ConfigError(f"size 'any' is for the format 'onnx', and '{to}' is asked for; omit it, or give a number")
    for package in ("onnx", "onnxruntime", "onnxscript") if to == "onnx" else ():
        require(package, extra="export")


def _write(
    source: ExportSource, to: str, file: Path, spec: InputSpec, about: dict[str, str], *, int8: bool
) -> check.Run:
    """Write the network, and open the file to run it."""
    if to == "safetensors":
        file.write_bytes(encode_weights(source.network.state_dict(), about))
        written = Checkpoint.open(file)
        return PixelInputNetwork(written.load(), written.preprocessing, spec.pixels, backend="auto")
    program = trace(PixelInputNetwork(source.network, source.preprocessing, spec.pixels, backend="portable"), spec)
    if to == "onnx":
        onnx.write_onnx(program, file, about)
        if int8:
            onnx.quantize(file)
        return check.open_onnx(file)
    with quiet(), torch.no_grad():
        table: dict[Any, Any] = torch.export.default_decompositions()
        table[torch.ops.trust_tta.scan_linear.default] = scan_in_chunks
        program = program.run_decompositions(table)  # ATen's operators alone
        if to == "pt2":
            torch.export.save(program, file, extra_files={"metadata.json": json.dumps(about)})
            run: check.Run = torch.export.load(file).module()
            return run
        # a library for this type of processor; needs a C++ compiler
        configs = {"aot_inductor.metadata": about}
        torch._inductor.aoti_compile_and_package(program, package_path=str(file), inductor_configs=configs)
        return torch._inductor.aoti_load_package(str(file))
