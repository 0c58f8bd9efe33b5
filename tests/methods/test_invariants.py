"""Methods that must agree with one another when an option switches their difference off."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.methods.networks import batches, convnet, make, run, same, vmamba
from trust_tta.methods.base import Method
from trust_tta.methods.eta import Eta
from trust_tta.methods.losses import entropy, mean_entropy, pseudo_label_loss
from trust_tta.methods.sar import Sar

NETWORKS: dict[str, Callable[[], nn.Module]] = {"vmamba": vmamba, "convnet": convnet}


@pytest.fixture(params=NETWORKS)
def pair(request: pytest.FixtureRequest) -> tuple[nn.Module, nn.Module]:
    """Two equal networks."""
    return NETWORKS[request.param](), NETWORKS[request.param]()


def assert_equal_runs(a: Method, b: Method) -> None:
    """Bit for bit, with learning that shows."""
    stream = batches(3)
    before = a.state_dict()["adapted"]
    assert same(run(a, stream), run(b, stream))
    assert same(a.state_dict()["adapted"], b.state_dict()["adapted"])
    assert not same(a.state_dict()["adapted"], before)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("steps", [1, 2])
def test_eta_without_filters_and_weights_is_tent(pair: tuple[nn.Module, nn.Module], optimizer: str, steps: int) -> None:
    common: dict[str, Any] = {"optimizer": optimizer, "steps": steps}
    eta = make("eta", pair[0], margin=math.inf, d_margin=math.inf, weighting=False, **common)
    assert_equal_runs(eta, make("tent", pair[1], **common))


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_sar_without_radius_and_margin_is_tent(pair: tuple[nn.Module, nn.Module], optimizer: str) -> None:
    options: dict[str, Any] = {"rho": 0, "margin": math.inf, "skip_last": False, "reset_threshold": 0}
    sar = make("sar", pair[0], optimizer=optimizer, **options)
    assert_equal_runs(sar, make("tent", pair[1], optimizer=optimizer))


@pytest.mark.parametrize("steps", [1, 2])
def test_trust_with_the_default_order_alone_is_trust_naive(steps: int) -> None:
    trust = make("trust", vmamba(), orders=["abcd"], steps=steps)
    assert_equal_runs(trust, make("trust_naive", vmamba(), steps=steps))


def test_repetition_is_trust_with_one_order_repeated() -> None:
    assert_equal_runs(make("repetition", vmamba(), k=3), make("trust", vmamba(), orders=["abcd"] * 3))


def test_augmentation_of_no_strength_is_repetition() -> None:
    still = make("augmentation", vmamba(), kind="jitter", strength=0.0, k=3)
    assert_equal_runs(still, make("repetition", vmamba(), k=3))


def test_augmentation_of_no_strength_with_orders_is_trust() -> None:
    orders = ["abcd", "bcda", "dcba"]
    still = make("augmentation", vmamba(), kind="jitter", strength=0.0, orders=orders)
    assert_equal_runs(still, make("trust", vmamba(), orders=orders))


def test_ensemble_of_one_is_trust_naive_up_to_the_softmax() -> None:
    ensemble, naive = make("ensemble", vmamba(), k=1), make("trust_naive", vmamba())
    for images in batches(3):
        torch.testing.assert_close(ensemble(images), naive(images).log_softmax(1))


def test_ensemble_is_the_mean_of_independent_methods() -> None:
    orders = ["abcd", "badc", "cdab"]
    ensemble = make("ensemble", vmamba(), orders=orders)
    members = [make("trust", vmamba(), orders=[order], evaluate_order=order) for order in orders]
    for images in batches(3):
        mean = torch.stack([member(images).softmax(1) for member in members]).mean(0)
        torch.testing.assert_close(ensemble(images).exp(), mean)


@pytest.mark.parametrize("name", ["tent", "eta", "sar", "shot", "trust", "augmentation", "ensemble"])
def test_no_learning_rate_is_no_learning(name: str) -> None:
    method, still = make(name, vmamba(), lr=0.0), make("bn", vmamba())
    for images in batches(2):
        logits = method(images)
        if name != "ensemble":  # which predicts in other orders
            assert torch.equal(logits, still(images))
    assert same(method.state_dict()["adapted"], dict(method.weights.source))


def test_losses_against_numpy() -> None:
    logits = 4 * torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    p = np.exp(logits.numpy()) / np.exp(logits.numpy()).sum(1, keepdims=True)
    np.testing.assert_allclose(entropy(logits), -(p * np.log(p)).sum(1))
    np.testing.assert_allclose(mean_entropy(logits), -(p.mean(0) * np.log(p.mean(0))).sum())
    np.testing.assert_allclose(pseudo_label_loss(logits), -np.log(p.max(1)).mean())
    labels = torch.tensor([0, 1, 2, 3, 4, 0, 1])
    np.testing.assert_allclose(pseudo_label_loss(logits, labels), -np.log(p[np.arange(7), labels.numpy()]).mean())


def test_entropy_of_certain_predictions_is_zero_not_nan() -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4]], requires_grad=True)
    loss = entropy(logits).sum()
    assert loss.item() == 0
    assert torch.autograd.grad(loss, logits)[0].isfinite().all()


class Confident(nn.Module):
    """Logits that no batch can shake: entropy zero."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.head = nn.Linear(3, 4)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(images).mean((2, 3)))
        return logits + torch.tensor([40.0, 0, 0, 0])


