"""The source network as the reference for an adapted one: on probed images of the stream, and on canary images."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trust_tta.errors import ShapeError, StateError
from trust_tta.live.inputs import ImageStats, image_stats
from trust_tta.live.monitors import StatisticsComparison, Values, probability_rows
from trust_tta.methods.base import Method
from trust_tta.methods.forward import NetworkForward
from trust_tta.methods.parameters import share_tensors
from trust_tta.methods.statistics import has_statistics, use_batch_statistics
from trust_tta.ops.cuda_graphs import GraphedNetwork
from trust_tta.ops.segmentation_logits import CoarseLogits, Logits, apply_in_chunks

MAX_INSPECTED = 32  # images of a batch from which input statistics are computed
CANARY_IMAGES = 64  # in a canary chosen from a reference
RESERVOIR_IMAGES = 32  # in one chosen from the stream; they are part of every snapshot
MIN_CONFIDENCE = 0.9  # of the source, for an image to be kept in the reservoir
MIN_NORMS = 4  # of a network, for a middle one to differ from the first and the last


class SourceReference:
    """The source's weights, sharing the frozen ones with the adapted method.

    Images of the stream are normalized as the method does, so that only what was learned differs. Canaries, which may
    be of another domain, are normalized by their own statistics where the method follows the stream's.
    """

    def __init__(self, method: Method) -> None:
        self._method = method
        twin = method.fork()
        twin.reset()
        self.network = twin.detach().eval()
        vars(self.network).update(unchecked_batches=0)  # the method's own network warns of images in other units
        self.follows_stream = method.options.statistics == "stream"
        self.training_statistics = _running_statistics(self.network)
        self.trained = TrainingStatisticsSource.of(self.network) if method.options.statistics != "source" else None
        if method.options.statistics != "source":
            use_batch_statistics(self.network)
        self._inspection = GraphedNetwork(_Inspection(self.network), [])
        self._directions = (
            torch.zeros(1) if hasattr(self.network, "scan_directions") else None
        )  # others are not recorded
        own = dict(self.network.named_parameters())
        self._own: list[Tensor] = [own[name] for name in method.adapted]  # copies of what the method adapts
        self._forward = NetworkForward(self.network)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Logits:
        """Logits (n, classes, ...) of the source."""
        return self._forward(images)

    @property
    def passes(self) -> int:
        """Forward passes that a probe of one image takes."""
        return (2 if self.follows_stream else 1) * (1 + (self.trained is not None))

    @torch.no_grad()
    def compare(self, images: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities (rows, classes) of the adapted network and of the source, for images of the stream.

        `output` is what was served; methods that follow the stream may have corrected it by more than their weights.
        """
        method = self._method
        if not self.follows_stream:
            return probability_rows(output, probabilities=method.probabilities), probability_rows(self(images))
        with method.statistics.frozen(images):
            adapted = probability_rows(method.frozen_logits(images))
            if not method.adapted:
                return adapted, adapted  # only the statistics move
            own = method.weights.snapshot()
            try:
                method.weights.load(method.weights.source_vector)
                return adapted, probability_rows(method.frozen_logits(images))
            finally:
                method.weights.load(own)

    def compare_statistics(self, images: Tensor, source: Tensor) -> StatisticsComparison | None:
        """Predictions with the statistics of training beside those with the batch's; None without a choice of them.

        `source`: what `compare` gave. The statistics of a stream may be those of training, which tells nothing.
        """
        if self.trained is None:
            return None
        return self.trained.compare(images, probability_rows(self(images)) if self.follows_stream else source)

    @torch.no_grad()
    def predict_adapted(self, images: Tensor) -> Logits:
        """Logits (n, classes, ...) of the method's present weights for images of any domain."""
        if not self.follows_stream:
            return self._method.evaluate(images)
        try:
            self._load(self._method.adapted.values())
            return self(images)
        finally:
            self._load(self._method.weights.source.values())

    def _load(self, weights: Iterable[Tensor]) -> None:
        if self._own:
            torch._foreach_copy_(self._own, [w.detach() for w in weights])

    @torch.no_grad()
    def inspect(self, images: Tensor) -> tuple[ImageStats, Values]:
        """Per-image statistics (3, n, c) and `input_statistics` (2, c) of images, in one transfer from the device."""
        if self._directions is not None and self._directions.device != images.device:
            self._directions = self._directions.to(images.device)
        flat = self._inspection(images, self._directions).cpu().numpy()
        size = 3 * images.shape[0] * images.shape[1]
        return flat[:size].reshape(3, *images.shape[:2]), flat[size:].reshape(2, -1).astype(np.float64)

    def input_statistics(self, images: Tensor) -> Values:
        """Mean and mean square of each channel (2, c), of the first BatchNorm's input, else of the images."""
        return self.inspect(images)[1]


