"""What a check of a data set has to say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

Level: TypeAlias = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One statement about one file or folder; `dataset` is empty where it belongs to none."""

    level: Level
    dataset: str
    path: Path
    message: str

    def __str__(self) -> str:
        return f"{self.level}: {self.path}: {self.message}"
