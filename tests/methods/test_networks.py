"""Requirements of the methods on a network, and their costs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.methods.networks import CLASSES, LEARNERS, batches, convnet, make, run, vmamba, weights
from trust_tta.errors import ConfigError
from trust_tta.methods.parameters import select
from trust_tta.methods.registry import list_methods

PLAIN = (
    "source",
    "bn",
    "tent",
    "eta",
    "sar",
    "shot",
    "lame",
    "tide",
    "eata",
    "roid",
    "cmf",
    "cotta",
    "rotta",
    "deyo",
    "rdumb",
    "neo",
    "t3a",
    "bn_alpha",
    "bn_ema",
)


@pytest.mark.parametrize("name", list_methods())
def test_layer_norm_networks_work_and_take_one_image(name: str) -> None:
    method = make(name, vmamba("layer"))
    for images in (*batches(2), batches(1, images=1)[0]):
        assert method(images).isfinite().all()
    if name in LEARNERS:
        assert method.adapted
        assert any("norm" in n for n in method.adapted)


COUNTS: dict[str, tuple[dict[str, Any], int, int, int]] = {  # forwards, backwards, updates of one batch
    "source": ({}, 1, 0, 0),
    "bn": ({}, 1, 0, 0),
    "tent": ({"steps": 3}, 4, 3, 3),
    "eta": ({"margin": 10.0, "d_margin": 2.0}, 2, 1, 1),
    "sar": ({"margin": 10.0, "reset_threshold": 0}, 3, 2, 1),
    "shot": ({}, 2, 1, 1),
    "lame": ({}, 1, 0, 0),
    "foa": ({"population": 27}, 28, 0, 1),
    "trust_naive": ({}, 2, 1, 1),
    "trust": ({"k": 6}, 7, 6, 6),
    "trust parallel": ({"k": 3, "mode": "replicate"}, 4, 3, 3),
    "trust split": ({"k": 3, "mode": "split"}, 2, 1, 3),
    "trust depth": ({"k": 3, "stochastic_depth": True}, 7, 3, 3),
    "ensemble": ({"k": 3}, 6, 3, 3),
    "repetition": ({"k": 4}, 5, 4, 4),
    "augmentation": ({"k": 3, "steps": 2}, 7, 6, 6),
    "eata": ({}, 2, 1, 1),
    "rdumb": ({}, 2, 1, 1),
    "roid": ({}, 3, 1, 1),
    "cmf": ({"steps": 2}, 5, 2, 2),
    "deyo": ({}, 3, 1, 1),
    "cotta": ({"augmentations": 4, "steps": 2}, 13, 2, 2),
    "cotta sure": ({"threshold": 0.0}, 4, 1, 1),
    "rotta": ({}, 4, 1, 1),
    "rotta often": ({"update_frequency": 3}, 8, 3, 3),
    "neo": ({}, 1, 0, 0),
    "t3a": ({}, 1, 0, 0),
    "dpcore": ({"steps": 3}, 5, 3, 3),
    "bn_alpha": ({}, 1, 0, 0),
    "bn_ema": ({}, 2, 0, 0),
}


@pytest.mark.parametrize("case", COUNTS)
def test_counters_are_exact(case: str) -> None:
    options, forwards, backwards, updates = COUNTS[case]
    method = make(case.split()[0], vmamba(), **options)
    run(method, batches(2))
    counters = method.counters
    assert (counters.batches, counters.skipped) == (2, 0)
    assert (counters.forwards, counters.backwards, counters.updates) == (2 * forwards, 2 * backwards, 2 * updates)


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_network_will_do(name: str) -> None:
    model = convnet()
    before = weights(model)
    method = make(name, model, **({"margin": 0.9} if name in ("eta", "sar") else {}))
    logits = run(method, batches(2))[-1]
    assert logits.shape == (9, CLASSES)
    assert logits.isfinite().all()
    changed = {n for n, value in weights(model).items() if not torch.equal(value, before[n])}
    assert changed == set(method.adapted)


class NoNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, CLASSES, 3)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.conv(images).mean((2, 3))
        return logits


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("tent", "no norm parameters"),
        ("eta", "no norm parameters"),
        ("sar", "no norm parameters"),
        ("shot", "no linear classifier"),
        ("lame", "needs one linear classifier"),
        ("roid", "no norm parameters"),
        ("rotta", "no norm parameters"),
        ("neo", "needs one linear classifier"),
        ("dpcore", "needs one linear classifier"),
        ("t3a", "needs one linear classifier"),
        ("deyo", "no norm parameters"),
    ],
)
def test_a_network_that_lacks_what_is_needed_is_refused_with_the_reason(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make(name, NoNorm())


def test_scan_parameters_are_not_silently_left_out() -> None:
    with pytest.raises(ConfigError, match="no scan or projection parameters"):
        make("tent", convnet(), parameters="ss2d")


def resnet() -> nn.Module:
    """The names of a ResNet: a first norm, then four layers of two blocks."""
    layers = {
        f"layer{i}": nn.Sequential(*(nn.ModuleDict({"bn1": nn.BatchNorm2d(4)}) for _ in "ab")) for i in range(1, 5)
    }
    return nn.ModuleDict({"conv1": nn.Conv2d(3, 4, 3), "bn1": nn.BatchNorm2d(4), **layers, "fc": nn.Linear(4, CLASSES)})


def vit(blocks: int = 12) -> nn.Module:
    """The names of a ViT: blocks of two norms, and a norm before the head."""
    block = {"norm1": nn.LayerNorm(4), "attn": nn.Linear(4, 4), "norm2": nn.LayerNorm(4)}
    found = nn.Sequential(*(nn.ModuleDict(copy.deepcopy(block)) for _ in range(blocks)))
    return nn.ModuleDict({"blocks": found, "norm": nn.LayerNorm(4), "head": nn.Linear(4, CLASSES)})


@pytest.mark.parametrize(
    ("network", "left_out"),
    [(resnet, ("layer4.",)), (vit, ("blocks.9.", "blocks.10.", "blocks.11.", "norm."))],
    ids=["resnet", "vit"],
)
@pytest.mark.parametrize("name", ["sar", "deyo"])
def test_the_last_stage_is_what_the_official_code_leaves_out_by_name(
    name: str, network: Callable[[], nn.Module], left_out: tuple[str, ...]
) -> None:
    norms = set(select(network(), "bn"))
    adapted = set(make(name, network()).adapted)
    assert adapted == {parameter for parameter in norms if not parameter.startswith(left_out)}
    assert norms - adapted