class TrainingStatisticsSource:
    """The source with the BatchNorm statistics of its training, which no stream of few classes can mislead."""

    def __init__(self, network: nn.Module) -> None:
        self.network = share_tensors(network)
        norms = [m for m in self.network.modules() if has_statistics(m)]
        depths: list[nn.Module] = [norms[len(norms) // 2], norms[-1]] if len(norms) >= MIN_NORMS else []
        self._widths = [2 * norm.num_features for norm in norms if norm in depths]
        self._forward = GraphedNetwork(_WithNormInputs(self.network, depths), [])

    @classmethod
    def of(cls, network: nn.Module) -> TrainingStatisticsSource | None:
        """None for networks that keep no statistics of their training, or predict pixels."""
        kept = [m.running_mean is not None for m in network.modules() if has_statistics(m)]
        return cls(network) if kept and all(kept) and not getattr(network, "dense", False) else None

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Logits (n, classes)."""
        return self._split(images, self._run(images))[0]

    @torch.no_grad()
    def compare(self, images: Tensor, batch: Tensor) -> StatisticsComparison:
        """Predictions beside those with the statistics of the batch (n, classes)."""
        logits, *depths = self._split(images, self._run(images).cpu())
        trained, inputs = probability_rows(logits).numpy(), tuple(d.double().numpy() for d in depths)
        return StatisticsComparison(trained, batch.cpu().numpy(), inputs)

    @torch.no_grad()
    def norm_inputs(self, images: Tensor) -> tuple[Values, ...]:
        """Channel statistics (2, c) at the inputs of a middle norm and of the last one."""
        return tuple(d.double().numpy() for d in self._split(images, self._run(images).cpu())[1:])

    def _run(self, images: Tensor) -> Tensor:
        choose = getattr(self.network, "scan_directions", None)
        return self._forward(images, None if choose is None else choose(None, len(images)))

    def _split(self, images: Tensor, flat: Tensor) -> list[Tensor]:
        logits, *depths = flat.split([len(flat) - sum(self._widths), *self._widths])
        return [logits.view(len(images), -1), *(d.view(2, -1) for d in depths)]


class _WithNormInputs(nn.Module):
    """A network that also returns the channel statistics at the inputs of some norms, all in one vector."""

    def __init__(self, network: nn.Module, norms: list[nn.Module]) -> None:
        super().__init__()
        self.network, self.norms = network, norms

    def forward(self, images: Tensor, directions: Tensor | None = None) -> Tensor:
        found: list[Tensor] = []

        def keep(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            found.append(channel_statistics(inputs[0]).flatten())

        handles = [norm.register_forward_pre_hook(keep) for norm in self.norms]
        try:
            logits = self.network(images) if directions is None else self.network(images, directions=directions)
        finally:
            for handle in handles:
                handle.remove()
        return torch.cat([logits.float().flatten(), *found])


class _Inspection(nn.Module):
    """Image statistics, and channel statistics of the first BatchNorm's input, in one vector; the pass ends there."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        # One weight shows the device and dtype; a recorder that checks all of them takes as long as the pass itself.
        self.first = next(network.parameters())
        self._network = (network,)
        self._norms = [m for m in network.modules() if isinstance(m, _BatchNorm)]

    def forward(self, images: Tensor, directions: Tensor | None = None) -> Tensor:
        some = images[:: -(-len(images) // MAX_INSPECTED)]
        inputs = channel_statistics(self._first_norm_input(some) if self._norms else some)
        return torch.cat([image_stats(images).flatten(), inputs.flatten()])

    def _first_norm_input(self, images: Tensor) -> Tensor:
        def stop(module: _BatchNorm, inputs: tuple[Tensor, ...]) -> None:
            raise _FirstNormReached(module, inputs[0])

        (network,) = self._network
        handles = [norm.register_forward_pre_hook(stop) for norm in self._norms]
        choose = getattr(network, "scan_directions", None)
        try:  # with `directions`, as networks that have them record other passes by themselves
            network(images) if choose is None else network(images, directions=choose(None, len(images)))
        except _FirstNormReached as reached:
            self._norms = [reached.norm]  # the others are not reached
            return reached.values
        finally:
            for handle in handles:
                handle.remove()
        return images  # a network that does not use its normalizations


def channel_statistics(values: Tensor) -> Tensor:
    """Mean and mean square of each channel (2, c) of values (n, c, ...)."""
    values = values.float().flatten(2)
    if values.is_cuda:  # in few kernels
        variance, mean = torch.var_mean(values, (0, 2), correction=0)
        return torch.stack([mean, variance + mean.square()])
    # Reduced over the last dimension first, which alone is fast on a CPU.
    return torch.stack([values.mean(2), values.square().mean(2)]).mean(1)


@dataclass(frozen=True)
class Canary:
    """Images (m, ...) whose predictions must not change, and their expected classes (m,).

    `labeled`: given by the user; `trusted`: as the source predicts them, weighted by its confidence; `reservoir`:
    images of the stream itself of which the source was sure.
    """

    kind: Literal["labeled", "trusted", "reservoir"]
    images: Tensor
    labels: Tensor
    weights: Tensor
    expected: float

    @classmethod
    def trusted(
        cls, images: Tensor, source: SourceReference, *, kind: Literal["trusted", "reservoir"] = "trusted"
    ) -> Canary:
        weights, labels = probability_rows(_per_image(source(images))).max(1)
        return cls(kind, images, labels, weights, 1.0)

    @classmethod
    def labeled(cls, images: Tensor, labels: Tensor, source: SourceReference) -> Canary:
        if labels.shape != (len(images),):
            raise ShapeError(f"the canary has {len(images)} images and labels of shape {tuple(labels.shape)}")
        canary = cls("labeled", images, labels.to(images.device), torch.ones(len(images), device=images.device), 0.0)
        return cls(canary.kind, images, canary.labels, canary.weights, canary.score(source(images)))

    @classmethod
    def from_user(cls, given: Any, source: SourceReference) -> Canary:
        """From images (m, ...), or from a pair of images and labels."""
        if isinstance(given, (tuple, list)) and len(given) == 2:
            return cls.labeled(given[0], torch.as_tensor(given[1]), source)
        return cls.trusted(given, source)

    def score(self, logits: Logits) -> float:
        """The share of images, by weight, for which these logits predict the expected class."""
        right = (_per_image(logits).argmax(1) == self.labels).to(self.weights)
        return float((right * self.weights).sum() / self.weights.sum())


class Reservoir:
    """Images of the stream of which the source was sure, as many of each class, in half precision."""

    def __init__(self) -> None:
        self._images: list[Tensor] = []
        self._classes: list[int] = []
        self._canary: Canary | None = None

    def offer(self, images: Tensor, source: Tensor) -> None:
        """Keep confident images of (n, ...) by the source's probabilities (n, classes), while there is room."""
        per_class = max(2, RESERVOIR_IMAGES // source.shape[1])
        confidence, predicted = (values.tolist() for values in source.max(1))
        for i, (sure, label) in enumerate(zip(confidence, predicted, strict=True)):
            room = len(self._images) < RESERVOIR_IMAGES and self._classes.count(label) < per_class
            if sure >= MIN_CONFIDENCE and room and (not self._images or images[i].shape == self._images[0].shape):
                self._images.append(images[i].clamp(-1e4, 1e4).half())
                self._classes.append(label)
                self._canary = None

    def canary(self, source: SourceReference, *, classes: int) -> Canary | None:
        """None until there are enough images of several classes."""
        if len(self._images) < RESERVOIR_IMAGES // 2 or len(set(self._classes)) < min(3, classes):
            return None
        if self._canary is None:
            like = next(source.network.parameters())
            self._canary = Canary.trusted(torch.stack(self._images).to(like), source, kind="reservoir")
        return self._canary

    def state(self) -> dict[str, Any]:
        return {"images": torch.stack(self._images) if self._images else None, "classes": list(self._classes)}

    @staticmethod
    def check_state(state: Any, source: SourceReference) -> None:
        """Refuse what `state` cannot have returned, or images that the network does not take."""
        if not isinstance(state, Mapping) or set(state) != {"images", "classes"}:
            raise StateError("the snapshot's reservoir is not a dict of images and classes")
        images, classes = state["images"], state["classes"]
        count = len(classes) if isinstance(classes, list) else -1
        if not 0 <= count <= RESERVOIR_IMAGES or any(type(c) is not int or c < 0 for c in classes):
            raise StateError(f"the snapshot's reservoir has no list of at most {RESERVOIR_IMAGES} classes")
        if images is None and count == 0:
            return
        if not isinstance(images, Tensor) or images.dtype != torch.half or len(images) != count or images.dim() < 2:
            raise StateError(f"the snapshot's reservoir has no tensor of {count} images in half precision")
        try:
            finite = bool(images.isfinite().all()) and count > 0
            source(images[:1].to(next(source.network.parameters())))
        except Exception as error:
            reason = f"of shape {tuple(images.shape[1:])}, which the network does not take"
            raise StateError(f"the snapshot's reservoir has images {reason}") from error
        if not finite:
            raise StateError("the snapshot's reservoir has images that are not finite")

    def load(self, state: Mapping[str, Any], like: Tensor) -> None:
        images = state["images"]
        self._images = [] if images is None else list(images.to(like.device))
        self._classes, self._canary = list(state["classes"]), None


def balanced(images: Tensor, source: Tensor, *, count: int = CANARY_IMAGES) -> Tensor:
    """At most `count` images, spread as evenly as possible over the classes that the source predicts (n, classes)."""
    predicted = source.argmax(1)
    rank = torch.zeros_like(predicted)  # of an image among those of its class
    for label in predicted.unique():
        members = (predicted == label).nonzero()[:, 0]
        rank[members] = torch.arange(len(members), device=rank.device)
    return images[rank.argsort(stable=True)[:count].sort().values]


def _per_image(logits: Logits) -> Tensor:
    """Logits (n, classes); for segmentation, the mean over the pixels."""
    if isinstance(logits, CoarseLogits):
        return apply_in_chunks(lambda chunk: chunk.sum((2, 3)), logits, summed=True) / math.prod(logits.size)
    return logits.flatten(2).mean(2) if logits.dim() > 2 else logits


def _running_statistics(network: nn.Module) -> Tensor | None:
    """Mean and mean square (2, c) that the first BatchNorm kept from training, if there is one and it kept any."""
    norm = next((m for m in network.modules() if isinstance(m, _BatchNorm)), None)
    if norm is None or norm.running_mean is None or norm.running_var is None:
        return None
    mean, variance = norm.running_mean.double().cpu(), norm.running_var.double().cpu()
    return torch.stack([mean, variance + mean.square()])


class _FirstNormReached(Exception):  # noqa: N818, it is no error
    """Ends a pass at the first normalization."""

    def __init__(self, norm: _BatchNorm, values: Tensor) -> None:
        super().__init__()
        self.norm, self.values = norm, values
