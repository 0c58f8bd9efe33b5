"""The selective scan over sequences, and SS2D's scan over maps.

`functional` holds the public functions. `reference` defines what they compute; `cpu` (numba) and `triton` compute it
fast, as the operators of torch.library in `operators`. `tensors` names the tensors and their shapes.
"""

from trust_tta.scan.functional import choose_backend, grouped_scan, merge_norm, scan_map, selective_scan
from trust_tta.scan.tensors import Parameters

__all__ = ["Parameters", "choose_backend", "grouped_scan", "merge_norm", "scan_map", "selective_scan"]
