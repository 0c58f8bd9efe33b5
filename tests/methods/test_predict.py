"""Which prediction a method returns: of the adapting pass, or of one more after the update."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.methods.networks import LEARNERS, batches, make, run, same, vmamba
from trust_tta.methods.registry import list_methods

LOOSE: dict[str, dict[str, Any]] = {
    "eta": {"margin": 10.0, "d_margin": 2.0},
    "sar": {"margin": 10.0, "reset_threshold": 0},
    "dpcore": {"new_steps": 1},
}
SIMPLE = ("tent", "eta", "sar", "shot", "trust_naive", "eata", "roid", "cmf", "deyo", "rdumb")


@pytest.mark.parametrize("name", SIMPLE)
@pytest.mark.parametrize("steps", [1, 2])
def test_before_is_the_last_adapting_pass_and_learns_the_same(name: str, steps: int) -> None:
    options = {"steps": steps, **LOOSE.get(name, {})}
    before, after = make(name, vmamba(), predict="before", **options), make(name, vmamba(), **options)
    for images in batches(3):
        late = make(name, vmamba(), **{**options, "steps": 1})
        late.load_state_dict(before.state_dict())
        for _ in range(steps - 1):
            late(images)
        expected = late.evaluate(images)
        torch.testing.assert_close(before(images), expected)
        after(images)
        assert same(before.state_dict()["adapted"], after.state_dict()["adapted"])
    assert after.counters.forwards - before.counters.forwards == 3  # one pass per batch is saved


@pytest.mark.parametrize("name", list_methods())
def test_the_first_batch_is_predicted_as_it_came(name: str) -> None:
    """Before the first update every method that changes nothing but weights is the source with its statistics."""
    (images,) = batches(1)
    options = LOOSE.get(name, {})
    method, still = make(name, vmamba(), predict="before", **options), make("bn", vmamba())
    outputs, expected = method(images), still(images)
    if name in ("source", "rotta", "neo", "dpcore", "bn_ema"):
        expected = make("source", vmamba())(images)
    if name == "lame":
        expected = expected.softmax(1)
    if name in ("roid", "cmf"):
        expected = method.correct(expected)
    if name not in ("ensemble", "foa", "tide", "cotta", "t3a", "bn_alpha"):  # of other orders, inputs, heads, norms
        torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(outputs, method.logits_before.softmax(1) if name == "lame" else method.logits_before)


@pytest.mark.parametrize(
    ("options", "forwards"),
    [
        ({"orders": ["abcd", "bcda"]}, 2),
        ({"orders": ["bcda", "abcd"], "mode": "replicate"}, 2),
        ({"orders": ["bcda", "dbca"]}, 3),  # none is the order of evaluation: one more pass
        ({"orders": ["abcd", "bcda"], "mode": "split"}, 2),  # a pass for all parts, and one over the whole batch
        ({"orders": ["abcd", "bcda"], "stochastic_depth": True}, 4),
    ],
    ids=str,
)
def test_trust_before(options: dict[str, Any], forwards: int) -> None:
    first, second = batches(2)
    method = make("trust", vmamba(drop_path=0.3), predict="before", **options)
    method(first)
    expected = method.evaluate(second)
    start = method.counters.forwards
    torch.testing.assert_close(method(second), expected, rtol=1e-4, atol=1e-4)
    assert method.counters.forwards - start == forwards


def test_trust_before_with_several_steps_is_of_the_last_round() -> None:
    (images,) = batches(1)
    method = make("trust", vmamba(), orders=["abcd", "bcda"], steps=2, predict="before")
    outputs = method(images)
    once = make("trust", vmamba(), orders=["abcd", "bcda"])
    with torch.enable_grad():
        once.adapt_under_orders(images)  # the first round; nothing is averaged between rounds
    torch.testing.assert_close(outputs, once.evaluate(images))
    torch.testing.assert_close(method.logits_before, make("bn", vmamba())(images))


@pytest.mark.parametrize("name", LEARNERS)
def test_stochastic_depth_changes_the_run_repeats_it_and_predicts_undisturbed(name: str) -> None:
    stream, options = batches(2), LOOSE.get(name, {})
    depth = [make(name, vmamba(drop_path=0.5), stochastic_depth=True, **options) for _ in range(2)]
    first = run(depth[0], stream)
    assert same(first, run(depth[1], stream))
    assert not same(first, run(make(name, vmamba(drop_path=0.5), **options), stream))
    if name != "tide":  # which predicts before its update
        torch.testing.assert_close(depth[0](stream[0]), depth[0].evaluate(stream[0]))
