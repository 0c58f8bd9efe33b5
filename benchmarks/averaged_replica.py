"""A replica: a live stream that shares its adapted weights and adopts merged ones if its guard allows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from benchmarks.averaging import MergeResult, ReplicaState, ReplicaUpdate
from torch import Tensor

from trust_tta.errors import StateError
from trust_tta.live.guard import Event
from trust_tta.live.inputs import prepare
from trust_tta.live.session import Result
from trust_tta.live.source_reference import SourceReference
from trust_tta.live.stream import Stream
from trust_tta.live.stream_statistics import Window
from trust_tta.methods.base import Method

SIGNATURE_IMAGES = 256  # from which the signature is computed, at most
QUICK_CHECK_IMAGES = 8  # the last ones, on which a merge is judged first
CHECK_IMAGES = 64  # on which it is judged if predictions changed there
UNKNOWN = -1  # a base unknown to any merger


class Replica:
    """One of `replicas` streams over the same network. Calls adapt it; `make_update` and `adopt` are for the merger.

    Its statistics count each image as many times as there are replicas: they leave the source as fast as those of a
    single stream that sees every image, and their mean over the replicas equals that stream's.
    """

    def __init__(self, stream: Stream, name: str, *, replicas: int = 1) -> None:
        self.stream, self.name = stream, name
        stream.method.samples_per_image = replicas
        self.base = self.images = 0  # the merge it comes from, and the images it learned from since
        self._source = SourceReference(stream.method)
        self._inputs = Window(SIGNATURE_IMAGES)
        self._recent: Tensor | None = None  # the last images, with what was served for them
        self._served: Tensor | None = None
        self._updates = 0

    def __call__(self, images: Any) -> Result:
        """Predict a batch, as the stream does."""
        batch = prepare(images, self.stream.method.model)
        result = self.stream(batch)
        self._notice_return()
        if result.adapted:
            self.images += len(batch)
        if bool(batch.isfinite().all()):
            self._inputs.add(len(batch), self._source.input_statistics(batch) * len(batch))
            self._remember(batch, result.logits)
        return result

    def make_update(self) -> ReplicaUpdate:
        """The state, and the evidence since the last merge: none if it has seen no image."""
        seen = self._inputs.images > 0
        signature = torch.from_numpy(self._inputs.mean).float() if seen else torch.full((2, 1), float("nan"))
        method = self.stream.method
        return ReplicaUpdate(
            self.name, self.base, self.images if seen else 0, state_of(method), signature, method.samples_per_image
        )

    def adopt(self, merge: MergeResult, sent: ReplicaUpdate) -> Event:
        """Continue from a merge of what was `sent`, keeping what was learned since; the guard may refuse it."""
        if self._recent is None or self._served is None:
            raise StateError(f"the replica '{self.name}' has seen no image to check a merge on; call it first")
        now = state_of(self.stream.method)
        since = self.images - sent.images
        weights = merge.state.weights + (now.weights - sent.state.weights)
        taken = replace(merge.state, weights=weights, remembered=merge.state.remembered + max(0, since))
        event = self.stream.adopt(
            lambda method: load_into(method, taken),
            self._recent,
            served=self._served[-QUICK_CHECK_IMAGES:],
        )
        if event.action == "take":
            self.base, self.images = merge.number, max(0, since)
        return event

    def _remember(self, batch: Tensor, logits: Tensor) -> None:
        if self._recent is None or self._served is None or self._recent.shape[1:] != batch.shape[1:]:
            self._recent, self._served = batch[-CHECK_IMAGES:], logits[-CHECK_IMAGES:]
        else:
            self._recent = torch.cat([self._recent, batch])[-CHECK_IMAGES:]
            self._served = torch.cat([self._served, logits])[-CHECK_IMAGES:]

    def _notice_return(self) -> None:
        """Notice that an earlier state was restored, which then has no known base."""
        updates = self.stream.method.counters.updates
        if updates < self._updates:
            self.base, self.images = (0 if updates <= 1 else UNKNOWN), 0
        self._updates = updates


def state_of(method: Method) -> ReplicaState:
    """The part of a method's state that is averaged, on the CPU."""
    norms = list(method.statistics.norms.values())
    means = _flat([norm.mean for norm in norms])
    squares = _flat([norm.variance + norm.mean.square() for norm in norms])
    remembered = float(norms[0].images) if norms else 0.0
    sums = _flat([value for name in method.pooled if (value := getattr(method, name)) is not None])
    images = float(sums.sum()) / max(1, len(method.pooled))
    domain_means = sums / images if images > 0 else sums[:0]
    return ReplicaState(method.weights.snapshot().cpu(), means, squares, remembered, domain_means, images)


def source_of(method: Method) -> ReplicaState:
    """The same for the source network, the first base of every replica."""
    twin = method.fork()
    twin.reset()
    state = state_of(twin)
    return ReplicaState(state.weights, state.means, state.squares)


@torch.no_grad()
def load_into(method: Method, state: ReplicaState) -> None:
    """Load an averaged state into a method; its optimizer and everything else stay."""
    method.weights.load(state.weights.to(method.weights.vector))
    start = 0
    for norm in method.statistics.norms.values():
        stop = start + norm.mean.numel()
        mean, square = state.means[start:stop].to(norm.mean), state.squares[start:stop].to(norm.mean)
        norm.mean.copy_(mean)
        norm.variance.copy_((square - mean.square()).clamp_min(0))
        norm.images.fill_(state.remembered)
        norm.update_share()
        start = stop
    start = 0
    for name in method.pooled if len(state.domain_means) else ():
        value = getattr(method, name)
        if value is not None:
            stop = start + value.numel()
            setattr(method, name, (state.domain_images * state.domain_means[start:stop]).to(value).view_as(value))
            start = stop


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.detach().float().cpu().reshape(-1) for t in tensors]) if tensors else torch.zeros(0)
