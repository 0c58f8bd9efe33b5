"""Buffers that a network's own forward may change, such as counters and moving averages: part of a method's state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trust_tta.methods.state import Array, Optional, Spec


def changeable_buffers(network: nn.Module) -> dict[str, Tensor]:
    """The buffers by name, but those of BatchNorms, which do not change in evaluation mode."""
    norms = [name for name, module in network.named_modules() if isinstance(module, _BatchNorm)]
    return {name: buffer for name, buffer in network.named_buffers() if name.rpartition(".")[0] not in norms}


class NetworkBuffers:
    """The changeable buffers of a method's `network`; those of `source`, the user's network, keep their values.

    `changed`: names of those that a forward has changed since the method was made.
    """

    def __init__(self, network: nn.Module, source: nn.Module) -> None:
        self.network, self.source = network, changeable_buffers(source)
        self.changed: set[str] = set()
        self.watch()

    def watch(self) -> None:
        """Record the present buffers, to detect later changes; called after they were moved, copied or loaded."""
        now = self.network.named_buffers()
        self._watched = [(name, buffer, buffer._version) for name, buffer in now if name in self.source]

    def note_changes(self) -> None:
        """Note the names of buffers that were written to or assigned."""
        if not self._watched:
            return
        now = dict(self.network.named_buffers())
        found = {name for name, b, version in self._watched if now.get(name) is not b or b._version != version}
        if found:
            self.changed |= found
            self.watch()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Undo what the block changes."""
        before = self.values()
        try:
            yield
        finally:
            self.load(before)

    @torch.no_grad()
    def values(self) -> dict[str, Tensor]:
        """Copies of the changed buffers, but not of caches, whose shape or type differs from the source's."""
        self.note_changes()
        now = dict(self.network.named_buffers()) if self.changed else {}
        kept = {name: now[name] for name in sorted(self.changed) if name in now}
        return {name: b.detach().clone() for name, b in kept.items() if _alike(b, self.source[name])}

    @torch.no_grad()
    def load(self, values: Mapping[str, Tensor]) -> None:
        """Set the changed buffers to `values`, and those that are not among them to the source's."""
        self.note_changes()
        self.changed |= values.keys()
        for name in self.changed:
            parent, _, leaf = name.rpartition(".")
            buffers, value = self.network.get_submodule(parent)._buffers, values.get(name, self.source[name])
            now = buffers.get(leaf)
            if now is not None and _alike(now, value):
                now.copy_(value)
            else:
                buffers[leaf] = value.clone()
        if self.changed:
            self.watch()

    def __getstate__(self) -> dict[str, Any]:
        """State for a copy or a pickle, with all changes so far."""
        self.note_changes()
        return vars(self)

    def spec(self) -> Spec:
        return Optional({name: Optional(Array.like(buffer)) for name, buffer in self.source.items()})


def _alike(buffer: Tensor, other: Tensor) -> bool:
    return buffer.shape == other.shape and buffer.dtype == other.dtype
