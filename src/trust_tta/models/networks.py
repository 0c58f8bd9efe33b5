"""Networks by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trust_tta.models.config import VMambaConfig
from trust_tta.models.variants import VARIANTS, default_preprocessing
from trust_tta.models.vmamba import VMamba
from trust_tta.plugins import resolve


def check_name(name: str) -> VMambaConfig:
    """What `name` stands for; an unknown one is refused with the nearest known one."""
    found: VMambaConfig = resolve(name, VARIANTS, group="trust_tta.models")
    return found


def build_network(name: str, fields: Mapping[str, Any]) -> VMamba:
    """The network `name` with random weights and the preprocessing of its variant; `fields` change the variant."""
    model = VMamba(check_name(name).override(fields))
    model.preprocessing = default_preprocessing(name)
    return model
