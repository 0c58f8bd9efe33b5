"""The network to export and its metadata, from a checkpoint, a saved state or an object."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trust_tta import __version__
from trust_tta.errors import CheckpointError, ConfigError, StateError
from trust_tta.live.snapshots import Folder, read_state
from trust_tta.methods.base import Method
from trust_tta.methods.tide.class_prior import network_bias
from trust_tta.methods.tide.source_mixing import mix_statistics
from trust_tta.models.checkpoint import Checkpoint, describe
from trust_tta.models.classifier import classifiers
from trust_tta.preprocessing import Preprocessing
from trust_tta.schema import parse, show

Origin: TypeAlias = str | PathLike[str] | nn.Module


@dataclass(frozen=True, eq=False)
class ExportSource:
    """A network in evaluation mode with its name and metadata."""

    network: nn.Module
    name: str
    preprocessing: Preprocessing
    about: dict[str, str] = field(repr=False)

    def resized(self, size: int) -> ExportSource:
        """A copy for images of another size; a crop keeps its fraction of the image."""
        old = self.preprocessing
        resize = old.resize and round(old.resize * size / old.size)
        new = parse(Preprocessing, {**dict(old), "size": size, "resize": resize}, where="preprocessing")
        return replace(self, preprocessing=new, about={**self.about, "preprocessing": new.to_json()})


def load_source(
    origin: Origin | None,
    *,
    checkpoint: str | PathLike[str] | None = None,
    variant: str | None = None,
    preprocessing: Preprocessing | None = None,
    classes: tuple[str, ...] | None = None,
) -> ExportSource:
    """Load the network to export.

    `origin`: a network, a method (with its adapted weights), a known checkpoint, a file of weights, a saved state, or
    None for the network `variant`, which loads its own weights. A state is a saved `method.state_dict()`, a snapshot,
    or a folder of snapshots, of which the newest is used; `checkpoint` is then the network that was adapted.
    `variant`, `preprocessing` and `classes` are for files that do not state theirs.
    """
    if isinstance(origin, Method):
        given = origin.detach()
        network = copy.deepcopy(getattr(given, "_orig_mod", given))  # the caller's is not changed
        with torch.no_grad():
            for name, value in origin.weights.source.items():
                network.get_parameter(name).copy_(value)
        return _from_state(_from_network(network), origin.state_dict(), {})
    if isinstance(origin, nn.Module):
        return _from_network(origin)
    stated: dict[str, Any] = {"variant": variant, "preprocessing": preprocessing, "classes": classes}
    state = None if origin is None else _read_state(Path(origin))
    if state is None:
        if checkpoint is not None:
            raise ConfigError(f"'{origin}' is a checkpoint itself, and '{checkpoint}' is given, too; omit one")
        return _from_checkpoint(Checkpoint.open(origin, **stated))
    if checkpoint is None:
        raise ConfigError(f"'{origin}' holds an adapted state, not a network; give the checkpoint it was adapted from")
    return _from_state(_from_checkpoint(Checkpoint.open(checkpoint, **stated)), *state)


def _from_network(network: nn.Module) -> ExportSource:
    preprocessing = getattr(network, "preprocessing", None)
    if not isinstance(preprocessing, Preprocessing):
        raise ConfigError("the network does not say how its images are preprocessed; set model.preprocessing")
    name, stated = type(network).__name__, describe(network)
    about = {"trust_tta": __version__, **stated.to_metadata(), **({} if stated.variant else {"network": name})}
    return ExportSource(network, name.lower(), preprocessing, about)


def _from_checkpoint(checkpoint: Checkpoint) -> ExportSource:
    name = checkpoint.file.stem if checkpoint.file else checkpoint.variant.replace(":", "_")
    about = {"trust_tta": __version__, **checkpoint.to_metadata(), "sha256": checkpoint.sha256}
    adaptation = ("adapted_by", "adapted_from", "adapted_on")
    about |= {key: checkpoint.metadata[key] for key in adaptation if key in checkpoint.metadata}
    return ExportSource(checkpoint.load(), name, checkpoint.preprocessing, about)


def _read_state(path: Path) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
    """The state of a method in a file or folder, and the counts of its stream; None for any other file."""
    if path.is_dir():
        with closing(Folder(path)) as folder:
            snapshot, problems = folder.newest()
        if snapshot is None:
            raise StateError(f"no snapshot in '{path}' can be read: {'; '.join(problems) or 'there is none'}")
        return snapshot.state["method"], snapshot.state.get("books", {})
    if path.suffix == ".safetensors" and path.is_file():
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt") as file:
                described = (file.metadata() or {}).get("trust_tta", "")
        except (OSError, SafetensorError):  # Checkpoint.open reports what is wrong with the file
            return None
        if '"tree"' not in described:  # a checkpoint
            return None
        state, _ = read_state(path)
        if not isinstance(state.get("method"), Mapping):
            raise StateError(f"'{path}' is not a snapshot of a stream; give one, or a saved state_dict() of a method")
        return state["method"], state.get("books", {})
    if path.suffix in (".pt", ".pth", ".bin") and path.is_file():
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception:  # Checkpoint.open reports what is wrong with the file
            return None
        return (state, {}) if isinstance(state, dict) and {"method", "adapted", "statistics"} <= state.keys() else None
    return None


@torch.no_grad()
def _from_state(source: ExportSource, state: Mapping[str, Any], books: Mapping[str, Any]) -> ExportSource:
    """Copy the weights and statistics of a state into the network of `source`; all of them must fit."""
    parameters = dict(source.network.named_parameters())
    moved = _load(parameters, state["adapted"], "weights")
    norms = {name: m for name, m in source.network.named_modules() if isinstance(m, _BatchNorm)}
    used = _used_statistics(norms, state["statistics"])
    for ours, theirs in (("running_mean", "mean"), ("running_var", "variance")):
        if used.get(theirs):
            buffers = {name: getattr(norm, ours) for name, norm in norms.items()}
            moved += _load(buffers, used[theirs], "statistics")
    shares = [torch.as_tensor(share).mean() for share in (state["statistics"].get("share") or {}).values()]
    extra = state.get("extra") or {}
    shift = torch.stack(shares).mean() if shares else extra.get("network_share", 1.0)
    moved += _correct_bias(source.network, extra, shift)
    if not moved and state["method"] != "source":
        raise StateError(f"the state of '{state['method']}' changes no weights or statistics; export the network")
    counted = {**state.get("counters", {}), **{key: books[key] for key in ("images", "batches") if key in books}}
    about = {
        **{key: value for key, value in source.about.items() if key != "sha256"},
        "adapted_by": str(state["method"]),
        "adapted_from": source.about.get("sha256", ""),
        "adapted_on": json.dumps({key: counted[key] for key in ("images", "batches", "updates") if counted.get(key)}),
    }
    return replace(source, about=about)


def _used_statistics(norms: Mapping[str, _BatchNorm], statistics: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Means and variances (channels,) by norm, mixed with the source's by the state's share of the stream."""
    used = {kind: dict(statistics.get(kind) or {}) for kind in ("mean", "variance")}
    for name, share in (statistics.get("share") or {}).items():
        norm, mean, variance = norms.get(name), used["mean"].get(name), used["variance"].get(name)
        if norm is None or norm.running_mean is None or norm.running_var is None or share == 1:
            continue
        shape = norm.running_mean.shape
        if isinstance(mean, Tensor) and isinstance(variance, Tensor) and mean.shape == variance.shape == shape:
            source = norm.running_mean, norm.running_var
            used["mean"][name], used["variance"][name] = mix_statistics((mean, variance), source, share)
    return used


