"""The scans on a CUDA device: Triton kernels and their launchers."""

from trust_tta.ops.triton.backward import scan_backward as scan_backward
from trust_tta.ops.triton.forward import scan_forward as scan_forward
from trust_tta.ops.triton.launch import states_shape as states_shape
from trust_tta.ops.triton.layout import cross_merge as cross_merge
from trust_tta.ops.triton.layout import cross_scan as cross_scan
from trust_tta.ops.triton.layout import merge_norm as merge_norm
from trust_tta.ops.triton.layout import merge_norm_backward as merge_norm_backward
from trust_tta.ops.triton.scan_map import kept_shape as kept_shape
from trust_tta.ops.triton.scan_map import scan_map_backward as scan_map_backward
from trust_tta.ops.triton.scan_map import scan_map_forward as scan_map_forward
