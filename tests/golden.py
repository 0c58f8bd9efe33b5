"""Golden numbers of the original code, from $TRUST_TTA_GOLDEN, ../shared/golden or tests/golden."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
BESIDE = ROOT.parent / "shared"

Arrays = dict[str, np.ndarray[Any, Any]]


def shared_path(relative: str) -> Path:
    """A file of the folder beside the repository, or a skip that says where it was looked for."""
    path = BESIDE / relative
    if not path.is_file():
        pytest.skip(f"'{relative}' is not in the folder 'shared' beside the repository")
    return path


def shared_folder(relative: str) -> Path:
    """A folder of the folder beside the repository, or a skip that says where it was looked for."""
    path = BESIDE / relative
    if not path.is_dir():
        pytest.skip(f"'{relative}' is not in the folder 'shared' beside the repository")
    return path


def golden_folder(name: str) -> Path | None:
    """The first folder that holds the golden file `name`, as "scan_n1.npz" or "newer/common.npz"."""
    given = os.environ.get("TRUST_TTA_GOLDEN")
    folders = ([Path(given)] if given else []) + [BESIDE / "golden", ROOT / "tests" / "golden"]
    return next((folder for folder in folders if (folder / name).is_file()), None)


def golden_path(name: str) -> Path:
    """The golden file `name`, or a skip that says where it was looked for."""
    folder = golden_folder(name)
    if folder is None:
        text = f"golden file '{name}' is in none of $TRUST_TTA_GOLDEN, ../shared/golden and tests/golden"
        pytest.skip(text, allow_module_level=True)
    return folder / name


def load_golden(name: str) -> Arrays:
    """The arrays of a golden .npz file."""
    with np.load(golden_path(name)) as arrays:
        return dict(arrays)


def load_golden_json(name: str) -> dict[str, Any]:
    """The content of a golden .json file."""
    content: dict[str, Any] = json.loads(golden_path(name).read_text(encoding="utf-8"))
    return content


def relative_error(actual: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    """The largest difference over the largest expected value; NaN where anything is NaN."""
    difference = np.abs(actual.astype(np.float64) - expected)
    return float(difference.max() / np.abs(expected).max())


def logit_error(actual: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    """The measure of golden/README.md: the largest difference over max(1, largest logit)."""
    return float(np.abs(actual - expected).max() / max(1.0, np.abs(expected).max()))