def _correct_bias(network: nn.Module, extra: Mapping[str, Any], shift: Tensor | float) -> int:
    """Subtract tide's estimate of the class bias from the classifier's bias; returns the number of changed tensors.

    `shift` () as in `network_bias`.
    """
    scores, spread = extra.get("scores"), extra.get("spread")
    layers = classifiers(network)
    bias = layers[0].bias if len(layers) == 1 and isinstance(layers[0], nn.Linear) else None
    if bias is None or not isinstance(scores, Tensor) or not isinstance(spread, Tensor):
        return 0
    if not scores.any() or scores.shape[1] != len(bias):
        return 0
    bias.sub_(network_bias(scores, spread, shift)[0].to(bias))
    return 1


def _load(targets: Mapping[str, Tensor | None], values: Mapping[str, Any], what: str) -> int:
    """Copy named values into the network's tensors; returns the number of changed tensors."""
    changed = 0
    for name, value in values.items():
        target = targets.get(name)
        if target is None or not isinstance(value, Tensor) or target.shape != value.shape:
            given = tuple(value.shape) if isinstance(value, Tensor) else show(value)
            expected = "does not exist" if target is None else f"{tuple(target.shape)}"
            wrong = f"the {what} of this state do not fit the network: '{name}' is {given}, the network's {expected}"
            raise CheckpointError(f"{wrong}; give the checkpoint it was adapted from")
        if not bool(value.isfinite().all()):
            raise StateError(f"the {what} '{name}' of this state are not finite; take an earlier one")
        changed += not torch.equal(target, value.to(target))
        target.copy_(value)
    return changed
