"""Adapting on a batch without values: on which the host would wait, and tensors of two devices, raise."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._pytree import tree_map_only

from tests.methods.networks import make, vmamba
from trust_tta.methods.registry import create_method, list_methods
from trust_tta.ops.segmentation_logits import upsample

NEEDS_A_VALUE = (DataDependentOutputException, DynamicOutputShapeException)
# Methods that choose images by their predictions, iterate until they converge, or check statistics first.
WAITING = (
    "eta", "eata", "rdumb", "sar", "shot", "lame", "foa", "roid", "cmf", "cotta", "rotta", "deyo", "neo", "t3a",
    "dpcore", "bn_ema",
)  # fmt: skip
CASES: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in list_methods()]
CASES += [(name, {"statistics": "stream"}) for name in ("source", "bn", "tent", "trust", "trust_naive")]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_adapting_needs_no_value_on_the_host(name: str, options: dict[str, Any]) -> None:
    """Tensors are on the device "meta", as autograd without a GPU supports no tensors on "cuda"."""
    given = make(name, vmamba(), **options).options
    fields = {field: getattr(given, field) for field in type(given).model_fields if getattr(given, field) is not None}
    network = vmamba().to("meta")
    network.set_scan_backend("portable")
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(NEEDS_A_VALUE) if name in WAITING else nullcontext():
        method = create_method(name, network, **tree_map_only(Tensor, lambda t: t.to("meta"), fields))
        images = torch.empty(9, 3, 16, 16, device="meta")
        if method.statistics.shift_detector is not None:
            method.statistics._observe_images(images, 1.0)
        assert upsample(method.adapt(images)).device.type == "meta"
