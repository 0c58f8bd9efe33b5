"""Networks, adapted or not, as files that run without this package: ONNX, PyTorch's export formats, safetensors.

`source` finds the network and its metadata, `run` and `onnx` write it, `check` compares the file with PyTorch.
`export_network` does all of it. `hub` saves networks and adapted states for the Hugging Face hub.
"""

from trust_tta.export.hub import adapted_from_pretrained, from_pretrained, push_to_hub, save_pretrained
from trust_tta.export.run import FORMATS, Exported, export_network

__all__ = [
    "FORMATS",
    "Exported",
    "adapted_from_pretrained",
    "export_network",
    "from_pretrained",
    "push_to_hub",
    "save_pretrained",
]
