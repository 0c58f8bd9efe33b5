"""The adaptation runs computed with the authors' code."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from tests.golden import Arrays, load_golden, logit_error
from trust_tta.methods.registry import create_method
from trust_tta.models.checkpoint import load_checkpoint
from trust_tta.models.config import VMambaConfig
from trust_tta.models.vmamba import VMamba

METHODS = {
    "source_batch_stats": "bn",
    "tent": "tent",
    "tent_episodic": "tent",
    "trust_naive": "trust_naive",
    "trust_k6": "trust",
    "trust_k2": "trust",
    "trust_k6_episodic": "trust",
}


@pytest.fixture(scope="module")
def golden() -> Arrays:
    return load_golden("tta_bn.npz")


def golden_model(golden: Arrays) -> VMamba:
    model = VMamba(VMambaConfig.from_official(json.loads(str(golden["config"]))))
    parameters = {k.removeprefix("param/"): torch.from_numpy(v) for k, v in golden.items() if k.startswith("param/")}
    load_checkpoint(model, parameters)
    return model


def options_of(settings: dict[str, Any]) -> dict[str, Any]:
    if not settings.get("adapt", True):
        return {}
    options: dict[str, Any] = {"lr": settings["lr"], "episodic": settings.get("episodic", False)}
    return options | ({"orders": settings["orders"]} if "orders" in settings else {})


def test_every_run_is_known(golden: Arrays) -> None:
    assert json.loads(str(golden["runs"])).keys() == METHODS.keys()


@pytest.mark.parametrize("name", METHODS)
def test_run(golden: Arrays, name: str) -> None:
    settings = json.loads(str(golden["runs"]))[name]
    method = create_method(METHODS[name], golden_model(golden), **options_of(settings))
    ours = np.stack([method(torch.from_numpy(images)).numpy() for images in golden["x"]])
    assert logit_error(ours, golden[f"logits/{name}"]) < 2e-5
