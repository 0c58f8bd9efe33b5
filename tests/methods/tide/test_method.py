"""TIDE: its loss against golden numbers, its parts against closed forms, and what it promises of batch sizes."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.golden import load_golden
from tests.methods.networks import CLASSES, batches, convnet, make, run, same, vmamba
from trust_tta.errors import StateError, TrustWarning
from trust_tta.methods.tide import method as tide_method
from trust_tta.methods.tide.class_prior import PriorMemory, bias_share, correct_prior
from trust_tta.methods.tide.method import Tide, adaptation_loss, step_scale


def golden_cases() -> list[int]:
    return list(range(len(json.loads(str(load_golden("newer/mcc.npz")["hyper"]))["cases"])))


@pytest.mark.parametrize("case", golden_cases())
def test_loss_of_pixels_is_minimum_class_confusion(case: int) -> None:
    arrays = load_golden("newer/mcc.npz")
    temperature = json.loads(str(arrays["hyper"]))["cases"][case]["temperature"]
    logits = torch.tensor(arrays[f"case/{case}/logits"], dtype=torch.float64, requires_grad=True)
    loss = adaptation_loss(logits * (2.5 / temperature), None)  # its own temperature is 2.5
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss.item() == pytest.approx(float(arrays[f"case/{case}/value"]), abs=1e-10)
    np.testing.assert_allclose(gradient.numpy(), arrays[f"case/{case}/grad"], atol=1e-10)


def stream_of(labels: list[int], *, sureness: float = 3.0, seed: int = 0) -> Tensor:
    """Log-probabilities (1, n, classes) of a classifier that is calibrated and not always right."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(len(labels), CLASSES, generator=generator)
    z[torch.arange(len(labels)), torch.tensor(labels)] += sureness
    return z.log_softmax(1)[None]


