"""The scans on a CUDA device: Triton kernels and their launchers."""

from trust_tta.ops.triton.backward import scan_backward as scan_backward
from trust_tta.ops.triton.cache import use_fallback
from trust_tta.ops.triton.cross_scan_merge import cross_merge as cross_merge
from trust_tta.ops.triton.cross_scan_merge import cross_scan as cross_scan
from trust_tta.ops.triton.cross_scan_merge import merge_norm as merge_norm
from trust_tta.ops.triton.cross_scan_merge import merge_norm_backward as merge_norm_backward
from trust_tta.ops.triton.forward import scan_forward as scan_forward
from trust_tta.ops.triton.ss2d import scan_map_backward as scan_map_backward
from trust_tta.ops.triton.ss2d import scan_map_forward as scan_map_forward
from trust_tta.ops.triton.tiling import states_shape as states_shape

use_fallback()