def test_sar_returns_to_the_source_when_predictions_collapse() -> None:
    sar = make("sar", Confident(), skip_last=False)
    for count, images in enumerate(batches(3), start=1):
        sar(images)
        assert sar.counters.recoveries == count
        assert same(sar.state_dict()["adapted"], dict(sar.weights.source))
        assert not any(moment.any() for moment in sar.state_dict()["optimizer"].values())
        assert sar.state_dict()["extra"] == {}  # the moving mean starts anew


def test_sar_without_threshold_never_returns() -> None:
    sar = make("sar", Confident(), skip_last=False, reset_threshold=0)
    run(sar, batches(3))
    assert sar.counters.recoveries == 0
    assert sar.counters.updates == 3


@pytest.mark.parametrize("name", ["eta", "sar"])
def test_an_empty_selection_changes_nothing(name: str, pair: tuple[nn.Module, nn.Module]) -> None:
    method, still = make(name, pair[0], margin=0.0), make("bn", pair[1])
    for images in batches(2):
        assert torch.equal(method(images), still(images))
    assert method.counters.updates == method.counters.backwards == method.counters.skipped == 0
    assert same(method.state_dict()["adapted"], dict(method.weights.source))


class Fickle(nn.Module):
    """Sure of everything until its weights move, then of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.head = nn.Linear(3, 4)
        self.start = self.norm.weight.detach().clone()

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(images).mean((2, 3))) + torch.tensor([6.0, 0, 0, 0])
        return logits if torch.equal(self.norm.weight, self.start) else logits * 0


def test_sar_comes_down_again_when_no_sample_is_reliable_after_the_climb() -> None:
    sar = make("sar", Fickle(), skip_last=False)
    run(sar, batches(2))
    assert (sar.counters.backwards, sar.counters.updates, sar.counters.skipped) == (2, 0, 0)
    assert same(sar.state_dict()["adapted"], dict(sar.weights.source))


def test_eta_follows_the_predictions_with_momentum(monkeypatch: pytest.MonkeyPatch) -> None:
    eta = make("eta", convnet())
    assert isinstance(eta, Eta)
    for logits in (torch.tensor([[90.0, 0.0], [0.0, 0.0]]), torch.tensor([[0.0, 90.0]])):
        monkeypatch.setattr(eta, "step", lambda loss: torch.tensor(True))
        eta.update(torch.empty(0), logits)
    assert eta.mean_prediction is not None
    torch.testing.assert_close(eta.mean_prediction, torch.tensor([0.9, 0.1]))


def test_sar_follows_the_loss_with_momentum_and_returns_below_the_threshold() -> None:
    sar = make("sar", vmamba(), reset_threshold=0.9)
    assert isinstance(sar, Sar)
    sar.update_mean_loss(1.0)
    sar.update_mean_loss(0.5)
    assert sar.mean_loss == pytest.approx(0.95)
    assert sar.counters.recoveries == 0
    sar.update_mean_loss(0.4)
    assert sar.mean_loss is None
    assert sar.counters.recoveries == 1


def test_sar_leaves_out_the_last_stage_and_norm_by_role() -> None:
    assert not [n for n in make("sar", vmamba()).adapted if n.startswith(("layers.1.", "classifier."))]
    assert list(make("sar", convnet()).adapted) == ["body.1.weight", "body.1.bias"]
    assert len(make("sar", vmamba(), skip_last=False).adapted) == len(make("tent", vmamba()).adapted)


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn1 = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)


class ResNetLike(nn.Module):
    """The names of a ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(3)
        for i in range(1, 5):
            self.add_module(f"layer{i}", nn.Sequential(Stage(), Stage()))
        self.fc = nn.Linear(3, 4)


