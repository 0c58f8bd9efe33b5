"""Measurements against closed forms and plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.live.toys import clean, draw, make, states_equal
from trust_tta.live.source_reference import SourceReference
from trust_tta.live.stream_statistics import (
    Window,
    effective_classes,
    input_distance,
    probability_rows,
    weight_distance,
)
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


def test_networks_of_few_norms_have_no_depth_moments() -> None:
    source_reference, images = SourceReference(make("tent")), draw(12, seed=4)[0]
    assert source_reference.predict(images)[1] is None


@pytest.mark.parametrize("statistics", ["batch", "stream", "source"])
def test_source_reference_keeps_the_source_weights_and_training_statistics(statistics: str) -> None:
    method = make("tent", lr=0.1, statistics=statistics)
    source_reference, images = SourceReference(method), draw(32, seed=4)[0]
    before = upsample(source_reference(images))
    torch.testing.assert_close(before, make("source")(images))
    state = method.state_dict()
    source_reference.predict(images)
    assert states_equal(method.state_dict(), state)
    for batch in clean(3):
        method(batch)
    assert torch.equal(upsample(source_reference(images)), before)


class Deep(nn.Module):
    """Four convolutions with BatchNorm, and a head."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i in range(4):
            layers += [nn.Conv2d(8 if i else 3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(8, 6)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.body(images).mean((2, 3)))
        return logits


def test_depth_distances_are_those_at_a_middle_norm_and_the_last() -> None:
    from trust_tta.methods.registry import create_method

    torch.manual_seed(0)
    network = Deep().eval()
    source_reference, images = SourceReference(create_method("tent", network)), draw(12, seed=4)[0]
    logits, moments = source_reference.predict(images)
    torch.testing.assert_close(upsample(logits), network(images).detach())
    assert moments is not None
    distances = []
    for number in (10, 7):  # the last norm, and the third of four
        values = network.body[:number](images).detach()
        found = torch.stack([values.mean((0, 2, 3)), values.square().mean((0, 2, 3))])
        distances.append(input_distance(found, torch.stack([torch.zeros(8), torch.ones(8)])))
    assert source_reference.depth_distances(moments) == pytest.approx((distances[1], distances[0]), rel=1e-4)
