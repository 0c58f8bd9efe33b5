r"""Source mixing: how much of the stream's BatchNorm statistics to use beside those of training.

A problem of estimation. In units of the source, let t_i be the channel means and mean squares of image i before a
BatchNorm: 0 and 1 on average over the training images. The mean t of n images of the stream has the squared distance
D = |t - t_source|^2 from the source. It has three causes. Chance explains S = V / (n - 1) of it, for the mean squared
distance V of the t_i to t. Another part, about T, is there on clean images too: training sees augmented images, and
averages over networks that still change. The rest is the shift to follow. The statistics in use go the share

    a  =  D / (D + k^2 S + T)

of the way from the source to the stream: near 0 where nothing has changed, near 1 under a corruption, and with small
batches it grows with the evidence. With T = 0 and k = 1 it is the ridge form of the James-Stein estimator. Noise counts
k = 2 times, because it adds up over the layers.
"""

from __future__ import annotations

from torch import Tensor

from trust_tta.methods.tide.constants import TIDE


def stream_share(distance: Tensor, image_variance: Tensor, images: Tensor) -> Tensor:
    """Share of the stream's statistics from their squared `distance` to the source's.

    `image_variance`: of the same moments between images, the mean over `images` of the squared distance to their mean.
    """
    chance = image_variance / (images - 1).clamp_min(1e-6)
    expected = TIDE.standard_errors**2 * chance + TIDE.clean_distance
    return distance / (distance + expected) * (images > 1)


def mix_statistics(
    stream: tuple[Tensor, Tensor], source: tuple[Tensor, Tensor], share: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean and variance (..., channels) of a mixture of stream and training data in the proportion share : 1 - share.

    The distance between the two means adds to the variance.
    """
    (mean, variance), (source_mean, source_variance) = stream, source
    away = mean - source_mean
    between = share * (1 - share) * away.square()
    return source_mean + share * away, source_variance + share * (variance - source_variance) + between
