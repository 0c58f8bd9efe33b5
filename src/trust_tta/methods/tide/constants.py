"""The constants of tide, in one place, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TideConstants:
    """Numbers are images unless said otherwise; a memory of m images halves old weights after m new images."""

    unit: float = 128.0  # images for which `lr` and `source_decay` are stated, and of prior weight elsewhere

    # Stream statistics of the BatchNorms
    stream_memory: float = 10240.0  # long enough for a run of each class; new domains cut it
    standard_errors: float = 2.0  # of chance that a shift is weighed against: noise adds up over layers
    clean_distance: float = 0.02  # squared distance that clean images have; 0.001 to 0.02 in a ResNet and a VMamba

    # Shift detector
    recent_images: float = 16.0  # neighbors in the stream: averages out single images; half as many survive a shift
    feature_variance: float = 0.1  # of a description within a domain; 0.07 to 0.18 in photographs and drawings
    class_distance: float = 0.4  # squared distance in variances that a run of one class may have from the domain's mean
    shift_distance: float = 0.15  # distance beyond it at which a shift is as likely as not

    # Domain clusters
    clusters: int = 8  # more need more images for statistics each; fewer merge noise with blur
    mixed_variance: float = 0.25  # of descriptions above which a batch holds several domains

    # Class prior
    clean_bias: float = 0.05  # squared mean log-probability of a class on clean images, over the mean square
    marginal_memory: float = 4096.0  # of the mean prediction, cut at shifts
    correlation_scale: float = 0.05  # autocorrelation of predictions at which the local prior counts half

    # Learning
    weights: float = 2.0**19  # adapted weights for which `lr` is stated: steps have the same length in all networks
    min_weights: float = 2.0**14  # with fewer, steps are shorter: long ones damage the norms of a ResNet
    domain_images: float = 1024.0  # over which feature variances, label correlations and errors are averaged
    shift_decay: float = 0.5  # fraction of the learned change undone when a domain ends: half of it helps other domains
    unknown_shift: float = 0.5  # evidence of a shift where nothing measures it: segmentation without BatchNorm


TIDE = TideConstants()
