"""Networks and adapted states in a folder as the Hugging Face hub keeps them: weights, config.json and a card.

save_pretrained(model, "my-vmamba")
save_pretrained(method, "my-vmamba-fog", adapted_to="CIFAR-10-C, fog of severity 5")
push_to_hub(method, "me/my-vmamba-fog", adapted_to="CIFAR-10-C, fog of severity 5")
model = from_pretrained("me/my-vmamba-fog")             # the adapted network
method = adapted_from_pretrained("me/my-vmamba-fog")    # the method, which continues where it was
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trust_tta.atomic import write_whole
from trust_tta.errors import CheckpointError, ConfigError, StateError, reason_of
from trust_tta.live.snapshots import read_state, write_state
from trust_tta.methods.base import Method
from trust_tta.methods.registry import METHODS, create_method
from trust_tta.methods.state import network_state
from trust_tta.models.base import ScanNetwork
from trust_tta.models.checkpoint import Checkpoint, describe
from trust_tta.models.pretrained import HUB_WEIGHTS, hub_folder
from trust_tta.models.upernet import UPerNet
from trust_tta.models.weights import encode_weights
from trust_tta.optional import require
from trust_tta.schema import show

CONFIG, CARD, STATE = "config.json", "README.md", "adaptation.safetensors"


def save_pretrained(
    module: nn.Module, folder: str | PathLike[str], *, adapted_to: str | None = None, license: str | None = None
) -> Path:
    """Write a network of this package, or a method over one, into `folder`.

    For a method, the network is saved as it is adapted now, with what the method needs to continue and to reset.
    `adapted_to` says in words what it was adapted to, for the card; it is required for a method. `license` is that of
    the weights.
    """
    method = module if isinstance(module, Method) else None
    if method is not None and adapted_to is None:
        raise ConfigError("adapted_to is missing: describe for the card what the method was adapted to")
    if method is None and adapted_to is not None:
        raise ConfigError("adapted_to goes with a method; omit it for a network as it was trained")
    network = module if method is None else method.shared.network
    if not isinstance(network, ScanNetwork | UPerNet):
        raise ConfigError(f"the network is a {type(network).__name__}; save it with the library that made it")
    state = network_state(method) if method is not None else network.state_dict()
    about = describe(network).to_metadata() | ({"license": license} if license else {})
    target = Path(folder)
    if method is not None:
        about |= {"adapted_by": method.name, "adapted_to": str(adapted_to)}
        before = {**network.state_dict(), **method.weights.source}
        source = {name: value for name, value in before.items() if not torch.equal(value, state[name])}
        adaptation = {"state": method.state_dict(), "source": source}  # source values of the changed weights
        write_state(target / STATE, adaptation, about={"method": method.name, "options": _changed_options(method)})
    write_whole(target / HUB_WEIGHTS, encode_weights(state, about))
    write_whole(target / CONFIG, json.dumps({"library_name": "trust-tta", **about}, indent=1) + "\n")
    write_whole(target / CARD, _card(network, about, method))
    return target


def from_pretrained(
    source: str | PathLike[str], *, revision: str | None = None, device: str | torch.device = "cpu"
) -> nn.Module:
    """The network in a folder or in a repository of the hub, with its adapted weights, in evaluation mode."""
    return Checkpoint.open(hub_folder(source, revision=revision) / HUB_WEIGHTS).load(device=device)


def adapted_from_pretrained(
    source: str | PathLike[str], *, revision: str | None = None, device: str | torch.device = "cpu"
) -> Method:
    """The saved method, in its adapted state; `reset` restores the source network."""
    folder = hub_folder(source, revision=revision)
    if not (folder / STATE).is_file():
        raise StateError(f"'{source}' holds a network and no adapted state; use from_pretrained")
    content, about = read_state(folder / STATE)
    name, options = about.get("method"), about.get("options")
    if name not in METHODS or not isinstance(options, dict):
        raise StateError(f"'{source}' is of the unknown method {show(name)}; loading a file never executes code")
    network = Checkpoint.open(folder / HUB_WEIGHTS).load()
    own = network.state_dict()
    found = content.get("source")
    if not isinstance(found, dict) or any(n not in own or own[n].shape != t.shape for n, t in found.items()):
        raise StateError(f"the state in '{source}' does not fit the network beside it")
    network.load_state_dict({**own, **found})
    method: Method = create_method(name, network.to(device), **options)
    method.load_state_dict(content["state"])
    return method


def push_to_hub(
    module: nn.Module,
    repo_id: str,
    *,
    adapted_to: str | None = None,
    license: str | None = None,
    private: bool | None = None,
    token: str | None = None,
) -> str:
    """Save into a repository of the hub, created if missing; returns the URL of the commit."""
    library: Any = require("huggingface_hub", extra="hub")
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(module, folder, adapted_to=adapted_to, license=license)
        message = f"Add a network adapted to {adapted_to}" if adapted_to else "Add a network"
        try:
            api = library.HfApi(token=token, library_name="trust-tta")
            api.create_repo(repo_id, private=private, exist_ok=True)
            return str(api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=message).commit_url)
        except Exception as error:  # the library raises many types
            raise CheckpointError(f"'{repo_id}' cannot be written on the hub: {reason_of(error)}") from error


def _changed_options(method: Method) -> dict[str, Any]:
    return method.options.model_dump(mode="json", exclude_defaults=True)


def _card(network: ScanNetwork | UPerNet, about: Mapping[str, str], method: Method | None) -> str:
    parameters = sum(p.numel() for p in network.parameters())
    front = {
        "library_name": "trust-tta",
        "license": about.get("license"),
        "pipeline_tag": "image-segmentation" if isinstance(network, UPerNet) else "image-classification",
        "tags": ["pytorch", "state-space-model", about["variant"], *(["test-time-adaptation"] if method else [])],
    }
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in front.items() if value), "---", ""]
    lines += [f"# {about['variant']}" + (f", adapted to {about['adapted_to']}" if method else ""), ""]
    lines += [f"{parameters:,} parameters, {about['num_classes']} classes."]
    if (wanted := network.preprocessing) is not None:
        lines += [f"Images of {wanted.size}x{wanted.size} pixels, mean {wanted.mean}, std {wanted.std}."]
    if method:
        options = ", ".join(f"{name}={show(value)}" for name, value in _changed_options(method).items())
        lines += ["", "## Adaptation", ""]
        lines += [
            f"To {about['adapted_to']}, without labels, by `{method.name}`{f' ({options})' if options else ''}: "
            f"{method.counters.batches} batches, {method.counters.updates} updates."
        ]
        if method.statistics.kind == "batch" and method.statistics.uses_batch:
            lines += [
                "The method normalizes with the statistics of each batch, the network alone with those of training; "
                "the measured accuracy needs the method."
            ]
        lines += ["On other data it may be worse than the network it came from."]
    call = "adapted_from_pretrained" if method else "from_pretrained"
    lines += ["", "```python", f"from trust_tta.export.hub import {call}", ""]
    return "\n".join([*lines, f'{"method" if method else "model"} = {call}("...")', "```", ""])
