"""Measurements against closed forms and plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.live.toys import clean, draw, make, states_equal, toy
from trust_tta.live.monitors import (
    Monitors,
    Window,
    effective_classes,
    input_distance,
    probability_rows,
    total_variation,
    weight_distance,
)
from trust_tta.live.source_reference import Canary, Reservoir, SourceReference, balanced
from trust_tta.ops.segmentation_logits import upsample


def test_a_window_holds_the_last_images() -> None:
    window = Window(10)
    history = []
    for i, size in enumerate((4, 3, 8, 1, 1, 12, 2, 9)):
        history.append((size, torch.full((2,), float(i)) * size))
        window.add(*history[-1])
        kept: list[tuple[int, torch.Tensor]] = []
        for entry in reversed(history):
            if sum(n for n, _ in kept) >= 10:
                break
            kept.append(entry)
        images = sum(n for n, _ in kept)
        assert window.images == images
        assert window.full == (images >= 10)
        torch.testing.assert_close(torch.from_numpy(window.mean), sum(t for _, t in kept).double() / images)  # type: ignore[union-attr]
    twin = Window(10)
    twin.load(window.state())
    assert (twin.mean == window.mean).all()


def test_effective_classes_counts_classes() -> None:
    for count in (1, 2, 7):
        mean = torch.zeros(10)
        mean[:count] = 1 / count
        assert effective_classes(mean) == pytest.approx(count)


def test_input_distance_is_the_symmetric_divergence_of_normal_channels() -> None:
    def kl(m: float, v: float, n: float, w: float) -> float:
        return (v / w + (m - n) ** 2 / w - 1 + math.log(w / v)) / 2

    a, b = [(0.3, 1.2), (-1.0, 0.5)], [(0.1, 0.8), (2.0, 3.0)]
    expected = sum(kl(*x, *y) + kl(*y, *x) for x, y in zip(a, b, strict=True)) / 2

    def moments(channels: list[tuple[float, float]]) -> torch.Tensor:
        return torch.tensor([[m for m, _ in channels], [v + m * m for m, v in channels]], dtype=torch.float64)

    assert input_distance(moments(a), moments(b)) == pytest.approx(expected)
    assert input_distance(moments(a), moments(a)) == pytest.approx(0)


def test_images_without_contrast_are_far_away_but_not_at_infinity() -> None:
    flat = torch.tensor([[1.0], [1.0]], dtype=torch.float64)
    assert 100 < input_distance(flat, torch.tensor([[0.0], [1.0]], dtype=torch.float64)) < 1e6


def test_total_variation() -> None:
    assert total_variation(torch.tensor([1.0, 0, 0]), torch.tensor([0, 0.5, 0.5])) == pytest.approx(1)
    assert total_variation(torch.tensor([0.5, 0.5]), torch.tensor([0.75, 0.25])) == pytest.approx(0.25)


def test_weight_distance_is_relative_to_the_source() -> None:
    method = make("tent")
    assert weight_distance(method) == 0
    norm = math.sqrt(sum(float(p.detach().square().sum()) for p in method.adapted.values()))
    with torch.no_grad():
        next(iter(method.adapted.values()))[0] += 3
    assert weight_distance(method) == pytest.approx(3 / norm, rel=1e-5)
    assert weight_distance(make("bn")) == 0


def test_segmentation_logits_give_one_row_per_pixel() -> None:
    maps = torch.randn(2, 5, 3, 4)
    rows = probability_rows(maps)
    assert rows.shape == (24, 5)
    torch.testing.assert_close(rows[23], maps[1, :, 2, 3].softmax(0))
    assert len(probability_rows(torch.randn(2, 5, 100, 100))) <= 4096


def test_the_input_statistics_are_those_before_the_first_norm() -> None:
    source_reference, images = SourceReference(make("tent")), draw(12, seed=4)[0]
    convolution = toy().body[0]
    maps = convolution(images)
    statistics = source_reference.input_statistics(images)
    torch.testing.assert_close(torch.from_numpy(statistics[0]).float(), maps.mean((0, 2, 3)))
    torch.testing.assert_close(torch.from_numpy(statistics[1]).float(), maps.square().mean((0, 2, 3)))


def test_input_statistics_without_batchnorm_are_of_the_images() -> None:
    from trust_tta.methods.registry import create_method

    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(1, 4), nn.Flatten(), nn.Linear(400, 6))
    source_reference, images = SourceReference(create_method("tent", model)), draw(12, seed=4)[0]
    torch.testing.assert_close(
        torch.from_numpy(source_reference.input_statistics(images)[0]).float(), images.mean((0, 2, 3))
    )
    assert source_reference.training_statistics is None


@pytest.mark.parametrize("statistics", ["batch", "stream", "source"])
def test_source_reference_keeps_the_source_weights(statistics: str) -> None:
    method = make("tent", lr=0.1, statistics=statistics)
    source_reference, images = SourceReference(method), draw(32, seed=4)[0]
    before = upsample(source_reference(images))
    expected = make("tent", statistics="batch" if statistics == "stream" else statistics).evaluate(images)
    assert torch.equal(before, expected)
    state = method.state_dict()
    source_reference.input_statistics(images)
    assert states_equal(method.state_dict(), state)
    for batch in clean(3):
        method(batch)
    assert torch.equal(upsample(source_reference(images)), before)
    assert not torch.equal(upsample(source_reference.predict_adapted(images)), before)


@pytest.mark.parametrize("statistics", ["batch", "stream", "source"])
def test_source_reference_differs_from_the_method_only_by_learned_weights(statistics: str) -> None:
    """With a learning rate of zero the statistics move and the weights do not."""
    method = make("tent", lr=0.0, statistics=statistics)
    source_reference, images = SourceReference(method), 2 * draw(32, seed=4)[0] + 1
    for batch in clean(3):
        method(2 * batch + 1)
    learned, source = source_reference.compare(images, method.evaluate(images))
    torch.testing.assert_close(learned, source)
    torch.testing.assert_close(learned, probability_rows(method.evaluate(images)))


def test_agreement_counts_the_images_of_which_the_source_is_sure() -> None:
    source = torch.tensor([[0.9, 0.1], [0.4, 0.6], [0.2, 0.8]])
    served = torch.tensor([[0.6, 0.4], [0.9, 0.1], [0.3, 0.7]])
    monitors = Monitors()
    monitors.add_predictions(served.numpy())
    monitors.add_probe(served, source)
    reading = monitors.read(3, weight_distance=0.0, skipped=0)
    assert reading.agreement == pytest.approx((0.9 + 0.8) / (0.9 + 0.6 + 0.8))
    assert reading.probed == 3
    assert reading.confidence == pytest.approx((0.6 + 0.9 + 0.7) / 3)
    assert reading.source_classes == pytest.approx(effective_classes(source.mean(0)), rel=1e-5)


def test_balanced_canary_covers_all_classes() -> None:
    predicted = torch.tensor([0] * 20 + [1] * 3 + [2] * 9)
    images = torch.arange(32)
    chosen = balanced(images, torch.nn.functional.one_hot(predicted, 4).float(), count=9)
    assert predicted[chosen].bincount().tolist() == [3, 3, 3]


def test_canary_scores() -> None:
    source_reference = SourceReference(make("tent"))
    images, labels = draw(40, seed=8)
    trusted = Canary.trusted(images, source_reference)
    assert trusted.score(source_reference(images)) == 1
    labeled = Canary.labeled(images, labels, source_reference)
    assert labeled.expected == pytest.approx(
        float((upsample(source_reference(images)).argmax(1) == labels).float().mean())
    )


def test_the_reservoir_takes_sure_images_of_many_classes() -> None:
    source_reference, reservoir = SourceReference(make("tent")), Reservoir()
    for seed in range(6):
        images = draw(32, seed=seed, noise=1.5)[0]
        reservoir.offer(images, probability_rows(source_reference(images)))
    canary = reservoir.canary(source_reference, classes=6)
    assert canary is not None
    assert 16 <= len(canary.images) <= 32
    assert int(canary.labels.bincount().max()) <= 8
    assert float(canary.weights.mean()) > 0.8
    twin = Reservoir()
    twin.load(reservoir.state(), images)
    again = twin.canary(source_reference, classes=6)
    assert again is not None
    assert torch.equal(again.images, canary.images)