class ViTLike(nn.Module):
    """The names of a vision transformer, inside another network."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.trunk = nn.Module()
        self.trunk.blocks = nn.ModuleList(nn.ModuleDict({"norm1": nn.LayerNorm(3)}) for _ in range(depth))
        self.trunk.norm = nn.LayerNorm(3)
        self.head = nn.Linear(3, 4)


def test_sar_leaves_out_what_the_official_code_leaves_out_by_name() -> None:
    resnet = [n for n in make("sar", ResNetLike()).adapted if n.endswith("weight")]
    assert resnet == ["bn1.weight", *(f"layer{i}.{j}.bn1.weight" for i in (1, 2, 3) for j in (0, 1))]
    vit = [n for n in make("sar", ViTLike(12)).adapted if n.endswith("weight")]
    assert vit == [f"trunk.blocks.{i}.norm1.weight" for i in range(9)]  # without 9, 10, 11 and the last norm
    deep = [n for n in make("sar", ViTLike(24)).adapted if n.endswith("weight")]
    assert deep == [f"trunk.blocks.{i}.norm1.weight" for i in range(18)]


@pytest.mark.parametrize("classes", [5, 10, 11, 100, 101])
def test_margins_scale_with_the_number_of_classes(classes: int) -> None:
    eta = make("eta", vmamba())
    assert isinstance(eta, Eta)
    assert eta.margin(classes) == pytest.approx(0.4 * math.log(classes))
    onehot = torch.zeros(2, classes)
    onehot[0, 0] = 90
    assert eta.select(onehot).tolist() == [True, False]  # the second knows nothing
    eta.mean_prediction = torch.full((classes,), 1 / classes)
    limit = 0.4 if classes <= 10 else 0.2 if classes <= 100 else 0.05
    chosen = eta.select(onehot)[0].item()  # its cosine to the flat prediction is 1 / sqrt(classes)
    assert chosen == (1 / math.sqrt(classes) < limit)


def test_shot_holds_the_classifier_fixed() -> None:
    model = vmamba()
    shot = make("shot", model)
    assert set(dict(model.named_parameters())) - set(shot.adapted) == {"classifier.head.weight", "classifier.head.bias"}
    head = model.classifier.head.weight.clone()
    run(shot, batches(2))
    assert torch.equal(model.classifier.head.weight, head)


def test_shot_makes_predictions_sure_and_diverse() -> None:
    shot = make("shot", vmamba(), lr=1e-3)
    images = batches(1, images=24)[0]
    start = make("bn", vmamba())(images)
    end = [shot(images) for _ in range(12)][-1]
    gain = entropy(start).mean() - mean_entropy(start) - entropy(end).mean() + mean_entropy(end)
    assert gain > 0.1
    assert mean_entropy(end) > mean_entropy(start) - 0.05
