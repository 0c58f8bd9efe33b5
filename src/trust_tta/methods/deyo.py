"""DeYO: learn from confident predictions that depend on the shape of the object, not on its texture.

Lee et al., "Entropy is not Enough for Test-Time Adaptation: From the Perspective of Disentangled Factors", ICLR 2024.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from trust_tta.methods.base import Learner, LearningOptions
from trust_tta.methods.eta import Margin
from trust_tta.methods.losses import entropy
from trust_tta.methods.validation import check_image_logits
from trust_tta.schema import Count, Natural, Rate


class DeyoOptions(LearningOptions):
    """`margin` and `weight_margin` of the entropy, as fractions of ln(classes); `plpd`: minimum drop of the label's
    probability once `destroy` has removed the object's shape. Box of "occlusion": `size` pixels at `row`, `column`;
    None: the middle of the image, half its width."""

    lr: Rate = 2.5e-4
    optimizer: Literal["adam", "sgd"] = "sgd"
    margin: Margin = 0.5
    weight_margin: Rate = 0.4
    plpd: float = 0.3
    destroy: Literal["patch", "occlusion", "pixel"] = "patch"
    patches: Count = 4
    row: Natural | None = None
    column: Natural | None = None
    size: Count | None = None
    skip_last: bool = True
    seed: Natural = 0


class Deyo(Learner):
    """Entropy of confident predictions that become less confident once the shape of the object is destroyed."""

    Options = DeyoOptions
    options: DeyoOptions

    def update(self, images: Tensor, logits: Tensor) -> None:
        check_image_logits(logits, self.name)
        entropies, classes = entropy(logits), math.log(logits.shape[1])
        sure = (entropies.detach() < self.options.margin * classes).nonzero()[:, 0]
        if len(sure) == 0:
            return
        with torch.no_grad():
            p = logits[sure].softmax(1)
            without = self.logits_of_some(lambda i: self.destroyed(images[i], i), sure, len(images)).softmax(1)
            label = p.argmax(1, keepdim=True)
            difference = (p.gather(1, label) - without.gather(1, label))[:, 0]
            weights = torch.exp(self.options.weight_margin * classes - entropies[sure]) + torch.exp(difference)
        counts = difference > self.options.plpd
        if bool(counts.any()):
            self.step((weights[counts] * entropies[sure][counts]).mean())

    def destroyed(self, images: Tensor, places: Tensor) -> Tensor:
        """Images (n, c, h, w), those at indices `places` (n,) of the batch, without the shape of their objects."""
        del places
        generator = torch.Generator().manual_seed(self.options.seed * 1_000_003 + self.counters.backwards)
        if self.options.destroy == "occlusion":
            side = min(images.shape[2:])
            row, column, size = self.options.row, self.options.column, self.options.size
            row, column = (side // 4 if start is None else start for start in (row, column))
            size = size or max(side // 2, 1)
            images = images.clone()
            images[:, :, row : row + size, column : column + size] = images.mean((2, 3), keepdim=True)
            return images
        if self.options.destroy == "pixel":
            return shuffle_pixels(images, torch.randperm(images.shape[2] * images.shape[3], generator=generator))
        draws = torch.rand(len(images), self.options.patches**2, generator=generator)
        return shuffle_patches(images, draws.argsort(1), self.options.patches)


def shuffle_patches(images: Tensor, order: Tensor, patches: int) -> Tensor:
    """Images cut into `patches` x `patches`, numbered row by row; place k gets patch `order[i, k]` of image i.

    Where the side is no multiple, images are scaled to one before and back after.
    """
    n, channels, height, width = images.shape
    tall, wide = (max(side // patches, 1) * patches for side in (height, width))
    whole = (tall, wide) == (height, width)
    x = images if whole else F.interpolate(images, (tall, wide), mode="bilinear", antialias=True)
    x = x.reshape(n, channels, patches, tall // patches, patches, wide // patches)
    x = x.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    x = x[torch.arange(n, device=x.device)[:, None], order.to(x.device)].unflatten(1, (patches, patches))
    x = x.permute(0, 3, 1, 4, 2, 5).reshape(n, channels, tall, wide)
    return x if whole else F.interpolate(x, (height, width), mode="bilinear", antialias=True)


def shuffle_pixels(images: Tensor, order: Tensor) -> Tensor:
    """Pixel k, counted row by row, of each new image is pixel `order[k]` of the old one."""
    return images.flatten(2)[:, :, order.to(images.device)].view_as(images)
