"""The served network: loaded from a checkpoint or by its own code, wrapped in a method, and run once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trust_tta.data.images import find_images, read_image
from trust_tta.errors import ConfigError
from trust_tta.methods.base import Method
from trust_tta.methods.registry import create_method
from trust_tta.models.checkpoint import Checkpoint
from trust_tta.preprocessing import Preprocessing, find_preset
from trust_tta.serve.settings import BadRequestError

WARM_UP_IMAGES = 8


@dataclass(frozen=True, eq=False)
class NetworkInfo:
    """The public description of a served network. `outputs`: shape of one image's logits; `notes`: for its users."""

    name: str
    method_name: str
    preprocessing: Preprocessing
    classes: tuple[str, ...] | None
    outputs: tuple[int, ...]
    notes: tuple[str, ...]

    def label_of(self, number: int) -> str:
        return self.classes[number] if self.classes and number < len(self.classes) else str(number)

    def read_label(self, given: Any) -> int:
        """The number of a class that a client gives by number or by name."""
        if isinstance(given, str) and self.classes and given in self.classes:
            return self.classes.index(given)
        count = self.outputs[0]
        if type(given) is int and 0 <= given < count:
            return given
        names = f", or a name such as '{self.classes[0]}'" if self.classes else ""
        raise BadRequestError(f"the label {json.dumps(given)[:60]} is not a class; give 0 to {count - 1}{names}")


@dataclass(frozen=True, eq=False)
class ServedNetwork(NetworkInfo):
    """A network and the method over it, which each stream forks."""

    method: Method
    checkpoint: Checkpoint

    def info(self) -> NetworkInfo:
        """Everything but the weights, for a process that does not load them."""
        return NetworkInfo(**{field.name: getattr(self, field.name) for field in fields(NetworkInfo)})


@dataclass(frozen=True)
class NetworkSource:
    """Origin of a network, as given on the command line.

    `checkpoint`: a file or a known name; None: the weights that `model`, "package.module:Name", loads itself.
    """

    checkpoint: str | None = "vmamba_nano_cifar10"
    model: str | None = None
    preprocessing: str | None = None
    classes: tuple[str, ...] | None = None

    def open(self) -> Checkpoint:
        if self.checkpoint is None and self.model is None:
            raise ConfigError("there is no network; give --checkpoint FILE, --model NAME, or both")
        preset = find_preset(self.preprocessing) if self.preprocessing else None
        return Checkpoint.open(self.checkpoint, variant=self.model, preprocessing=preset, classes=self.classes)

    @property
    def name(self) -> str:
        """The name under which the network is served."""
        if self.checkpoint is None:
            return str(self.model).replace(":", ".").rpartition(".")[2].lower()
        return Path(self.checkpoint).stem if Path(self.checkpoint).exists() else self.checkpoint


def open_network(
    source: NetworkSource | str,
    method: str,
    *,
    options: Mapping[str, Any] | None = None,
    device: str | torch.device = "cpu",
    warm_up: Sequence[int] = (WARM_UP_IMAGES,),
) -> ServedNetwork:
    """Load a network, wrap it in a method, and run it, so that no client waits for compilation.

    `warm_up`: sizes of the batches it is run on; the tiles of GPU kernels depend on them.
    """
    source = NetworkSource(checkpoint=source) if isinstance(source, str) else source
    checkpoint = source.open()
    model, notes = checkpoint.load(device=device), list[str]()
    adapted = create_method(method, model, **(options or {}))
    if adapted.statistics.uses_batch and "statistics" not in (options or {}):
        # One image has no batch statistics: every request by itself would be predicted as the same class.
        adapted = create_method(method, model, **(options or {}), statistics="stream")
        notes.append(
            f"{adapted.name} normalizes by the statistics of the stream, not of the batch: requests may hold one image"
        )
    if adapted.name in ("roid", "cmf"):
        notes.append(f"{adapted.name} rescales logits by class frequencies: its confidence is not a probability")
    size = checkpoint.preprocessing.size
    pixels = np.random.default_rng(0).integers(0, 256, (max(warm_up), size, size, 3), dtype=np.uint8)
    noise = checkpoint.preprocessing(pixels).to(device)
    for images in warm_up:
        adapted.fork()(noise[:images])
    outputs = tuple(adapted.evaluate(noise).shape[1:])
    return ServedNetwork(
        name=source.name,
        method_name=adapted.name,
        preprocessing=checkpoint.preprocessing,
        classes=checkpoint.classes,
        outputs=outputs,
        method=adapted,
        checkpoint=checkpoint.release(),
        notes=tuple(notes),
    )


def read_folder(folder: Path, preprocessing: Preprocessing, *, batch: int) -> Iterator[Tensor]:
    """Batches (n, 3, size, size) of all images below a folder, in an order that mixes its subfolders."""
    files = find_images(folder)
    order = np.random.default_rng(0).permutation(len(files)).tolist()
    for start in range(0, len(files), batch):
        yield preprocessing([read_image(files[i]) for i in order[start : start + batch]])
