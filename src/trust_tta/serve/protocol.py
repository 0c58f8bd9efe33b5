"""The Open Inference Protocol, version 2, over REST: requests and responses as bytes, JSON and binary tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from trust_tta.config_io import parse_json
from trust_tta.serve.settings import DEFAULT_STREAM, BadRequestError, RequestError, Settings, check_stream_name

if TYPE_CHECKING:
    from torch import Tensor

INPUT = "images"
OUTPUTS = ("logits", "probabilities")
VERSION = "1"
EXTENSIONS = ("binary_tensor_data",)
LENGTH_HEADER = "inference-header-content-length"

T = TypeVar("T")

_KINDS = {bool: "true or false", str: f"a name such as '{DEFAULT_STREAM}'", dict: "a JSON object"}
_TYPES: dict[str, np.dtype[Any]] = {"FP32": np.dtype("<f4"), "UINT8": np.dtype("u1")}


@dataclass(frozen=True)
class Output:
    """A requested output, as JSON or as bytes after it."""

    name: str
    binary: bool


@dataclass(frozen=True, eq=False)
class InferRequest:
    """One request. `images`: float32 (n, 3, size, size), or uint8 (n, h, w, 3)."""

    id: str | None
    images: NDArray[Any]
    outputs: tuple[Output, ...]
    stream: str | None
    adapt: bool


def model_metadata(name: str, *, size: int, output: tuple[int, ...]) -> dict[str, Any]:
    """The answer to `GET /v2/models/NAME`. `output`: the shape of the logits without the batch."""
    shape = [-1, *output]
    return {
        "name": name,
        "versions": [VERSION],
        "platform": "pytorch_trust_tta",
        "inputs": [{"name": INPUT, "datatype": "FP32", "shape": [-1, 3, size, size]}],
        "outputs": [{"name": output_name, "datatype": "FP32", "shape": shape} for output_name in OUTPUTS],
    }


def read_request(body: bytes, header_length: str | None, *, size: int, settings: Settings) -> InferRequest:
    """Parse a body: JSON, or JSON of a stated length followed by the tensors."""
    text, tail = _split(body, header_length)
    try:
        content = parse_json(text.decode("utf-8"), where="the request", error=BadRequestError)
    except UnicodeDecodeError:
        raise BadRequestError("the request is not UTF-8 JSON") from None
    if not isinstance(content, dict):
        raise BadRequestError("the request is not a JSON object; give one with 'inputs'")
    parameters = _get(content, "parameters", dict, {})
    stream = _get(parameters, "stream", str, "")
    images, rest = _read_input(content.get("inputs"), tail, size=size, settings=settings)
    if len(rest):
        raise BadRequestError(f"{len(rest)} bytes are left after the tensors; state binary_data_size for each")
    request_id = content.get("id")
    if request_id is not None and not (isinstance(request_id, str) and len(request_id) <= 256):
        raise BadRequestError("the id is not a string of at most 256 characters")
    return InferRequest(
        id=request_id,
        images=images,
        outputs=_read_outputs(content.get("outputs"), binary=_get(parameters, "binary_data_output", bool, False)),
        stream=check_stream_name(stream) if stream else None,
        adapt=_get(parameters, "adapt", bool, True),
    )


def write_response(
    request: InferRequest, values: Mapping[str, Tensor], *, model: str, parameters: Mapping[str, Any]
) -> tuple[bytes, int | None]:
    """The body of an answer, and the length of its JSON part where tensors follow as bytes. `values`: on the CPU."""
    described, tensors = [], []
    for output in request.outputs:
        tensor = values[output.name].contiguous()
        entry: dict[str, Any] = {"name": output.name, "datatype": "FP32", "shape": list(tensor.shape)}
        if output.binary:
            entry["parameters"] = {"binary_data_size": tensor.nbytes}
            tensors.append(tensor.numpy().tobytes())
        else:
            entry["data"] = tensor.flatten().tolist()
        described.append(entry)
    content: dict[str, Any] = {"model_name": model, "model_version": VERSION}
    content |= {"id": request.id} if request.id is not None else {}
    content |= {"parameters": dict(parameters), "outputs": described}
    text = json.dumps(content).encode()
    return b"".join([text, *tensors]), len(text) if tensors else None


def _split(body: bytes, header_length: str | None) -> tuple[bytes, memoryview]:
    view = memoryview(body)
    if header_length is None:
        return body, view[:0]
    if not (header_length.isascii() and header_length.isdigit() and len(header_length) < 12):
        raise BadRequestError(f"Inference-Header-Content-Length is {header_length[:40]!r}; give a number of bytes")
    length = int(header_length)
    if length > len(body):
        raise BadRequestError(f"Inference-Header-Content-Length is {length}, and the body has {len(body)} bytes")
    return bytes(view[:length]), view[length:]


def _read_input(inputs: Any, tail: memoryview, *, size: int, settings: Settings) -> tuple[NDArray[Any], memoryview]:
    if not (isinstance(inputs, list) and len(inputs) == 1 and isinstance(inputs[0], dict)):
        raise BadRequestError(f"'inputs' must be a list of one tensor, named '{INPUT}'")
    tensor = inputs[0]
    if tensor.get("name") != INPUT:
        raise BadRequestError(f"the input {_shown(tensor.get('name'))} is unknown; its name is '{INPUT}'")
    kind = tensor.get("datatype")
    if not isinstance(kind, str) or kind not in _TYPES:
        raise BadRequestError(f"the datatype of '{INPUT}' is {_shown(kind)}; give FP32 (NCHW) or UINT8 (NHWC)")
    shape = _shape(tensor.get("shape"), kind, size=size, settings=settings)
    count = math.prod(shape)
    if count * _TYPES[kind].itemsize > settings.max_bytes:
        raise RequestError(413, f"'{INPUT}' has {count} values; at most {settings.max_bytes} bytes are accepted")
    given = _get(tensor, "parameters", dict, {}, where=f"'{INPUT}'").get("binary_data_size")
    if given is None:
        return _from_json(tensor.get("data"), kind, shape), tail
    if "data" in tensor:
        raise BadRequestError(f"'{INPUT}' has both data and binary_data_size; give one of them")
    wanted = count * _TYPES[kind].itemsize
    if type(given) is not int or given != wanted or given > len(tail):
        raise BadRequestError(
            f"'{INPUT}' of shape {shape} has {wanted} bytes; {_shown(given)} are stated, and {len(tail)} were sent"
        )
    return np.frombuffer(tail[:given], dtype=_TYPES[kind]).reshape(shape), tail[given:]


def _shape(given: Any, kind: str, *, size: int, settings: Settings) -> list[int]:
    wanted = f"[n, 3, {size}, {size}]" if kind == "FP32" else "[n, height, width, 3]"
    if not (isinstance(given, list) and len(given) == 4 and all(type(n) is int and 0 < n < 2**31 for n in given)):
        raise BadRequestError(f"the shape of '{INPUT}' is {_shown(given)}; give {wanted}")
    fits = given[1:] == [3, size, size] if kind == "FP32" else given[3] == 3
    if not fits:
        raise BadRequestError(f"the shape of '{INPUT}' is {given}; give {wanted} for {kind}")
    if given[0] > settings.max_images:
        raise RequestError(413, f"the request has {given[0]} images; send at most {settings.max_images} at once")
    return given


def _from_json(data: Any, kind: str, shape: list[int]) -> NDArray[Any]:
    """An array from a flat or nested list of numbers. Types are checked before NumPy, which takes strings too."""
    if not isinstance(data, list):
        raise BadRequestError(f"'{INPUT}' has no data; give a list of numbers, or binary_data_size and bytes")
    values = _flatten(data, shape) if data and isinstance(data[0], list) else data
    if len(values) != math.prod(shape) or not {type(value) for value in values} <= {int, float}:
        raise BadRequestError(f"the data of '{INPUT}' must be {math.prod(shape)} numbers, nested as {shape} or flat")
    if kind == "UINT8" and not all(type(value) is int and 0 <= value <= 255 for value in values):
        raise BadRequestError(f"the data of '{INPUT}' must be integers from 0 to 255, as UINT8 requires")
    try:
        with np.errstate(over="ignore"):  # values that are too large become infinite, and are refused as such
            return (
                np.array(values, dtype=np.float64 if kind == "FP32" else np.uint8).astype(_TYPES[kind]).reshape(shape)
            )
    except OverflowError:  # an integer beyond float64
        raise BadRequestError(f"the data of '{INPUT}' are beyond the range of FP32") from None


def _flatten(nested: list[Any], shape: list[int]) -> list[Any]:
    """The values of lists that are nested as `shape`; empty where they are not."""
    rows = [nested]
    for length in shape[:-1]:
        if not all(type(row) is list and len(row) == length for row in rows):
            return []
        rows = list(chain.from_iterable(rows))
    if not all(type(row) is list and len(row) == shape[-1] for row in rows):
        return []
    return list(chain.from_iterable(rows))


def _read_outputs(given: Any, *, binary: bool) -> tuple[Output, ...]:
    if given is None or given == []:
        return tuple(Output(name, binary) for name in OUTPUTS)
    if not isinstance(given, list) or len(given) > len(OUTPUTS) or not all(isinstance(o, dict) for o in given):
        raise BadRequestError(f"'outputs' must be a list of {' and '.join(OUTPUTS)}, or be omitted")
    chosen = []
    for output in given:
        name = output.get("name")
        if name not in OUTPUTS:
            raise BadRequestError(f"the output {_shown(name)} is unknown; ask for {' or '.join(OUTPUTS)}")
        parameters = _get(output, "parameters", dict, {}, where=f"the output '{name}'")
        chosen.append(Output(name, _get(parameters, "binary_data", bool, binary)))
    return tuple(chosen)


def _get(table: Mapping[str, Any], key: str, kind: type[T], default: T, *, where: str = "the request") -> T:
    """The value of a key; missing or null: the default."""
    value = table.get(key)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise BadRequestError(f"'{key}' of {where} is {_shown(value)}; give {_KINDS[kind]}")
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
