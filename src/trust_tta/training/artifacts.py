"""Files of a trained network: weights, training record and model card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trust_tta.atomic import write_whole
from trust_tta.data.download import file_sha256
from trust_tta.data.segmentation import SegmentationDataset
from trust_tta.errors import CheckpointError
from trust_tta.models.metadata import ModelInfo
from trust_tta.models.weights import encode_weights
from trust_tta.preprocessing import Preprocessing
from trust_tta.training.data import TrainingData

WEIGHTS, RECORD, CARD, STATE = "model.safetensors", "train.json", "card.md", "checkpoint.pt"

TRAINED = """\
The averaged weights are exported, with running statistics recomputed on the training images.
No noise, blur or color change was part of the augmentation, so corruption benchmarks stay honest."""
FINETUNED = """\
Only the classifier was trained, on features of the frozen backbone, without augmentation.
The backbone is that of the checkpoint named below."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingProvenance:
    """Variant and overrides, data and their hashes, preprocessing and recipe of a trained network."""

    variant: str
    overrides: Mapping[str, Any]
    data: TrainingData
    hashes: Mapping[str, str]  # sha256 by part; the first is that of the training images
    preprocessing: Preprocessing
    recipe: Mapping[str, Any]
    license: str | None = None  # of the weights that training started from

    def metadata(self, accuracy: float) -> dict[str, str]:
        """The metadata of the weights file, from which the network can be rebuilt with its preprocessing."""
        classes = self.data.train.class_names
        return {
            **ModelInfo(
                self.variant, self.overrides, len(classes), classes, self.preprocessing, self.license
            ).to_metadata(),
            "recipe": json.dumps(dict(self.recipe)),
            "accuracy": f"{accuracy:.4f}",
            "data": self.data.description,
            "data_sha256": next(iter(self.hashes.values())),
        }


def write_network(
    folder: Path,
    model: nn.Module,
    origin: TrainingProvenance,
    *,
    accuracy: Mapping[str, float],
    history: list[dict[str, Any]],
    seconds: float,
    description: str = TRAINED,
) -> dict[str, Any]:
    """Write the weights in fp16, the record and the card, each whole or not at all; return the record.

    The last accuracy is that of the written weights.
    """
    path = folder / WEIGHTS
    export_model(model, path, metadata=origin.metadata(list(accuracy.values())[-1]))
    device = next(model.parameters()).device
    record = {
        "model": origin.variant,
        "overrides": dict(origin.overrides),
        "accuracy": dict(accuracy),
        "measured_on": origin.data.measured_on,
        "sha256": file_sha256(path),
        "data": origin.data.description,
        "data_sha256": dict(origin.hashes),
        "seconds": seconds,
        "torch": str(torch.__version__),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "recipe": dict(origin.recipe),
        "history": history,
    }
    card = model_card(
        record,
        name=folder.resolve().name,
        license=f"{origin.license or 'yours to choose'}; that of the data: {origin.data.spec.license}",
        metric="mean IoU" if isinstance(origin.data.train, SegmentationDataset) else "top-1",
        description=description,
    )
    write_whole(folder / RECORD, json.dumps(record, indent=1) + "\n")
    write_whole(folder / CARD, card)
    return record


def export_model(
    model: nn.Module, path: str | PathLike[str], *, dtype: torch.dtype = torch.float16, metadata: Mapping[str, str]
) -> None:
    """Write the parameters in `dtype` under upstream's names, running statistics in full, whole or not at all."""
    weights = dict(model.named_parameters())
    state = {}
    for name, tensor in model.state_dict().items():
        value = tensor.to(dtype) if name in weights else tensor
        if not bool(torch.isfinite(value).all()):
            raise CheckpointError(f"{name} does not fit {dtype} (it has values that become inf or nan); use float32")
        state[name] = value
    write_whole(Path(path), encode_weights(state, metadata))


def model_card(
    record: Mapping[str, Any],
    *,
    name: str,
    license: str,
    metric: str = "top-1",
    description: str = TRAINED,
) -> str:
    """The model card in Markdown, from the training record and a `description` of the exported weights."""
    settings = _rows({key: str(value) for key, value in record["recipe"].items()})
    scores = _rows({key: f"{100 * value:.2f} %" for key, value in record["accuracy"].items()})
    changes = ", ".join(f"{key} = {value}" for key, value in record.get("overrides", {}).items())
    hashes = "\n".join(f"sha256 of the uint8 pixels, {part}: `{sha}`" for part, sha in record["data_sha256"].items())
    return f"""# {name}

A `{record["model"]}`{changes and f" with {changes}"} trained on {record["data"]}. License of the weights: {license}.

Stored as fp16 safetensors with running statistics in float32; loads into a float32 network.
sha256 of the file: `{record["sha256"]}`

## Clean {record["measured_on"]} accuracy

| weights | {metric} |
| --- | --- |
{scores}

## Training

{len(record["history"])} epochs in {record["seconds"]:.0f} s on one {record["device"]}, PyTorch {record["torch"]}.
{description}

| setting | value |
| --- | --- |
{settings}

## Data

{hashes}
"""


def _rows(values: Mapping[str, str]) -> str:
    return "\n".join(f"| {key.replace('_', ' ')} | {value} |" for key, value in values.items())
