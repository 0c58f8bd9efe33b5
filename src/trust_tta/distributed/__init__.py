"""Ray clusters: sweeps, trainings and the service; and replicas whose adapted weights are averaged.

Ray is imported where it is used; `averaging` and `replicas` do not need it.
"""

from trust_tta.distributed.averaging import AveragingConfig, Merger
from trust_tta.distributed.replicas import Replica, source_of

__all__ = ["AveragingConfig", "Merger", "Replica", "source_of"]
