"""The scans on a CPU: loops compiled by LLVM, run by PyTorch's own threads."""

from trust_tta.ops.cpu.scan import scan_backward as scan_backward
from trust_tta.ops.cpu.scan import scan_forward as scan_forward
from trust_tta.ops.cpu.scan import states_shape as states_shape
from trust_tta.ops.cpu.ss2d import scan_map_backward as scan_map_backward
from trust_tta.ops.cpu.ss2d import scan_map_forward as scan_map_forward
