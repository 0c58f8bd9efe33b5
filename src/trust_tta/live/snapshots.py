"""Snapshots of the adapted state: one safetensors file each, written atomically, checked against a hash when read.

A state is nested dicts, lists and tuples of tensors and plain values. `encode` makes it flat: the tensors by number,
and a JSON text of everything else in which `{"tensor": "7"}` stands for the seventh.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trust_tta.atomic import write_whole
from trust_tta.config_io import MAX_DEPTH, is_too_deep
from trust_tta.errors import StateError
from trust_tta.schema import show

FORMAT = 1
MAX_COUNT = 2**53  # of batches, images and the like
_FILE = re.compile(r"snapshot-(\d{12})\.safetensors")
_TEMPORARY = re.compile(r"\.snapshot-\d{12}\.safetensors\..*\.tmp")


@dataclass(frozen=True)
class Snapshot:
    """One stored state. `number` increases from snapshot to snapshot; `state` is what `encode` takes.

    `within_batch`: taken before the guard acted on a batch, for people to look at; no stream continues from it.
    """

    number: int
    state: dict[str, Any]
    within_batch: bool = False


class Memory:
    """Snapshots of a stream without a folder; they are lost with the process."""

    def __init__(self) -> None:
        self._kept: dict[int, Snapshot] = {}

    def write(self, snapshot: Snapshot) -> None:
        self._kept[snapshot.number] = snapshot

    def read(self, number: int) -> Snapshot:
        if number not in self._kept:
            raise StateError(f"there is no snapshot {number}; kept are {', '.join(map(str, self._kept)) or 'none'}")
        return self._kept[number]

    def newest(self) -> tuple[Snapshot | None, list[str]]:
        """The newest that a stream can continue from, and what is wrong with each newer one."""
        whole = [number for number, snapshot in self._kept.items() if not snapshot.within_batch]
        return (self._kept[max(whole)] if whole else None), []

    def prune(self, keep: int, *, always: Collection[int]) -> None:
        """Delete all but the newest `keep` and those numbered in `always`."""
        for number in sorted(self._kept)[:-keep]:
            if number not in always:
                del self._kept[number]


class Folder:
    """Snapshots as files, with the methods of `Memory`; one process at a time owns the folder, until it closes it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StateError(f"snapshots cannot be kept in {self.path} ({error.strerror}); give a folder") from error
        self._release = hold(self.path / "lock", self)
        for file in self.path.iterdir():  # what a killed process was writing
            if _TEMPORARY.fullmatch(file.name):
                file.unlink(missing_ok=True)

    def write(self, snapshot: Snapshot) -> None:
        about = {"number": snapshot.number, "within_batch": snapshot.within_batch}
        write_state(self.file(snapshot.number), snapshot.state, about=about)

    def read(self, number: int) -> Snapshot:
        state, about = read_state(self.file(number))
        if about.get("number") != number:
            raise StateError(f"{self.file(number)} says that it is snapshot {about.get('number')}; it was renamed")
        return Snapshot(number, state, within_batch=about.get("within_batch") is True)

    def newest(self) -> tuple[Snapshot | None, list[str]]:
        problems: list[str] = []
        for number in reversed(self.numbers()):
            try:
                snapshot = self.read(number)
                if not snapshot.within_batch:
                    return snapshot, problems
            except StateError as error:
                problems.append(str(error))
        return None, problems

    def prune(self, keep: int, *, always: Collection[int]) -> None:
        for number in self.numbers()[:-keep]:
            if number not in always:
                self.file(number).unlink(missing_ok=True)

    def numbers(self) -> list[int]:
        """The numbers of all snapshots, oldest first, whether they can be read or not."""
        return sorted(int(m[1]) for m in (_FILE.fullmatch(f.name) for f in self.path.iterdir()) if m)

    def close(self) -> None:
        """Release the folder to other processes."""
        self._release()

    def file(self, number: int) -> Path:
        return self.path / f"snapshot-{number:012d}.safetensors"


