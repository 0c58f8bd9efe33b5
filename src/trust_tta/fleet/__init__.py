"""Many machines: sweeps on a cluster, replicas that adapt and learn from each other, and a fleet that serves.

Ray is imported where it is used; what needs no cluster (`averaging`, `routing`) needs no Ray.
"""