def test_loss_of_images_is_the_negative_mean_divergence_from_the_marginal() -> None:
    logits, marginal = torch.randn(6, CLASSES), torch.rand(CLASSES) * 100
    p = logits.softmax(1).double().numpy()
    q = (marginal / marginal.sum()).double().numpy()
    expected = -(p * np.log(p / q)).sum(1).mean()
    assert float(adaptation_loss(logits, marginal)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("weights", [2**14, 2**17, 2**21])
def test_steps_are_equally_long_for_few_and_many_weights(weights: int) -> None:
    """The length of a vector that moves by this factor in each weight."""
    assert step_scale(1.0, weights) * math.sqrt(weights) == pytest.approx(2**9.5)
    assert step_scale(0.25, weights) == pytest.approx(step_scale(1.0, weights) / 2)
    assert step_scale(1.0, 16) == step_scale(1.0, 2**14)  # very few weights do not move further


def test_removed_options_warn() -> None:
    with pytest.warns(TrustWarning, match="tide has no option 'loss' any more"):
        make("tide", convnet(), loss="information")


def test_renamed_options_warn_and_still_work() -> None:
    with pytest.warns(TrustWarning, match="'pull' of tide is now 'source_decay'"):
        method: Tide = make("tide", convnet(), pull=0.5)
    assert method.options.source_decay == 0.5


def test_states_of_the_old_prior_are_refused_in_one_line() -> None:
    method = make("tide", convnet())
    state = method.state_dict()
    state["extra"] = {"frequencies": torch.ones(CLASSES)}
    with pytest.raises(StateError, match="before its class prior; adapt again from the source"):
        method.load_state_dict(state)


def test_states_of_the_loss_by_class_confusion_are_read() -> None:
    """Without the sums that it did not have: the bias of the network is estimated anew."""
    method, other = make("tide", convnet()), make("tide", convnet())
    run(method, batches(1))
    state = method.state_dict()
    state["extra"] = {n: value for n, value in state["extra"].items() if n not in ("scores", "spread")}
    other.load_state_dict({**state, "extra": {**state["extra"], "confusion": torch.ones(CLASSES, CLASSES)}})
    assert same(other.state_dict(), state)
    assert other(batches(2)[1]).isfinite().all()


@pytest.mark.parametrize("images", [1, 2, 7, 64, 512])
def test_every_batch_size_works_without_an_option(images: int) -> None:
    method = make("tide", vmamba())
    for logits in run(method, batches(3, images=images)):
        assert logits.shape == (images, CLASSES)
        assert torch.allclose(logits.exp().sum(1), torch.ones(images), atol=1e-5)
    assert method.counters.updates == 3


def test_the_pull_alone_brings_the_weights_back_by_the_images_seen() -> None:
    """With lr=0: 256 images halve what 0.01 per 128 images leaves, whatever the size of the batches."""
    distances = []
    for images in (2, 8):
        method: Tide = make("tide", convnet(), lr=0.0, source_decay=0.5)
        source = method.weights.snapshot()
        method.weights.load(source + 1)
        run(method, batches(16 // images, images=images))
        distances.append(float((method.weights.snapshot() - source).mean()))
    assert distances[0] == pytest.approx(distances[1], rel=1e-4)
    assert distances[0] == pytest.approx(0.5 ** (16 / 128), rel=1e-4)


def test_an_update_is_as_long_as_the_square_root_of_the_images() -> None:
    """Adam's first step has the length of the learning rate in every weight."""
    moved = {}
    for images in (2, 8):
        method: Tide = make("tide", convnet(), lr=1e-3, source_decay=0.0, step_scaling=False, views="none")
        before = method.weights.snapshot()
        method(batches(1, images=images)[0])
        moved[images] = float((method.weights.snapshot() - before).abs().max())
    factor = step_scale(1.0, len(before))
    assert moved[2] == pytest.approx(1e-3 * factor * math.sqrt(2 / 128), rel=1e-2)
    assert moved[8] == pytest.approx(1e-3 * factor * math.sqrt(8 / 128), rel=1e-2)


def test_expected_errors_are_the_mean_over_the_last_images_of_the_domain() -> None:
    """A plain mean over the images that the shift detector counts; a new domain begins anew."""
    method: Tide = make("tide", convnet())
    detector = method.statistics.shift_detector
    assert detector is not None
    streams = [stream_of([i % CLASSES for i in range(64)], sureness=s, seed=i)[0] for i, s in enumerate((3, 5, 1, 4))]
    wrong = [float(1 - p.exp().amax(1).mean()) for p in streams]
    expected = [wrong[0], (wrong[0] + wrong[1]) / 2, (sum(wrong[:2]) / 2) * 15 / 16 + wrong[2] / 16, wrong[3]]
    for images, p, error in zip((64, 128, 1024, 64), streams, expected, strict=True):
        detector.images.fill_(images)
        method.error = method.expected_error(p)
        assert method.error is not None
        assert float(method.error) == pytest.approx(error, rel=1e-5)


@pytest.mark.parametrize(("error", "stream", "pace"), [(0.0, 0.3, 0.3), (0.5, 0.4, 0.2), (1.0, 0.9, 0.0), (0.2, 0, 0)])
def test_steps_are_short_without_signs_of_a_shift(error: float, stream: float, pace: float) -> None:
    method: Tide = make("tide", convnet())
    for norm in method.statistics.stream_norms:
        norm.share.fill_(stream)
    assert float(method.pace(torch.tensor(error), torch.tensor(0.9))) == pytest.approx(pace)


def test_without_a_shift_a_preference_is_the_networks_own() -> None:
    """Every image has the same even prediction but for a preference: it is corrected as far as the stream shifted."""
    p = torch.tensor([0.5, 0.25, 0.25]).repeat(64, 1)
    ratios = []
    for shift in (0.0, 0.5, 1.0):
        corrected = correct_prior(p, PriorMemory.empty(p), shift=torch.tensor(shift)).p[-1]
        ratios.append(float((corrected[0] / corrected[1]).log()))
    assert ratios[0] == pytest.approx(math.log(2), abs=1e-4)
    assert ratios[1] == pytest.approx((ratios[0] + ratios[2]) / 2, abs=1e-4)
    assert abs(ratios[2]) < 0.1


def test_without_batchnorm_the_bias_of_predictions_tells_a_shift() -> None:
    method: Tide = make("tide", vmamba("layer"))
    assert method.statistics.stream_share() is None
    assert float(method.pace(torch.tensor(0.5), torch.tensor(0.4))) == pytest.approx(0.2)


def test_the_first_images_are_no_sign_of_a_bias() -> None:
    """Even scores have no bias, scores that never change nothing else, and one image tells nothing."""
    alike = torch.tensor([[2.0, -1.0, -1.0]])
    assert float(bias_share(0 * alike, torch.tensor([[64.0, 32.0]]))) == 0
    assert float(bias_share(32 * alike, torch.tensor([[32 * 2.0, 32.0]]))) == pytest.approx(1 / 1.05)
    assert float(bias_share(alike, torch.tensor([[2.0, 1.0]]))) == 0


def test_without_step_scaling_steps_keep_their_length() -> None:
    assert float(make("tide", convnet(), step_scaling=False).pace(torch.tensor(0.01), None)) == 1


def test_a_mirrored_batch_has_the_same_prediction() -> None:
    """Two views are exchanged: nothing but the rounding may change, which updates would enlarge."""
    one, other = make("tide", vmamba(), lr=0.0), make("tide", vmamba(), lr=0.0)
    for images in batches(2):
        assert torch.allclose(one(images), other(images.flip(-1)), atol=1e-4)


class RawPixels(nn.Module):
    """A small ConvNet that takes images of so many units for each of its own."""

    def __init__(self, units: float) -> None:
        super().__init__()
        self.network, self.units = convnet(), units

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images / self.units)  # type: ignore[no-any-return]


def test_a_network_for_pixels_of_0_to_255_adapts_as_one_for_normalized_images() -> None:
    found = []
    for units in (1.0, 64.0):
        method = make("tide", RawPixels(units))
        found.append([method(units * (0.5 + 3 * images)) for images in batches(3)])
        assert not method.statistics.clusters.active
    assert all(map(torch.equal, *found))


def test_a_loss_that_is_not_finite_moves_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    method: Tide = make("tide", vmamba())
    first, second = batches(2)
    method(first)
    before = method.state_dict()
    monkeypatch.setattr(tide_method, "adaptation_loss", lambda logits, marginal: logits.sum() * float("nan"))
    assert method(second).isfinite().all()
    after = method.state_dict()
    assert same(after["adapted"], before["adapted"])
    assert same(after["optimizer"], before["optimizer"])
    assert (after["counters"]["updates"], after["counters"]["skipped"]) == (1, 1)


class Dense(nn.Module):
    """Predicts every pixel of a map half as large as the image."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Conv2d(8, CLASSES, 1)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(images))
        return logits


def test_dense_predictions_are_mirrored_back() -> None:
    images = batches(1, images=2)[0]
    model = Dense().eval()
    expected = torch.stack([model(images).softmax(1), model(images.flip(-1)).softmax(1).flip(-1)]).mean(0)
    method = make("tide", model, statistics="source", lr=0.0)
    assert torch.allclose(method(images).exp(), expected, atol=1e-6)
    assert torch.allclose(method.evaluate(images).exp(), expected, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [{"views": "none"}, {"predict": "after"}, {"correct_prior": False}, {"statistics": "batch"},
     {"statistics": "source"}, {"steps": 2}, {"stochastic_depth": True}],
    ids=str,
)  # fmt: skip
def test_each_part_can_be_chosen_and_is_restored(options: dict[str, Any]) -> None:
    method = make("tide", vmamba(drop_path=0.1), **options)
    stream = batches(4)
    run(method, stream[:2])
    state = method.state_dict()
    expected = run(method, stream[2:])
    twin = make("tide", vmamba(drop_path=0.1), **options)
    twin.load_state_dict(state)
    assert same(run(twin, stream[2:]), expected)


@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_it_adapts_what_is_there(norm: str) -> None:
    method = make("tide", vmamba(norm))
    assert any("x_proj" in name for name in method.adapted)
    assert all("norm" not in name or "op" not in name for name in method.adapted)
    assert set(make("tide", convnet()).adapted) == {f"body.{i}.{leaf}" for i in (1, 4) for leaf in ("weight", "bias")}
    plain = nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    assert set(make("tide", plain).adapted) == {"1.weight", "1.bias"}


class Transformer(nn.Module):
    """Patches, a class token, two blocks of attention, as a ViT; no BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, 8, 4, stride=4), nn.Parameter(torch.zeros(1, 1, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = self.blocks(torch.cat([self.token.expand(len(x), 1, 8), x], 1))
        logits: Tensor = self.head(self.norm(x[:, 0]))
        return logits


@pytest.mark.parametrize("images", [1, 6])
def test_a_transformer_adapts_its_layer_norms(images: int) -> None:
    torch.manual_seed(0)
    method = make("tide", Transformer())
    assert method.adapted
    assert all("norm" in name for name in method.adapted)
    stream = batches(3, images=images)
    outputs = run(method, stream)
    assert method.counters.updates == 3
    assert all(logits.isfinite().all() for logits in outputs)
    method.reset()
    assert all(torch.equal(a, b) for a, b in zip(run(method, stream), outputs, strict=True))


@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_odd_streams_neither_crash_nor_wear_the_network_out(norm: str) -> None:
    """Gray images, another size, blank images, one image again and again; afterwards, weights are near the source."""
    method: Tide = make("tide", vmamba(norm), lr=5e-4)
    usual = batches(2)
    source = method.weights.snapshot()
    gray = [x.mean(1, keepdim=True).expand_as(x) for x in usual]
    larger = [torch.nn.functional.interpolate(x, scale_factor=2) for x in usual]
    blank = [torch.full_like(x, value) for x in usual for value in (0.0, 2.0)]
    same_image = [x[:1].expand_as(x) for x in usual]
    for images in (*gray, *larger, *blank, *same_image):
        assert method(images).isfinite().all()
    assert float((method.weights.snapshot() - source).abs().max()) < 0.02
    assert method(usual[0]).isfinite().all()


def with_shift(method: Tide, probability: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the statistics report that a new domain has begun with this probability, whatever the images are."""
    plain = method.statistics._observe

    def prelude(images: Tensor, count: int) -> tuple[Any, Any, Tensor]:
        descriptions, mixed, _ = plain(images, count)
        return descriptions, mixed, torch.tensor(1 - probability)

    monkeypatch.setattr(method.statistics, "_observe", prelude)


@pytest.mark.parametrize("probability", [0.0, 0.4, 1.0])
def test_half_of_what_was_learned_goes_with_a_domain(probability: float, monkeypatch: pytest.MonkeyPatch) -> None:
    method: Tide = make("tide", convnet(), lr=0.0, source_decay=0.0)
    source = method.weights.snapshot()
    method.weights.load(source + 1)
    with_shift(method, probability, monkeypatch)
    method(batches(1)[0])
    moved = method.weights.snapshot() - source
    assert torch.allclose(moved, torch.full_like(moved, 1 - probability / 2), atol=1e-5)


def test_adam_begins_anew_with_a_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a sure shift its moments and its count of steps are those of a first step."""
    method: Tide = make("tide", vmamba())
    *before, last = batches(4)
    run(method, before)
    assert float(method.weights.optimizer_state["step"]) == 3
    with_shift(method, 1.0, monkeypatch)
    method(last)
    state, gradient = method.weights.optimizer_state, method.weights.gradient
    assert float(state["step"]) == 1
    assert torch.allclose(state["exp_avg"], 0.1 * gradient)
    assert torch.allclose(state["exp_avg_sq"], 0.001 * gradient.square())
