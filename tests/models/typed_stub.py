"""Writes `models/typed.pyi`, which tells editors and mypy the network of every name: `make typed`."""

from __future__ import annotations

from pathlib import Path

import trust_tta
from trust_tta.models.config import NetworkConfig, UPerNetConfig, VMambaConfig
from trust_tta.models.variants import VARIANTS

STUB = Path(trust_tta.__file__).parent / "models" / "typed.pyi"
HEADER = '''"""`create_model` with the network of every name. Written by `make typed`: do not edit."""

from os import PathLike
from typing import Any, Literal, overload

from torch import nn

from trust_tta.models.base import ScanNetwork
from trust_tta.models.upernet import UPerNet
from trust_tta.models.vmamba import VMamba
from trust_tta.preprocessing import Preprocessing

'''
OVERLOAD = """@overload
def create_model(
    {name},
    *,
    num_classes: int | None = None,
    checkpoint: str | PathLike[str] | None = None,
    preprocessing: Preprocessing | str | None = None,
    **overrides: Any,
) -> {network}: ...
"""


def network_of(config: NetworkConfig) -> str:
    if isinstance(config, UPerNetConfig):
        return "UPerNet"
    return "VMamba" if type(config) is VMambaConfig else "ScanNetwork"


def render() -> str:
    parts = [HEADER]
    for network in ("VMamba", "ScanNetwork", "UPerNet"):
        names = sorted(name for name, config in VARIANTS.items() if network_of(config) == network)
        quoted = "".join(f'        "{name}",\n' for name in names)
        parts.append(OVERLOAD.format(name=f"name: Literal[\n{quoted}    ]", network=network))
    return "".join([*parts, OVERLOAD.format(name="name: str | None = None", network="nn.Module")])


if __name__ == "__main__":
    STUB.write_text(render())
