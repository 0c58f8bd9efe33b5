"""Many machines: sweeps on a cluster, and replicas that adapt and learn from each other.

Ray is imported where it is used; `averaging`, `replicas` and `coordinator` know nothing of it.
"""

from trust_tta.distributed.averaging import Averaging, Merger
from trust_tta.distributed.replicas import Replica, source_of

__all__ = ["Averaging", "Merger", "Replica", "source_of"]
