"""Reading weights files without running code, renaming parameters, and strict loading."""

from __future__ import annotations

import _compat_pickle
import hashlib
import json
import pickle
import re
import sys
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from trust_tta.errors import CheckpointError

MAX_FILE_BYTES = 8 << 30  # bytes
HEADS = (  # prefixes of the parameters that depend on the classes
    "classifier.head.", "head.", "dist_head.", "decode_head.conv_seg.", "auxiliary_head.conv_seg.",
)  # fmt: skip
AUXILIARY = "auxiliary_head."  # for training: files may come without it
NOT_FINITE = "with values that are not finite"

# Names in older upstream files and in TRUST's files, and today's.
_RENAMES = (
    (re.compile(r"^module\."), ""),
    (re.compile(r"\.ln_1\."), ".norm."),
    (re.compile(r"\.self_attention\."), ".op."),
    (re.compile(r"^(backbone\.)?patch_embed\.proj\."), r"\1patch_embed.0."),
    (re.compile(r"^(backbone\.)?patch_embed\.norm\."), r"\1patch_embed.2."),
    (re.compile(r"^norm\."), "classifier.norm."),
    (re.compile(r"^head\."), "classifier.head."),
    (re.compile(r"^classifier\.head_\."), "classifier.head."),
)
_LINEAR = re.compile(r"\.(in_proj|out_proj|fc1|fc2|reduction)\.weight$")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Standard-library objects that training scripts store beside the weights; stand-ins replace them.
_HARMLESS = ("argparse.Namespace", "builtins.getattr", "collections.defaultdict", "collections.deque")
_HARMLESS_MODULES = ("pathlib", "datetime", "enum")
_HARMLESS_TYPES = ["bool", "bytes", "dict", "float", "frozenset", "int", "list", "object", "slice", "str", "tuple"]


@dataclass(frozen=True, eq=False)
class WeightsFile:
    """Content of a weights file: the parameters under the file's names, its metadata and its sha256."""

    state: dict[str, Tensor]
    metadata: dict[str, str]
    sha256: str


def read_weights(path: Path, *, ema: bool = False) -> WeightsFile:
    """Open `path` once and read everything; no code of the file is run.

    `ema` takes the moving average of the weights where a file holds both.
    """
    if not path.is_file():
        raise CheckpointError(f"no checkpoint at '{path}'; give the path of a .pth or .safetensors file")
    try:
        with path.open("rb") as file:
            if (size := path.stat().st_size) > MAX_FILE_BYTES:
                raise CheckpointError(f"'{path}' has {size} bytes; files up to {MAX_FILE_BYTES} bytes are read")
            if path.suffix == ".safetensors":
                from safetensors.torch import load

                data = file.read()
                content: Any = load(data)
                header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
                metadata, digest = dict(header.get("__metadata__") or {}), hashlib.sha256(data).hexdigest()
            else:
                metadata, digest = {}, hashlib.file_digest(file, "sha256").hexdigest()
                content = _read_pickle(file, size)
    except CheckpointError:
        raise
    except Exception as error:  # the readers raise many types; each means the same to a user
        raise CheckpointError(f"'{path}' cannot be read as a checkpoint: {_explain(error)}") from error
    return WeightsFile(pick_state(content, origin=f"'{path}'", ema=ema), metadata, digest)


def encode_weights(state: Mapping[str, Tensor], about: Mapping[str, str]) -> bytes:
    """A safetensors file of the tensors as they are now, with `about` as its metadata."""
    from safetensors.torch import save

    content = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in state.items()}
    return save(content, {"format": "pt", **about})


