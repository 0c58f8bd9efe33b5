"""The Open Inference Protocol, version 2, over REST: requests and responses as bytes, JSON and binary tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trust_tta.config_io import parse_json
from trust_tta.schema import show
from trust_tta.serve.settings import BadRequestError, RequestError, Settings, check_stream_name

if TYPE_CHECKING:
    from torch import Tensor

    from trust_tta.serve.engine import RequestPrediction

INPUT = "images"
OUTPUTS = ("logits", "probabilities")
VERSION = "1"
EXTENSIONS = ("binary_tensor_data",)
LENGTH_HEADER = "inference-header-content-length"

_TYPES: dict[str, np.dtype[Any]] = {"FP32": np.dtype("<f4"), "UINT8": np.dtype("u1")}


class _Part(BaseModel):
    """A JSON object of a request. Unknown keys are ignored; null means the default, as some clients send it."""

    model_config = ConfigDict(strict=True)


class _Parameters(_Part):
    stream: str | None = None
    adapt: bool | None = None  # default: true
    binary_data_output: bool | None = None  # of all outputs; default: false


class _TensorParameters(_Part):
    binary_data_size: int | None = None  # of an input
    binary_data: bool | None = None  # of an output


class _Input(_Part):
    name: Literal["images"]
    datatype: Literal["FP32", "UINT8"]
    shape: Annotated[list[Annotated[int, Field(gt=0, lt=2**31)]], Field(min_length=4, max_length=4)]
    data: list[Any] | None = None
    parameters: _TensorParameters | None = None


class _Output(_Part):
    name: Literal["logits", "probabilities"]
    parameters: _TensorParameters | None = None


class _Request(_Part):
    id: Annotated[str, Field(max_length=256)] | None = None
    inputs: Annotated[list[_Input], Field(min_length=1, max_length=1)]
    outputs: Annotated[list[_Output], Field(max_length=len(OUTPUTS))] | None = None
    parameters: _Parameters | None = None


@dataclass(frozen=True, eq=False)
class InferRequest:
    """One request. `images`: float32 (n, 3, size, size), or uint8 (n, h, w, 3). `outputs`: whether each is binary."""

    id: str | None
    images: NDArray[Any]
    outputs: Mapping[str, bool]
    stream: str | None
    adapt: bool


def model_metadata(name: str, size: int, output: tuple[int, ...]) -> dict[str, Any]:
    """The answer to `GET /v2/models/NAME`. `output`: the shape of the logits without the batch."""
    return {
        "name": name,
        "versions": [VERSION],
        "platform": "pytorch_trust_tta",
        "inputs": [{"name": INPUT, "datatype": "FP32", "shape": [-1, 3, size, size]}],
        "outputs": [{"name": output_name, "datatype": "FP32", "shape": [-1, *output]} for output_name in OUTPUTS],
    }


def read_request(body: bytes | bytearray, header_length: str | None, *, size: int, settings: Settings) -> InferRequest:
    """Parse a body: JSON, or JSON of a stated length followed by the tensor."""
    text, tail = body, memoryview(b"")
    if header_length is not None:
        if not (header_length.isascii() and header_length.isdigit() and len(header_length) < 12):
            raise BadRequestError(f"Inference-Header-Content-Length is {header_length[:40]!r}; give a number of bytes")
        length = int(header_length)
        if length > len(body):
            raise BadRequestError(f"Inference-Header-Content-Length is {length}, and the body has {len(body)} bytes")
        text, tail = bytes(memoryview(body)[:length]), memoryview(body)[length:]
    try:
        request = _Request.model_validate(parse_json(text, where="the request", error=BadRequestError))
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        place = ".".join(map(str, wrong["loc"])) or "the request"
        raise BadRequestError(f"{place} is {show(wrong['input'])}: {wrong['msg']}") from None
    parameters = request.parameters or _Parameters()
    outputs = dict.fromkeys(OUTPUTS if not request.outputs else (), bool(parameters.binary_data_output))
    for output in request.outputs or []:
        own = output.parameters.binary_data if output.parameters else None
        outputs[output.name] = bool(parameters.binary_data_output if own is None else own)
    return InferRequest(
        id=request.id,
        images=_read_images(request.inputs[0], tail, size=size, settings=settings),
        outputs=outputs,
        stream=check_stream_name(parameters.stream) if parameters.stream else None,
        adapt=parameters.adapt is not False,
    )


def write_response(
    request: InferRequest, prediction: RequestPrediction, *, model: str, parameters: Mapping[str, Any]
) -> tuple[bytes, int | None]:
    """The body of an answer, and the length of its JSON part where tensors follow as bytes."""
    described, tensors = [], []
    for name, binary in request.outputs.items():
        tensor: Tensor = getattr(prediction, name).contiguous()
        entry: dict[str, Any] = {"name": name, "datatype": "FP32", "shape": list(tensor.shape)}
        if binary:
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


def _read_images(given: _Input, tail: memoryview, *, size: int, settings: Settings) -> NDArray[Any]:
    kind, shape = given.datatype, given.shape
    wanted = f"[n, 3, {size}, {size}]" if kind == "FP32" else "[n, height, width, 3]"
    if shape[1:] != [3, size, size] if kind == "FP32" else shape[3] != 3:
        raise BadRequestError(f"the shape of '{INPUT}' is {shape}; give {wanted} for {kind}")
    if shape[0] > settings.max_images:
        raise RequestError(413, f"the request has {shape[0]} images; send at most {settings.max_images} at once")
    size_in_bytes = math.prod(shape) * _TYPES[kind].itemsize
    if size_in_bytes > settings.max_bytes:
        raise RequestError(413, f"'{INPUT}' has {size_in_bytes} bytes; at most {settings.max_bytes} are accepted")
    stated = given.parameters.binary_data_size if given.parameters else None
    if stated is not None and given.data is not None:
        raise BadRequestError(f"'{INPUT}' has both data and binary_data_size; give one of them")
    if (stated or 0) != len(tail) or stated not in (None, size_in_bytes):
        raise BadRequestError(
            f"'{INPUT}' of shape {shape} has {size_in_bytes} bytes; {stated} are stated, and {len(tail)} were sent"
        )
    if stated is None:
        return _from_json(given.data, kind, shape)
    return np.frombuffer(tail, dtype=_TYPES[kind]).reshape(shape)


def _from_json(data: list[Any] | None, kind: str, shape: list[int]) -> NDArray[Any]:
    """An array from a flat or nested list of numbers. Types are checked before NumPy, which takes strings too."""
    if data is None:
        raise BadRequestError(f"'{INPUT}' has no data; give a list of numbers, or binary_data_size and bytes")
    try:
        for length in shape[1:] if data and isinstance(data[0], list) else []:
            if any(type(row) is not list or len(row) != length for row in data):
                raise TypeError
            data = list(chain.from_iterable(data))
        if len(data) != math.prod(shape) or not {type(value) for value in data} <= {int, float}:
            raise TypeError
        numbers = np.array(data, dtype=np.float64).reshape(shape)
    except (TypeError, OverflowError):  # an integer may be beyond float64
        raise BadRequestError(f"'{INPUT}' must be {math.prod(shape)} numbers, nested as {shape} or flat") from None
    if kind == "UINT8" and not np.isin(numbers, np.arange(256)).all():
        raise BadRequestError(f"the data of '{INPUT}' must be integers from 0 to 255, as UINT8 requires")
    with np.errstate(over="ignore"):  # values that are too large become infinite, and are refused as such
        return numbers.astype(_TYPES[kind])
