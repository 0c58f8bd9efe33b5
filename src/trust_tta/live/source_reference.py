"""Predictions of the source network for comparison with the adapted one, and channel statistics at its norms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from trust_tta.live.stream_statistics import Values, input_distance
from trust_tta.methods.base import Method
from trust_tta.methods.forward import NetworkForward, take_logits
from trust_tta.methods.statistics import has_statistics, use_batch_statistics
from trust_tta.methods.tide.label_shift import class_logits, nearest_class
from trust_tta.ops.cuda_graphs import GraphedNetwork
from trust_tta.ops.segmentation_logits import Logits

MIN_NORMS = 4  # of a network, so that the middle one is neither the first nor the last


class SourceReference:
    """The source network with the statistics of its training; frozen weights are shared with the adapted method.

    `own_statistics`: whether its BatchNorms, if any, kept those of training; otherwise it uses the batch's.
    """

    def __init__(self, method: Method) -> None:
        twin = method.fork()
        twin.reset()
        self.network = twin.detach().eval()
        vars(self.network).update(unchecked_batches=0)  # the method's own network warns of images in other units
        norms = [m for m in self.network.modules() if has_statistics(m)]
        self.own_statistics = all(norm.running_mean is not None for norm in norms)
        if not self.own_statistics:
            use_batch_statistics(self.network)
        self._forward = NetworkForward(self.network)
        dense = getattr(self.network, "dense", False) or self._forward.coarse
        deep = self.own_statistics and len(norms) >= MIN_NORMS and not dense
        depths = [norms[len(norms) // 2], norms[-1]] if deep else []
        kept = [(cast("Tensor", norm.running_mean), cast("Tensor", norm.running_var)) for norm in depths]
        self.references = [torch.stack([m, v + m.square()]).double().cpu().numpy() for m, v in kept]
        self._widths = [2 * norm.num_features for norm in depths]
        self._with_depths = GraphedNetwork(_WithNormInputs(self.network, depths), []) if depths else None
        self._class_rows: tuple[Tensor, Tensor] | None = None

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Logits:
        """Logits (n, classes, ...) of the source."""
        return self._forward(images)

    @torch.no_grad()
    def predict(self, images: Tensor) -> tuple[Logits, Values | None]:
        """Logits, and the channel moments at the inputs of a middle norm and of the last one, in one vector.

        None for networks of few norms, or without statistics of their training.
        """
        if self._with_depths is None:
            return self(images), None
        choose = getattr(self.network, "scan_directions", None)
        flat = self._with_depths(images, None if choose is None else choose(None, len(images)))
        logits, moments = flat.split([len(flat) - sum(self._widths), sum(self._widths)])
        return logits.view(len(images), -1), moments.cpu().double().numpy()

    def nearest_class(self, log_p: Tensor) -> Tensor:
        """Squared cosine (n,) of centered log-probabilities (n, classes) with the logits of the nearest class."""
        if self._class_rows is None:
            self._class_rows = class_logits(self.network, log_p.shape[1])
        return nearest_class(log_p.to(self._class_rows[0]), *self._class_rows)

    def depth_distances(self, moments: Values) -> tuple[float, float]:
        """Distances from the statistics of training at a middle norm and at the last one.

        Corruptions change the middle of a network; few classes change its end.
        """
        parts = np.split(moments, [self._widths[0]])
        middle, last = (input_distance(p.reshape(2, -1), r) for p, r in zip(parts, self.references, strict=True))
        return middle, last


class _WithNormInputs(nn.Module):
    """A network that also returns the channel moments at the inputs of some norms, all in one vector."""

    def __init__(self, network: nn.Module, norms: Sequence[nn.Module]) -> None:
        super().__init__()
        self.network, self.norms = network, list(norms)

    def forward(self, images: Tensor, directions: Tensor | None = None) -> Tensor:
        found: list[Tensor] = []

        def keep(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            found.append(channel_statistics(inputs[0]).flatten())

        handles = [norm.register_forward_pre_hook(keep) for norm in self.norms]
        try:
            output = self.network(images) if directions is None else self.network(images, directions=directions)
        finally:
            for handle in handles:
                handle.remove()
        return torch.cat([take_logits(self.network, output).float().flatten(), *found])


def channel_statistics(values: Tensor) -> Tensor:
    """Mean and mean square of each channel (2, c) of values (n, c, ...)."""
    values = values.float().flatten(2)
    if values.is_cuda:  # in few kernels
        variance, mean = torch.var_mean(values, (0, 2), correction=0)
        return torch.stack([mean, variance + mean.square()])
    # Reduced over the last dimension first, which alone is fast on a CPU.
    return torch.stack([values.mean(2), values.square().mean(2)]).mean(1)
