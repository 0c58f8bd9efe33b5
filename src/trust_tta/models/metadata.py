"""Metadata of a weights file about its network: strings by name, some of them JSON, as safetensors stores them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from trust_tta.config_io import parse_json
from trust_tta.errors import CheckpointError, ConfigError
from trust_tta.preprocessing import Preprocessing
from trust_tta.schema import show

Fields: TypeAlias = Mapping[str, Any]

NO_FIELDS: Fields = MappingProxyType({})


@dataclass(frozen=True)
class ModelInfo:
    """Facts about a network besides its weights; None: unknown."""

    variant: str | None  # ours, or "package.module:Name"
    fields: Fields  # in which the network differs from the variant; the arguments of a factory
    num_classes: int | None
    classes: tuple[str, ...] | None  # names in label order
    preprocessing: Preprocessing | None
    license: str | None = None  # of the weights

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str], file: Path | None) -> ModelInfo:
        """Facts from the metadata of `file`."""
        fields = _read_json(metadata, "overrides", dict, file) or {}
        return ModelInfo(
            variant=metadata.get("variant"),
            fields={name: value for name, value in fields.items() if name != "num_classes"},
            num_classes=_read_json(metadata, "num_classes", int, file),
            classes=tuple(_read_json(metadata, "classes", list, file) or ()) or None,
            preprocessing=_read_json(metadata, "preprocessing", dict, file),
            license=metadata.get("license"),
        )

    def to_metadata(self) -> dict[str, str]:
        """Metadata of a weights file; the inverse of `from_metadata`."""
        texts = {"variant": self.variant, "overrides": json.dumps(dict(self.fields))} if self.variant else {}
        texts |= {"num_classes": str(self.num_classes)} if self.num_classes else {}
        texts |= {"classes": json.dumps(self.classes)} if self.classes else {}
        texts |= {"license": self.license} if self.license else {}
        return texts | ({"preprocessing": self.preprocessing.to_json()} if self.preprocessing else {})


def _read_json(metadata: Mapping[str, str], name: str, kind: type[Any], file: Path | None) -> Any:
    """A value of the metadata, checked; None where it is absent."""
    if name not in metadata:
        return None
    try:
        value: Any = parse_json(metadata[name], where="it", error=CheckpointError)
        if not isinstance(value, kind):
            raise CheckpointError(f"it is {show(value)}")
        if name == "classes" and not all(isinstance(each, str) for each in value):
            raise CheckpointError("a class name is not a string")
        if name == "preprocessing":
            if missing := [key for key in ("size", "mean", "std") if key not in value]:
                raise CheckpointError(f"it lacks {', '.join(missing)}")
            return Preprocessing.from_mapping(value, where="")
    except (CheckpointError, ConfigError) as error:
        raise CheckpointError(
            f"the {name} stated in '{file}' cannot be read ({error}); load its weights into a network of your own "
            "with load_checkpoint"
        ) from None
    return value
