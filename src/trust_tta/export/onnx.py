"""ONNX export with PyTorch's exporter, and custom translations of the scan and of softplus.

The recurrence is one `Scan`; unrolled in chunks, it would have twice as many nodes and be slower.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from trust_tta.errors import TrustError
from trust_tta.export.network import quiet
from trust_tta.optional import require

OPSET = 20
FOLDED = 1 << 26  # elements of a constant that may be folded while exporting


def write_onnx(program: torch.export.ExportedProgram, path: Path, about: Mapping[str, str]) -> None:
    """Write one file with all weights, `about` as metadata, the input `images` and the output `logits`."""
    onnx, optimizer = require("onnx", extra="export"), require("onnxscript.optimizer", extra="export")
    from trust_tta.export import onnx_operators

    translations: dict[Callable[..., Any], Callable[..., Any]] = {
        torch.ops.trust_tta.scan_linear.default: onnx_operators.scan_linear,
        torch.ops.aten.softplus.default: onnx_operators.softplus,
    }
    with quiet(), torch.no_grad():
        exported = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=OPSET,
            input_names=["images"],
            output_names=["logits"],
            custom_translation_table=translations,
            optimize=False,
            verbose=False,
        )
        if exported is None:
            raise TrustError("PyTorch's exporter returned nothing; please report it")
        optimizer.optimize_ir(exported.model, input_size_limit=FOLDED, output_size_limit=FOLDED)
        model = exported.model_proto
    for part in (model.graph, *_nodes(model.graph)):
        part.ClearField("metadata_props")  # stack traces with paths of this machine
    del model.graph.value_info[:]  # shapes from before constants were folded
    sides = (side.dim_param for side in model.graph.input[0].type.tensor_type.shape.dim if side.dim_param)
    names = dict(zip(sides, "nhw", strict=False))  # of the free dimensions, which the logits may have, too
    for value in (*model.graph.input, *model.graph.output):
        for side in value.type.tensor_type.shape.dim:
            if side.dim_param:
                side.dim_param = names.get(side.dim_param, side.dim_param)
    model.producer_name, model.producer_version = "trust-tta", about.get("trust_tta", "")
    del model.metadata_props[:]
    onnx.helper.set_model_props(model, dict(about))
    onnx.save(model, path)


def quantize(path: Path) -> None:
    """Turn the weights of the linear layers into int8; their inputs are quantized dynamically.

    The scan's own projections, one matrix per direction, stay: onnxruntime cannot quantize these per channel.
    """
    onnx = require("onnx", extra="export")
    from onnxruntime.quantization import QuantType, quantize_dynamic

    graph, small = onnx.load(path).graph, path.with_name(f"int8_{path.name}")
    matrices = {tensor.name for tensor in graph.initializer if len(tensor.dims) == 2}
    nodes = [node.name for node in graph.node if node.op_type in ("MatMul", "Gemm") and node.input[1] in matrices]
    with quiet():
        quantize_dynamic(path, small, nodes_to_quantize=nodes, weight_type=QuantType.QInt8, per_channel=True)
    small.replace(path)


def describe(path: Path) -> dict[str, Any]:
    """The opset, the number of nodes (of all graphs), the operators and the bytes of a file."""
    onnx = require("onnx", extra="export")
    model = onnx.load(path, load_external_data=False)
    operators = Counter(node.op_type for node in _nodes(model.graph))
    opset = next(imported.version for imported in model.opset_import if imported.domain in ("", "ai.onnx"))
    return {"opset": opset, "nodes": operators.total(), "operators": dict(operators), "bytes": path.stat().st_size}


def _nodes(graph: Any) -> Iterator[Any]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _nodes(attribute.g)
