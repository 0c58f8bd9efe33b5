"""Logits of the upstream code, under every traversal order that the golden files hold."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import trust_tta as tt
from tests.golden import load_golden, logit_error
from tests.models.networks import golden_network

FILES = ("vssm_bn.npz", "vssm_ln2d.npz", "vssm_ln2d_n16.npz")


@pytest.mark.parametrize("file", FILES)
def test_logits_of_every_stored_order(file: str) -> None:
    model, golden = golden_network(file)
    stored = [k.removeprefix("logits_") for k in golden if k.startswith("logits_")]
    assert stored
    with torch.no_grad():
        for order in stored:
            logits = model(torch.from_numpy(golden["x"]), order=order).numpy()
            assert logit_error(logits, golden[f"logits_{order}"]) <= 2e-5, order  # README asks for 2e-4


def test_the_released_code_is_right_for_the_ten_self_inverse_orders_alone() -> None:
    model, golden = golden_network("vssm_bn.npz")
    right = []
    with torch.no_grad():
        for order in tt.ScanOrder.all():
            released = golden["asreleased_" + "".join(map(str, order))]
            if logit_error(model(torch.from_numpy(golden["x"]), order=order).numpy(), released) <= 2e-4:
                right.append(order)
    assert right == [order for order in tt.ScanOrder.all() if order == order.inverse]
    assert len(right) == 10


@pytest.mark.parametrize(("which", "kinds"), [("bn", {"norm"}), ("ss2d", {"norm", "scan", "projection"})])
def test_roles_name_what_the_paper_adapts(which: str, kinds: set[str]) -> None:
    golden = load_golden("tta_bn.npz")
    model = tt.VMamba(tt.VMambaConfig.from_official(json.loads(str(golden["config"]))))
    chosen = [name for name, role in model.parameter_roles().items() if role.kind in kinds]
    runs = [run for run in json.loads(str(golden["runs"])).values() if run["which"] == which]
    assert runs
    for run in runs:
        assert sorted(chosen) == sorted(run["adapted"])


def test_golden_inputs_are_not_degenerate() -> None:
    """Orders must change these logits, or agreement under an order would prove nothing."""
    golden = load_golden("vssm_bn.npz")
    logits = [v for k, v in golden.items() if k.startswith("logits_")]
    assert min(np.abs(v - logits[0]).max() for v in logits[1:]) > 1e-3
