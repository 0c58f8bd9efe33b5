"""Reset, save, restore, fork: for every method, bit for bit."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

from tests.methods.networks import LEARNERS, batches, convnet, make, run, same, vmamba, weights
from trust_tta.errors import ConfigError, StateError
from trust_tta.methods.base import Method
from trust_tta.methods.registry import create_method, list_methods

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in list_methods()} | {
    "tent-sgd": ("tent", {"optimizer": "sgd"}),
    "tent-episodic": ("tent", {"episodic": True}),
    "bn-stream": ("bn", {"statistics": "stream"}),
    "tent-stream": ("tent", {"statistics": "stream"}),
    "tent-before": ("tent", {"predict": "before", "steps": 2}),
    "tent-depth": ("tent", {"stochastic_depth": True}),
    "tent-nesterov": ("tent", {"optimizer": "sgd", "nesterov": True}),
    "sar-stream-episodic": ("sar", {"statistics": "stream", "episodic": True, "margin": 0.9, "entropy": "come"}),
    "foa-stream": ("foa", {"statistics": "stream"}),
    "trust-stream": ("trust", {"statistics": "stream", "predict": "before"}),
    "trust-split-stream": ("trust", {"statistics": "stream", "mode": "split"}),
    "ensemble-stream": ("ensemble", {"statistics": "stream"}),
    "eta-two-steps": ("eta", {"steps": 2, "margin": 0.9, "d_margin": 0.95}),
    "sar-sgd": ("sar", {"optimizer": "sgd", "margin": 0.9}),
    "eata-sgd": ("eata", {"optimizer": "sgd", "parameters": "ss2d", "lr": 1e-4}),
    "rdumb-every-batch": ("rdumb", {"reset_every": 1}),
    "roid-two-steps": ("roid", {"steps": 2}),
    "cmf-sgd": ("cmf", {"optimizer": "sgd", "nesterov": True}),
    "cotta-sgd": ("cotta", {"optimizer": "sgd", "symmetric": True, "restore": 0.5}),
    "cotta-norms": ("cotta", {"parameters": "bn", "restore": 0.0}),
    "rotta-batch-statistics": ("rotta", {"statistics": "batch", "update_frequency": 5}),
    "dpcore-always-new": ("dpcore", {"rho": 0.0}),
    "dpcore-episodic": ("dpcore", {"episodic": True}),
    "neo-continual": ("neo", {"alpha": 0.1}),
    "t3a-all": ("t3a", {"supports": 0}),
    "bn_ema-batch": ("bn_ema", {"statistics": "batch"}),
    "deyo-pixel": ("deyo", {"destroy": "pixel"}),
    "deyo-occlusion": ("deyo", {"destroy": "occlusion"}),
    "shot-bn": ("shot", {"parameters": "bn"}),
    "lame-knn": ("lame", {"affinity": "knn"}),
    "foa-episodic": ("foa", {"episodic": True}),
    "trust-parallel": ("trust", {"k": 3, "mode": "replicate"}),
    "trust-split": ("trust", {"k": 3, "mode": "split"}),
    "trust-split-batch": ("trust", {"k": 3, "mode": "split", "split_statistics": "batch"}),
    "trust-split-batch-depth": (
        "trust",
        {"k": 2, "mode": "split", "split_statistics": "batch", "stochastic_depth": True, "statistics": "stream"},
    ),
    "trust-slerp-released": ("trust", {"k": 3, "merge": "slerp_released"}),
    "trust-slerp": ("trust", {"k": 2, "merge": "slerp"}),
    "trust-depth": ("trust", {"k": 2, "stochastic_depth": True}),
    "trust-parallel-depth": ("trust", {"k": 2, "mode": "replicate", "stochastic_depth": True}),
    "augmentation-rotation": ("augmentation", {"k": 2, "kind": "rotation"}),
    "augmentation-crop-per-batch": ("augmentation", {"kind": "crop", "per": "batch", "orders": ["abcd", "bcda"]}),
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def variant_of(variant: str, model: nn.Module | None = None) -> Method:
    name, options = VARIANTS[variant]
    method: Method = make(name, vmamba(drop_path=0.3) if model is None else model, **options)
    return method


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@every_variant
def test_reset_is_bit_for_bit(variant: str) -> None:
    model = vmamba(drop_path=0.3)
    before = weights(model)
    method = variant_of(variant, model)
    start, stream = method.state_dict(), batches(2)
    first = run(method, stream)
    method.reset()
    assert same(method.state_dict(), start)
    assert same(weights(model), before)
    assert method.logits_before is None
    assert same(run(method, stream), first)


@every_variant
def test_a_saved_method_goes_on_bit_for_bit(variant: str) -> None:
    stream = batches(4)
    undisturbed = variant_of(variant)
    run(undisturbed, stream[:2])
    state = through_a_file(undisturbed.state_dict())
    assert same(state, undisturbed.state_dict())
    restored = variant_of(variant)
    run(restored, batches(1, seed=9))  # what it has learned meanwhile must not matter
    restored.load_state_dict(state)
    assert same(restored.state_dict(), undisturbed.state_dict())
    assert same(run(restored, stream[2:]), run(undisturbed, stream[2:]))
    assert same(restored.state_dict(), undisturbed.state_dict())


@every_variant
def test_a_state_is_a_copy(variant: str) -> None:
    method = variant_of(variant)
    run(method, batches(1))
    state = method.state_dict()
    kept = through_a_file(state)
    run(method, batches(1, seed=5))
    assert same(state, kept)
    method.load_state_dict(state)
    run(method, batches(1, seed=5))
    assert same(state, kept)


@every_variant
def test_fork_goes_on_alone_and_shares_the_frozen_weights(variant: str) -> None:
    stream = batches(3)
    method = variant_of(variant)
    run(method, stream[:1])
    twin, before = method.fork(), method.state_dict()
    assert same(twin.state_dict(), before)
    expected = run(twin, stream[1:])
    assert same(method.state_dict(), before)  # the fork's learning does not come back
    assert same(run(method, stream[1:]), expected)
    assert same(method.state_dict(), twin.state_dict())
    theirs, callers = dict(twin.model.named_parameters()), dict(method.detach().named_parameters())
    assert callers.keys() <= theirs.keys()
    for name, parameter in method.model.named_parameters():  # the method's own, such as tide's shares, are not frozen
        frozen = name in callers and name not in method.adapted
        assert (parameter.data_ptr() == theirs[name].data_ptr()) == frozen
    assert twin.weights.source_vector is method.weights.source_vector  # nobody writes to it
    twin.reset()
    assert same(method.state_dict()["adapted"], {n: p.detach() for n, p in method.adapted.items()})
    assert twin.detach() is not method.detach()


def test_a_fork_detaches_its_own_weights() -> None:
    method = make("trust_naive", vmamba())
    twin = method.fork()
    twin(batches(1)[0])
    name = next(iter(method.adapted))
    assert torch.equal(twin.detach().get_parameter(name), twin.adapted[name])
    assert not torch.equal(method.detach().get_parameter(name), twin.adapted[name])


@pytest.mark.parametrize("name", LEARNERS)
def test_the_optimizer_is_part_of_the_state(name: str) -> None:
    options: dict[str, Any] = {"eta": {"margin": 0.9, "d_margin": 2.0}, "sar": {"margin": 0.9}}.get(name, {})
    method = make(name, vmamba(), **options)
    run(method, batches(2))
    changed = method.state_dict()
    target = changed["extra"]["members"]["0 abcd"] if name == "ensemble" else changed["optimizer"]
    assert target["step"] > 0
    target["exp_avg"] *= -1
    other = make(name, vmamba(), **options)
    other.load_state_dict(changed)
    images = batches(2, seed=4)
    assert not same(run(other, images), run(method, images))


def test_options_stay_those_of_the_method_that_loads() -> None:
    slow, fast = make("tent", vmamba(), lr=1e-4), make("tent", vmamba(), lr=1e-1)
    run(slow, batches(1))
    fast.load_state_dict(slow.state_dict())
    assert fast.weights.config.lr == 1e-1


STRANGERS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "another method": ("tent", {}, "eta", {}),
    "another optimizer": ("tent", {"optimizer": "sgd"}, "tent", {}),
    "other parameters": ("trust", {"parameters": "bn", "k": 2}, "trust", {"k": 2}),
    "another number of members": ("ensemble", {"k": 3}, "ensemble", {"k": 2}),
    "other orders": ("ensemble", {"orders": ["abcd", "badc"]}, "ensemble", {"orders": ["abcd", "dbca"]}),
    "another search": ("foa", {"seed": 1}, "foa", {}),
}


@pytest.mark.parametrize("case", STRANGERS)
def test_a_state_that_does_not_fit_is_refused_whole(case: str) -> None:
    theirs, their_options, ours, our_options = STRANGERS[case]
    stranger, method = make(theirs, vmamba(), **their_options), make(ours, vmamba(seed=2), **our_options)
    run(stranger, batches(1))
    run(method, batches(1, seed=4))
    before = method.state_dict()
    with pytest.raises(StateError) as error:
        method.load_state_dict(stranger.state_dict())
    assert "\n" not in str(error.value)
    assert same(method.state_dict(), before)


@pytest.mark.parametrize("missing", ["adapted", "optimizer", "extra", "counters", "format", "method"])
def test_a_broken_state_is_refused_whole(missing: str) -> None:
    method = make("tent", vmamba())
    run(method, batches(1))
    before, broken = method.state_dict(), make("tent", vmamba(seed=1)).state_dict()
    del broken[missing]
    with pytest.raises(StateError):
        method.load_state_dict(broken)
    assert same(method.state_dict(), before)


def test_a_state_with_weights_that_are_not_finite_is_refused_whole() -> None:
    method = make("tent", vmamba())
    before, spoilt = method.state_dict(), method.state_dict()
    next(iter(spoilt["adapted"].values()))[0] = torch.nan
    with pytest.raises(StateError, match="not finite; take an earlier one"):
        method.load_state_dict(spoilt)
    assert same(method.state_dict(), before)


def test_something_that_is_no_state_is_refused() -> None:
    with pytest.raises(StateError, match="list"):
        make("tent", vmamba()).load_state_dict([])


def test_a_state_of_another_network_is_refused() -> None:
    with pytest.raises(StateError, match="adapted lacks 'patch_embed"):
        make("tent", vmamba()).load_state_dict(make("tent", convnet()).state_dict())


def test_detach_gives_the_callers_network_with_the_adapted_weights() -> None:
    model = vmamba()
    before = weights(model)
    method = make("trust", model, k=2)
    run(method, batches(2))
    assert method.detach() is model
    after = weights(model)
    assert same({n: after[n] for n in method.adapted}, method.state_dict()["adapted"])
    changed = {n for n in after if not torch.equal(after[n], before[n])}
    assert changed == set(method.adapted)  # every adapted weight moved, nothing else: no running statistics either


def test_detach_after_a_move_to_another_dtype() -> None:
    model = vmamba()
    method = make("tent", model)
    method.double()
    method(batches(1)[0].double())
    name = next(iter(method.adapted))
    torch.testing.assert_close(method.detach().get_parameter(name), method.adapted[name].float())


@pytest.mark.parametrize("name", ["eta", "foa"])
def test_moving_statistics_follow_a_move_to_another_dtype(name: str) -> None:
    options = {"margin": 9.0, "d_margin": 2.0} if name == "eta" else {}
    method = make(name, vmamba(), **options)
    first, second = batches(2)
    method(first)
    outputs = method.double()(second.double())
    assert outputs.dtype == torch.float64
    assert outputs.isfinite().all()


def test_the_ensemble_leaves_the_callers_network_at_the_source() -> None:
    model = vmamba()
    before = weights(model)
    ensemble = make("ensemble", model, k=2)
    run(ensemble, batches(2))
    assert same(weights(ensemble.detach()), before)


@pytest.mark.parametrize("name", list_methods())
def test_two_methods_on_two_networks_share_nothing(name: str) -> None:
    stream = batches(2)
    alone = run(make(name, vmamba()), stream)
    one, other = make(name, vmamba()), make(name, vmamba())
    turns = [(one(images), other(images)) for images in stream]
    assert same([a for a, _ in turns], alone)
    assert same([b for _, b in turns], alone)
    pointers = {t.data_ptr() for t in one.model.state_dict().values() if t.numel()}
    assert pointers.isdisjoint(t.data_ptr() for t in other.model.state_dict().values() if t.numel())


def test_registry_is_in_the_order_of_the_contract() -> None:
    names = "source bn tent eta sar shot lame foa trust_naive trust ensemble repetition augmentation tide "
    names += "eata roid cmf cotta rotta deyo rdumb neo t3a dpcore bn_alpha bn_ema"
    assert list_methods() == names.split()


def test_unknown_names_and_options_list_the_valid_ones() -> None:
    with pytest.raises(ConfigError, match="unknown method 'tend'; did you mean 'tent'"):
        create_method("tend", vmamba())
    with pytest.raises(
        ConfigError, match="learning_rate: there is no such option; choose one of statistics, predict, lr, steps"
    ):
        create_method("tent", vmamba(), learning_rate=1)
    with pytest.raises(ConfigError, match="method 'source': lr: there is no such option; choose one of statistics"):
        create_method("source", vmamba(), lr=1)
    with pytest.raises(ConfigError, match="choose one of adam, sgd"):
        create_method("tent", vmamba(), optimizer="lion")
