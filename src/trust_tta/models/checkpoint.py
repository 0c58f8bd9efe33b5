"""Read a checkpoint safely, give its parameters our names, and load it strictly."""

from __future__ import annotations

import hashlib
import json
import pickle
import re
from collections import OrderedDict
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from trust_tta.errors import CheckpointError

Source: TypeAlias = str | PathLike[str] | Mapping[str, Any]

# Spellings of older upstream files and of TRUST's files, and what they are called now.
_RENAMES = (
    (re.compile(r"^module\."), ""),
    (re.compile(r"\.ln_1\."), ".norm."),
    (re.compile(r"\.self_attention\."), ".op."),
    (re.compile(r"^patch_embed\.proj\."), "patch_embed.0."),
    (re.compile(r"^patch_embed\.norm\."), "patch_embed.2."),
    (re.compile(r"^norm\."), "classifier.norm."),
    (re.compile(r"^head\."), "classifier.head."),
    (re.compile(r"^classifier\.head_\."), "classifier.head."),
)
_LINEAR = re.compile(r"\.(in_proj|out_proj|fc1|fc2|reduction)\.weight$")
_HEAD = "classifier.head."


def load_checkpoint(model: nn.Module, source: Source, *, ema: bool = False, head: bool = True) -> nn.Module:
    """Load `source` (.pth, .safetensors or a state dict under upstream's names) into `model`, strictly.

    `ema` takes the moving average of the weights where a file holds both; `head=False` leaves the classifier
    as it is. Nothing is changed when anything does not fit.
    """
    state = rename(read_checkpoint(source, ema=ema))
    own = model.state_dict()
    for name in own:  # counters of batches seen, which older files lack and nothing here reads
        if name.endswith("num_batches_tracked"):
            state.setdefault(name, own[name])
    if not head:
        state = {k: v for k, v in state.items() if not k.startswith(_HEAD)}
        state |= {k: v for k, v in own.items() if k.startswith(_HEAD)}
    _check(own, state, describe(source))
    model.load_state_dict(state)
    return model


def read_checkpoint(source: Source, *, ema: bool = False) -> dict[str, Tensor]:
    """The state dict in `source`, with the file's own names; no code of the file is run."""
    if isinstance(source, Mapping):
        return _pick(source, ema, "the given state dict")
    path = Path(source)
    if not path.is_file():
        raise CheckpointError(f"no checkpoint at '{path}'; give the path of a .pth or .safetensors file")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            content: Any = load_file(path)
        else:
            # Upstream's training files carry their configuration; a plain mapping stands in for its class.
            with torch.serialization.safe_globals([(OrderedDict, "yacs.config.CfgNode")]):
                content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the readers raise many types; each means the same to a user
        raise CheckpointError(f"'{path}' cannot be read as a checkpoint: {_explain(error)}") from error
    return _pick(content, ema, f"'{path}'")


def _explain(error: Exception) -> str:
    code = re.search(r"GLOBAL (\S+)", str(error))
    if code:
        return f"it asks for the Python object '{code[1]}', and no code of a file is run; save model.state_dict() alone"
    # PyTorch's own message for a broken pickle advises to switch the safety off
    lines = "" if isinstance(error, pickle.UnpicklingError) else str(error).strip()
    reason = lines.splitlines()[0] if lines else type(error).__name__
    return f"it is damaged or of another kind ({reason}); is the download complete?"


def rename(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our names for every known spelling; linear weights as (out, in) whether stored 2-D or as 1x1 convolutions."""
    renamed = {}
    for name, tensor in state.items():
        for pattern, replacement in _RENAMES:
            name = pattern.sub(replacement, name)
        if _LINEAR.search(name) and tensor.dim() == 4 and tensor.shape[2:] == (1, 1):
            tensor = tensor.flatten(1)
        if name in renamed:
            raise CheckpointError(f"the checkpoint holds '{name}' twice, under two spellings; remove one of them")
        renamed[name] = tensor
    return renamed


def read_metadata(path: str | PathLike[str]) -> dict[str, str]:
    """The description in a .safetensors file; empty where there is none, as in every other kind of file."""
    if Path(path).suffix != ".safetensors":
        return {}
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"'{path}' cannot be read as .safetensors ({error}); is the file complete?") from error


def stated_fields(metadata: Mapping[str, str], path: str | PathLike[str]) -> dict[str, Any]:
    """How a file says that its network differs from its variant, as fields of VMambaConfig; often nothing.

    JSON has lists where the fields are tuples.
    """
    try:
        fields = dict(json.loads(metadata.get("overrides", "{}")))
        if "num_classes" in metadata:
            fields["num_classes"] = int(metadata["num_classes"])
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"what '{path}' states of its network cannot be read ({error!r}); load the weights "
            "into a network of your own with load_checkpoint"
        ) from error
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


def checkpoint_digest(source: Source) -> str:
    """sha256 of a file, or of the names and bytes of a state dict."""
    digest = hashlib.sha256()
    if isinstance(source, Mapping):
        for name in sorted(source):
            value = source[name].detach().cpu().contiguous()
            digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
            digest.update(value.flatten().view(torch.uint8).numpy().tobytes())
    else:
        with open(source, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def describe(source: Source) -> str:
    return "the given state dict" if isinstance(source, Mapping) else f"'{Path(source)}'"


def _pick(content: object, ema: bool, origin: str) -> dict[str, Tensor]:
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{origin} holds a {type(content).__name__}, not a state dict; save model.state_dict()")
    wanted = ("model_ema", "model") if ema else ("model", "state_dict", "model_ema")
    for key in wanted:
        if isinstance(content.get(key), Mapping):
            content = content[key]
            break
    state = {str(k): v for k, v in content.items() if isinstance(v, Tensor)}  # type: ignore[attr-defined]
    if not state:
        raise CheckpointError(f"{origin} holds no parameters; expected a state dict, plain or under 'model'")
    return state


def _check(own: Mapping[str, Tensor], state: Mapping[str, Tensor], origin: str) -> None:
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
    wrong = [
        f"{n} {tuple(state[n].shape)} in the file, {tuple(own[n].shape)} in the network"
        for n in own.keys() & state.keys()
        if own[n].shape != state[n].shape
    ]
    shared = sorted(own.keys() & state.keys())
    odd = [n for n in shared if own[n].is_floating_point() and not state[n].is_floating_point()]
    spoilt = [n for n in shared if state[n].is_floating_point() and not bool(state[n].isfinite().all())]
    problems = [
        f"{len(names)} {what}: {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"
        for what, names in (
            ("missing from the file", missing),
            ("unknown to the network", unexpected),
            ("of another shape", sorted(wrong)),
            ("of whole numbers", odd),
            ("with values that are not finite", spoilt),
        )
        if names
    ]
    if problems:
        raise CheckpointError(f"{origin} does not fit the network: " + "; ".join(problems))
