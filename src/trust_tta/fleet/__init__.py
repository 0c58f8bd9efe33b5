"""Many machines: sweeps on a cluster, and replicas that adapt and learn from each other.

Ray is imported where it is used; `averaging`, `replicas` and `coordinator` know nothing of it.
"""