def _read_pickle(file: BinaryIO, size: int) -> Any:
    file.seek(0)
    foreign: set[str] = set()
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
        if any(e.compress_type != zipfile.ZIP_STORED for e in entries) or sum(e.file_size for e in entries) > size:
            raise ValueError("its content is compressed, which PyTorch never does")
        file.seek(0)
        foreign = set(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    file.seek(0)
    stand_ins = [_stand_in(name) for name in foreign | {"yacs.config.CfgNode"}]
    with torch.serialization.safe_globals(stand_ins), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pickle protocols and deprecated storages: nothing to be done
        return torch.load(file, map_location="cpu", weights_only=True)


class StandIn:
    """Empty placeholder for an object of another package, whose code is not run."""

    origin = ""

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


class _EmptyMapping:
    """Placeholder for classes that are filled like a dict."""

    def __new__(cls, *arguments: Any) -> OrderedDict[Any, Any]:  # type: ignore[misc]
        return OrderedDict()


def _stand_in(name: str) -> Any:
    """Placeholder for the pickled object `name`; objects that no checkpoint needs are refused."""
    module, _, rest = name.partition(".")
    standard = module in sys.stdlib_module_names or name.rpartition(".")[0] in _compat_pickle.IMPORT_MAPPING
    harmless = name in _HARMLESS or module in _HARMLESS_MODULES or (module == "builtins" and rest in _HARMLESS_TYPES)
    if standard and not harmless:
        raise pickle.UnpicklingError(f"GLOBAL {name}")
    kind = _EmptyMapping if name.endswith(("CfgNode", "Dict", "dict", "DictConfig")) else StandIn
    return type(kind.__name__, (kind,), {"origin": name}), name


def _explain(error: BaseException) -> str:
    code = re.search(r"GLOBAL (\S+)", str(error))
    if code:
        return (
            f"it asks for the Python object '{_printable(code[1])}', and loading a file never executes code; "
            "save model.state_dict() alone"
        )
    # PyTorch's own message for a broken pickle advises to switch the safety off
    lines = "" if isinstance(error, pickle.UnpicklingError) else str(error).strip()
    reason = _printable(lines.splitlines()[0]) if lines else type(error).__name__
    return f"it is damaged or in another format ({reason}); is the download complete?"


def pick_state(content: object, *, origin: str, ema: bool = False) -> dict[str, Tensor]:
    """State dict of a file's content, plain or under a known key."""
    if isinstance(content, StandIn):
        raise CheckpointError(
            f"{origin} holds a pickled '{_printable(content.origin)}', and loading a file never executes code; "
            "save model.state_dict() alone"
        )
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{origin} holds a {type(content).__name__}, not a state dict; save model.state_dict()")
    wanted = ("model_ema", "model", "state_dict") if ema else ("model", "state_dict", "model_ema")
    for key in wanted:
        if isinstance(content.get(key), Mapping):
            content = content[key]
            break
    state = {str(k): v for k, v in content.items() if isinstance(v, Tensor)}  # type: ignore[attr-defined]
    if not state:
        raise CheckpointError(f"{origin} holds no parameters; expected a state dict, plain or under 'model'")
    return state


def rename(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our names for every known spelling; linear weights as (out, in) whether stored 2-D or as 1x1 convolutions."""
    renamed = {}
    for name, tensor in strip_prefixes(state).items():
        for pattern, replacement in _RENAMES:
            name = pattern.sub(replacement, name)
        if _LINEAR.search(name) and tensor.dim() == 4 and tensor.shape[2:] == (1, 1) and _plain(tensor):
            tensor = tensor[:, :, 0, 0]
        if name in renamed:
            raise CheckpointError(
                f"the checkpoint holds '{_printable(name)}' twice, under two spellings; remove one of them"
            )
        renamed[name] = tensor
    return renamed


def strip_prefixes(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names without the "module." of data-parallel training and the "model." of transformers' files."""
    names = dict(zip(state, state, strict=True))
    for prefix in ("module.", "module.", "model."):  # some files have the first one twice
        if names and all(name.startswith(prefix) for name in names.values()):
            names = {key: name.removeprefix(prefix) for key, name in names.items()}
    return {names[key]: tensor for key, tensor in state.items()}


def load_state(model: nn.Module, state: Mapping[str, Tensor], *, origin: str, head: bool = True) -> None:
    """Load `state`, under the model's names, strictly; nothing is changed when anything does not fit.

    `head=False` keeps the classifier of the model; a file without an auxiliary head keeps the auxiliary head.
    """
    own = model.state_dict()
    state = dict(state)
    if not any(name.startswith(AUXILIARY) for name in state):
        state |= {name: value for name, value in own.items() if name.startswith(AUXILIARY)}
    for name in own:  # counters that older files lack and nothing here reads
        if name.endswith("num_batches_tracked"):
            state.setdefault(name, own[name])
    if not head:
        state = {k: v for k, v in state.items() if not k.startswith(HEADS)}
        state |= {k: v for k, v in own.items() if k.startswith(HEADS)}
    missing, unexpected = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    if missing and all("running_" in name for name in missing):
        raise CheckpointError(
            f"{origin} was trained with LayerNorm (it has no running statistics) but this network has BatchNorm; "
            "build the variant without '_bn' (norm='layer')"
        )
    if unexpected and all("running_" in n or n.endswith("num_batches_tracked") for n in unexpected):
        raise CheckpointError(
            f"{origin} was trained with BatchNorm (it has running statistics) but this network has LayerNorm; "
            "build the '_bn' variant (norm='batch')"
        )
    problems = {"missing from the file": missing, "unknown to the network": unexpected}
    for name in sorted(own.keys() & state.keys()):
        if misfit := _misfit(own[name], state[name]):
            problems.setdefault(misfit[0], []).append(f"{name} {misfit[1]}".strip())
    lines = [
        f"{len(names)} {what}: {', '.join(map(_printable, names[:4]))}{', ...' if len(names) > 4 else ''}"
        for what, names in problems.items()
        if names
    ]
    if lines:
        raise CheckpointError(f"{origin} does not fit the network: " + "; ".join(lines))
    model.load_state_dict(state)


def state_digest(state: Mapping[str, Tensor]) -> str:
    """sha256 of the names, shapes, dtypes and bytes of a state dict."""
    digest = hashlib.sha256()
    for name in sorted(state):
        value = state[name].detach().cpu().contiguous()
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _misfit(own: Tensor, given: Tensor) -> tuple[str, str] | None:
    """Reason why a tensor cannot be loaded, and details; cheap checks first."""
    if not _plain(given):
        kind = "without data" if given.is_meta else f"of layout {str(given.layout).removeprefix('torch.')}"
        return "not a plain tensor", f"({kind})"
    if own.shape != given.shape:
        return "of another shape", f"{tuple(given.shape)} in the file, {tuple(own.shape)} in the network"
    dtype = f"({str(given.dtype).removeprefix('torch.')})"
    if not own.is_floating_point():
        other = given.is_floating_point() or given.is_complex() or given.is_quantized
        return ("of another dtype", dtype) if other else None
    if given.dtype not in _FLOATS:
        return ("of a dtype that no network has", dtype) if given.is_floating_point() else ("of whole numbers", "")
    if own.is_meta or bool(given.to(own.dtype).isfinite().all()):
        return None
    finite = bool(given.isfinite().all())
    return f"with values beyond {str(own.dtype).removeprefix('torch.')}" if finite else NOT_FINITE, ""


def _plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized and not tensor.is_nested


def _printable(text: str) -> str:
    """A name from a file for messages, with control characters and broken Unicode escaped."""
    shown = repr(text)[1:-1]
    return shown if len(shown) <= 120 else shown[:117] + "..."
