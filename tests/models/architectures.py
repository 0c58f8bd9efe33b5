"""Writes assets/architectures.json, by which checkpoints are recognized: `make architectures`, after a new variant."""

from __future__ import annotations

import json
from pathlib import Path

import torch

import trust_tta
from trust_tta.models.checkpoint import fingerprint
from trust_tta.models.networks import build_network
from trust_tta.models.variants import VARIANTS

FILE = Path(trust_tta.__file__).parent / "assets" / "architectures.json"


def architectures() -> dict[str, list[str]]:
    """The variants of each fingerprint, in the order of the registry."""
    found: dict[str, list[str]] = {}
    for variant in VARIANTS:
        with torch.device("meta"):
            found.setdefault(fingerprint(build_network(variant, {}).state_dict()), []).append(variant)
    return found


if __name__ == "__main__":
    lines = [f' "{key}": {json.dumps(variants)}' for key, variants in architectures().items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
