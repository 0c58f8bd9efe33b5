"""Networks, adapted or not, as files that run without this package: ONNX, PyTorch's export formats, safetensors.

`origin` finds the network and its metadata, `formats` and `onnx` write it, `check` compares what was written with
PyTorch. `export_network` does all of it.
"""

from trust_tta.export.run import FORMATS, Exported, export_network

__all__ = ["FORMATS", "Exported", "export_network"]
