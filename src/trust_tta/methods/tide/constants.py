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
    correlation_scale: float = 0.05  # autocorrelation of predictions at which the local prior counts half

    # Label shift
    view_errors: float = 2.0  # errors for each disagreement of two views beyond chance
    one_class: float = 1.8  # ratio of squared cosines: 2.1 to 3.3 for one class, at most 1.6 under covariate shifts
    early_distance: float = 0.1  # of the first norms: 0.01 to 0.07 for one class; where noise hides classes, 0.2 to 0.6

    # Learning
    weights: float = 2.0**19  # adapted weights for which `lr` is stated: steps have the same length in all networks
    min_weights: float = 2.0**14  # with fewer, steps are shorter: long ones damage the norms of a ResNet
    shift_decay: float = 0.5  # fraction of the learned change undone when a domain ends: half of it helps other domains


TIDE = TideConstants()
