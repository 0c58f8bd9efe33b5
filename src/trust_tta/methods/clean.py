"""What methods learn from clean images before the stream begins, by the name of the option that takes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from trust_tta.methods.eata import gather_fisher
from trust_tta.methods.foa import gather_source_statistics


def gather_from_clean(name: str, model: nn.Module, batches: Iterable[Tensor], options: Mapping[str, Any]) -> Any:
    """The value of the option `name`, one of `source_statistics` and `fisher`, for a method with these options."""
    if name == "fisher":
        return gather_fisher(model, batches, parameters=options["parameters"], statistics=options["statistics"])
    return gather_source_statistics(model, batches, statistics=options["statistics"])
