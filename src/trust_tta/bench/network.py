"""The network of an experiment, with the preprocessing that belongs to its checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from trust_tta.bench.config import ARRAY, ModelConfig
from trust_tta.data.dataset import Dataset
from trust_tta.data.specs import Layout
from trust_tta.data.transforms import find_preset
from trust_tta.errors import CheckpointError, ConfigError
from trust_tta.models.checkpoint import checkpoint_digest, read_metadata, stated_fields
from trust_tta.models.factory import create_model
from trust_tta.models.pretrained import PRETRAINED, Pretrained, locate
from trust_tta.models.vmamba import VMamba
from trust_tta.preprocessing import Preprocessing

_BARE_LABELS = (ARRAY, "array-c")  # numbers without names, of which not all need occur
_TOLERANCE = 2e-3  # of a mean or deviation: how far published figures of one data set lie apart


@dataclass(frozen=True)
class Checkpoint:
    """A file of weights, and what is known of them: by their name, by the file itself, or by the variant."""

    file: Path
    variant: str
    overrides: Mapping[str, Any]  # fields in which the network differs from the variant
    num_classes: int | None
    preprocessing: Preprocessing
    digest: str


def find_checkpoint(config: ModelConfig, *, domain: str) -> Checkpoint:
    """The checkpoint for `domain`; a preprocessing that contradicts what it was trained with is refused."""
    source = config.checkpoint.replace("{domain}", domain)
    known = PRETRAINED.get(source)
    file = locate(known) if known else Path(source)
    if not file.is_file():
        raise CheckpointError(
            f"no checkpoint at '{file}'; give the path of a .pth or .safetensors file or one of {', '.join(PRETRAINED)}"
        )
    metadata = read_metadata(file)
    variant = config.name or (known.variant if known else metadata.get("variant"))
    if variant is None:
        raise ConfigError(f"'{file}' does not say which network it is of; give model.name")
    fields = stated_fields(metadata, file)
    stated_classes = fields.pop("num_classes", None)
    classes = config.num_classes or (known.num_classes if known else stated_classes)
    stated = _stated_preprocessing(known, metadata, file)
    return Checkpoint(
        file=file,
        variant=variant,
        overrides={**fields, **config.overrides},
        num_classes=classes,
        preprocessing=_choose(config.preprocessing, stated, variant, file),
        digest=checkpoint_digest(file),
    )


def load_network(checkpoint: Checkpoint, *, dataset: Dataset, device: torch.device) -> VMamba:
    """The network in evaluation mode; one with other classes than the data set is refused."""
    classes = len(dataset.class_names)
    outputs = int(checkpoint.num_classes or checkpoint.overrides.get("num_classes") or classes)
    fits = outputs >= classes if dataset.name in _BARE_LABELS else outputs == classes
    if not fits:
        raise ConfigError(
            f"'{checkpoint.file}' tells {outputs} classes apart and {dataset.name} has {classes}; "
            "give a checkpoint that was trained or fine-tuned on these classes"
        )
    overrides = {name: value for name, value in checkpoint.overrides.items() if name != "num_classes"}
    model = create_model(checkpoint.variant, num_classes=outputs, checkpoint=checkpoint.file, **overrides)
    return model.to(device)


def fit_to_layout(preprocessing: Preprocessing, layout: Layout) -> Preprocessing:
    """What is left to do for images as they lie on disk: some were cut when they were made, arrays are never cut."""
    if layout in ("cifar", "array-c"):
        return replace(preprocessing, resize=None, crop=False)
    if layout == "folder-c" and preprocessing.crop:
        return replace(preprocessing, resize=None)
    return preprocessing


def _choose(given: Preprocessing | None, stated: Preprocessing | None, variant: str, file: Path) -> Preprocessing:
    if given is None:
        return stated or (find_preset("cifar32" if variant == "vmamba_nano" else "imagenet"))
    if stated is not None and not _close(given, stated):
        raise ConfigError(
            f"'{file}' was trained with mean {stated.mean} and std {stated.std}, "
            f"and model.preprocessing gives mean {given.mean} and std {given.std}; leave it out or give these"
        )
    return given


def _close(one: Preprocessing, other: Preprocessing) -> bool:
    pairs = zip((*one.mean, *one.std), (*other.mean, *other.std), strict=True)
    return all(math.isclose(a, b, abs_tol=_TOLERANCE) for a, b in pairs)


def _stated_preprocessing(known: Pretrained | None, metadata: Mapping[str, str], file: Path) -> Preprocessing | None:
    """What is known of the checkpoint by its name, or what the file says of itself."""
    if known is not None:
        return known.preprocessing
    if "preprocessing" not in metadata:
        return None
    try:
        return Preprocessing.from_json(metadata["preprocessing"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"the preprocessing stated in '{file}' cannot be read ({error!r}); give model.preprocessing"
        ) from error
