"""What the authors' own code gives on a small network, recorded in float64: golden/newer/README.md."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from tests.golden import load_golden, relative_error
from tests.methods.newer import adapted_error, golden_run, small_net, stream
from trust_tta.methods.losses import come_entropy, entropy
from trust_tta.methods.registry import create_method

LOSSES: dict[str, Any] = {
    "entropy": entropy,
    "come_10": come_entropy,
    "come_1000": lambda logits: come_entropy(logits, uncertainty=1000),
}


def test_the_network_is_the_one_of_the_files() -> None:
    arrays = load_golden("newer/common.npz")
    for name, key in (("source", "source_outputs"), ("bn", "batch_stat_outputs")):
        method = create_method(name, small_net())
        ours = np.stack([method(images).numpy() for images in stream()])
        assert relative_error(ours, arrays[key]) < 1e-12


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_their_gradients(name: str) -> None:
    arrays = load_golden("newer/losses.npz")
    logits = torch.from_numpy(arrays["loss/logits"]).double().requires_grad_()
    values = LOSSES[name](logits)
    (torch.from_numpy(arrays["loss/weight"]) * values).sum().backward()
    assert logits.grad is not None
    assert relative_error(values.detach().numpy(), arrays[f"loss/{name}/value"]) < 1e-10
    assert relative_error(logits.grad.numpy(), arrays[f"loss/{name}/grad"]) < 1e-10


def test_losses_serve_dense_predictions() -> None:
    """The same value for each pixel as for as many images."""
    logits = torch.from_numpy(load_golden("newer/losses.npz")["loss/logits"]).double()
    dense = logits.view(2, 3, 4, 10).movedim(-1, 1)
    for loss in (entropy, come_entropy):
        torch.testing.assert_close(loss(dense), loss(logits).view(2, 3, 4))


def test_come_tent() -> None:
    hyper, arrays = golden_run("come_tent")
    rule = {key: hyper[key] for key in ("lr", "momentum", "nesterov")}
    method = create_method("tent", small_net(), optimizer="sgd", entropy="come", predict="before", **rule)
    ours = np.stack([method(images).numpy() for images in stream()])
    assert relative_error(ours, arrays["outputs"]) < 1e-8
    assert adapted_error(method.state_dict()["adapted"], arrays) < 1e-8
    assert method.counters.forwards == len(ours)  # one pass per batch


def test_rdumb_between_resets_is_eta() -> None:
    """Its margins are absolute; ours are in parts of ln(classes)."""
    hyper, arrays = golden_run("rdumb")
    margins = {"margin": hyper["e_margin"] / np.log(10), "d_margin": hyper["d_margin"]}
    rule = {key: hyper[key] for key in ("lr", "momentum", "nesterov")}
    method = create_method("eta", small_net(), optimizer="sgd", predict="before", **margins, **rule)
    period = hyper["reset_every"]
    ours = np.stack([method(images).numpy() for images in stream()[:period]])
    assert json.loads(str(arrays["hyper"]))["optimizer"] == "SGD"
    assert relative_error(ours, arrays["outputs"][:period]) < 1e-8
