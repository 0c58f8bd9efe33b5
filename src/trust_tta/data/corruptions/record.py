"""The note `corrupt.json` beside corrupted data: how it was made, so that a run can go on and never mixes two makes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from trust_tta.data.files import writing
from trust_tta.errors import DataError

RECORD_NAME = "corrupt.json"


@dataclass(frozen=True)
class Record:
    """Everything that decides the bytes of the files beside it."""

    source: str  # sha256 of the pixels, or of the names and sizes of the images
    images: int
    seed: int
    table: str | None
    size: int | None  # side that folders of images are cropped to
    severities: tuple[int, ...]  # blocks of each array; empty for folders, which hold each severity by itself
    generator: int = 1  # goes up when the same request gives other pixels


def claim_folder(folder: Path, record: Record, outputs: Sequence[Path]) -> None:
    """Note `record` in `folder`, or refuse when what is there was made otherwise."""
    path = folder / RECORD_NAME
    if path.exists():
        _refuse_mismatch(path, record)
        return
    foreign = next((output for output in outputs if output.exists()), None)
    if foreign is not None:
        raise DataError(f"{foreign} is there without a {RECORD_NAME} that says how it was made; give another output")
    write_bytes(path, (json.dumps(asdict(record), indent=1) + "\n").encode())


def _refuse_mismatch(path: Path, record: Record) -> None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}); delete it with the files beside it") from error
    wanted = json.loads(json.dumps(asdict(record)))
    if not isinstance(found, dict):
        raise DataError(f"{path} is not a record of corrupted data; delete it with the files beside it")
    for name, value in wanted.items():
        if found.get(name) != value:
            raise DataError(
                f"{path.parent} was made with {name} {found.get(name)!r}, not {value!r}; "
                "give another output folder or the same input and options"
            )


def write_bytes(path: Path, content: bytes) -> None:
    """Write a small file so that a crash leaves the old one or the new one, never half of one."""
    with writing(path) as file:
        file.write(content)
