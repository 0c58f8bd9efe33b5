"""The files of a trained network: the weights, the record of how they came about, and a card made from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trust_tta.atomic import replacing
from trust_tta.models.vmamba import VMamba
from trust_tta.preprocessing import Preprocessing
from trust_tta.training.card import model_card
from trust_tta.training.data import TrainingData
from trust_tta.training.export import export_model

WEIGHTS, RECORD, CARD = "model.safetensors", "train.json", "card.md"


@dataclass(frozen=True, kw_only=True, eq=False)
class Origin:
    """Where a network comes from: variant and changes to it, data and their hashes, preprocessing, recipe."""

    variant: str
    overrides: Mapping[str, Any]
    data: TrainingData
    hashes: Mapping[str, str]  # sha256 by part; the first is what was learnt from
    preprocessing: Preprocessing
    recipe: Mapping[str, Any]

    def metadata(self, accuracy: float) -> dict[str, str]:
        """The description inside the file of weights; `bench` reads variant, classes and preprocessing from it."""
        return {
            "variant": self.variant,
            "overrides": json.dumps(dict(self.overrides)),
            "num_classes": str(len(self.data.dataset.class_names)),
            "classes": json.dumps(self.data.dataset.class_names),
            "preprocessing": self.preprocessing.to_json(),
            "recipe": json.dumps(dict(self.recipe)),
            "accuracy": f"{accuracy:.4f}",
            "data": self.data.description,
            "data_sha256": next(iter(self.hashes.values())),
        }


def write_network(
    folder: Path,
    model: VMamba,
    origin: Origin,
    *,
    accuracy: Mapping[str, float],
    history: list[dict[str, Any]],
    seconds: float,
    device: torch.device,
    how: str,
) -> dict[str, Any]:
    """Write the weights in fp16, the record and the card, each whole or not at all; return the record.

    The last of the accuracies is the one of the weights that are written.
    """
    path = folder / WEIGHTS
    export_model(model, path, metadata=origin.metadata(list(accuracy.values())[-1]))
    course = {
        "model": origin.variant,
        "overrides": dict(origin.overrides),
        "accuracy": dict(accuracy),
        "measured_on": origin.data.measured_on,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "data": origin.data.description,
        "data_sha256": dict(origin.hashes),
        "seconds": seconds,
        "torch": str(torch.__version__),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "recipe": dict(origin.recipe),
        "history": history,
    }
    card = model_card(
        course,
        name=folder.resolve().name,
        data=origin.data.description,
        licence=f"yours to choose; that of the data: {origin.data.spec.licence}",
        measured_on=origin.data.measured_on,
        how=how,
    )
    _write(folder / RECORD, json.dumps(course, indent=1) + "\n")
    _write(folder / CARD, card)
    return course


def _write(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