def write_state(path: Path, state: Mapping[str, Any], *, about: Mapping[str, Any]) -> None:
    """Write a state, and plain values `about` it; the file appears whole or not at all."""
    from safetensors.torch import save

    tensors, tree = encode(dict(state))
    header = json.dumps({"format": FORMAT, "about": dict(about), "tree": tree}, sort_keys=True, allow_nan=False)
    metadata = {"trust_tta": header, "sha256": _digest(header, tensors)}
    try:
        write_whole(path, save(tensors, metadata))
    except OSError as error:
        raise StateError(f"the snapshot {path} cannot be written ({error.strerror}); free the disk") from error


def read_state(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state that `write_state` wrote, on the CPU, and the values about it; anything damaged is refused."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dict
        header = metadata["trust_tta"]
        if metadata["sha256"] != _digest(header, tensors):
            raise StateError(f"the snapshot {path} is damaged: its contents do not have the hash it was written with")
        content = json.loads(header)
        if is_too_deep(content):
            raise StateError(f"the snapshot {path} is nested deeper than {MAX_DEPTH} levels; take an earlier one")
        if content["format"] != FORMAT:
            raise StateError(f"the snapshot {path} has format {show(content['format'])}; this version reads {FORMAT}")
        state, about = decode(content["tree"], tensors), content["about"]
        if not isinstance(state, dict) or not isinstance(about, dict):
            raise StateError(f"the snapshot {path} holds a {type(state).__name__}; a dict is wanted")
        return state, about
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:  # too deep: RuntimeError
        raise StateError(f"the snapshot {path} cannot be read ({type(error).__name__}); take an earlier one") from error


def encode(tree: Any) -> tuple[dict[str, Tensor], Any]:
    """The tensors of a nested state by number, as copies on the CPU, and the rest as JSON values."""
    tensors: dict[str, Tensor] = {}

    def node(value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"float": repr(value)}
        if isinstance(value, Tensor):
            name = str(len(tensors))
            tensors[name] = value.detach().to("cpu", copy=True).contiguous()
            return {"tensor": name}
        if isinstance(value, Mapping):
            return {"dict": [[node(key), node(item)] for key, item in value.items()]}
        if isinstance(value, (list, tuple)):
            return {type(value).__name__: [node(item) for item in value]}
        raise StateError(f"a state holds a {type(value).__name__}; it may hold tensors and plain values alone")

    return tensors, node(tree)


def decode(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Inverse of `encode`."""
    if not isinstance(tree, dict):
        return tree
    ((kind, value),) = tree.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "float":
        return float(value)
    if kind == "dict":
        return {decode(key, tensors): decode(item, tensors) for key, item in value}
    items = [decode(item, tensors) for item in value]
    return tuple(items) if kind == "tuple" else items


def _digest(header: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of everything in a snapshot."""
    digest = hashlib.sha256(header.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_number(value: Any, name: str, kind: type[Any], *, low: float = 0, high: float = MAX_COUNT) -> None:
    """Refuse a snapshot's value that is not of exactly this type, not finite, or out of range."""
    if type(value) is not kind or not low <= value <= high:  # NaN compares as false
        raise StateError(f"the snapshot's {name} is {show(value)}, not a {kind.__name__} from {low:g} to {high:g}")


def check_keys(state: Any, names: Collection[str], what: str) -> None:
    """Refuse a part of a snapshot that is not a dict with exactly these keys."""
    if not isinstance(state, Mapping) or set(state) != set(names):
        raise StateError(f"the snapshot's {what} is {show(state)}, not a dict of {', '.join(names)}")


def hold(path: Path, owner: object) -> Callable[[], object]:
    """Lock a file for as long as `owner` exists, or until the returned function is called; even kill -9 releases it."""
    if os.name != "posix":
        return lambda: None
    import fcntl

    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise StateError(
            f"{path.parent} belongs to a stream or a service that is running; close it, or give another folder"
        ) from error
    return weakref.finalize(owner, os.close, handle)
