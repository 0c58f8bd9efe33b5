"""Evidence and weights: what they say of adaptation that harms, helps, or meets runs of labels; the regret bound."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from trust_tta.live.comparison import DISCOUNT, MIN_EQUAL, MIN_PAIRS, PRIOR, RATE, Comparison

CLASSES = 10
RNG = np.random.default_rng(0)


def even(n: int) -> NDArray[Any]:
    return RNG.integers(CLASSES, size=n)


def few(n: int) -> NDArray[Any]:
    return RNG.integers(3, size=n)


def feed(comparison: Comparison, adapted: Any, source: Any, *, batches: int = 8, confidence: float = -0.3) -> None:
    for _ in range(batches):
        log_confidence = confidence + 0.1 * RNG.standard_normal(64)
        comparison.add(adapted(64), source(64), log_confidence, classes=CLASSES)


def test_the_source_leads_where_the_adapted_network_loses_classes() -> None:
    comparison = Comparison()
    feed(comparison, few, even)
    assert comparison.evidence == pytest.approx(math.log(CLASSES) - math.log(3), abs=0.15)
    assert comparison.weight < 0.01
    assert comparison.test.e_value > 100


def test_the_adapted_network_leads_where_the_source_predicts_few_classes() -> None:
    comparison = Comparison()
    feed(comparison, even, few)
    assert comparison.weight > 0.99
    assert not comparison.in_doubt
    assert comparison.test.peak == pytest.approx(1, abs=0.01)


def test_equal_predictions_need_no_mixture() -> None:
    comparison = Comparison()
    for _ in range(4):
        both = even(64)
        comparison.add(both, both, np.full(64, -0.3), classes=CLASSES)
    assert comparison.agreement == 1
    assert not comparison.in_doubt


def test_a_stream_begins_in_doubt_with_more_weight_on_the_source() -> None:
    comparison = Comparison()
    assert comparison.in_doubt
    assert comparison.weight == pytest.approx(1 / (1 + math.exp(PRIOR)))


@pytest.mark.parametrize("change", ["confidence", "classes"])
def test_other_images_begin_in_doubt_again(change: str) -> None:
    comparison = Comparison()
    feed(comparison, even, few)
    source = few(64) if change == "confidence" else even(64)
    log_confidence = np.full(64, -1.5 if change == "confidence" else -0.3) + 0.1 * RNG.standard_normal(64)
    assert comparison.add(even(64), source, log_confidence, classes=CLASSES)
    assert comparison.compared == 64


def in_runs(adapted: Any, *, right: float = 0.7) -> tuple[Comparison, list[float]]:
    """Comparison and its weights over runs of a class each, of which the source predicts a fraction `right`."""
    comparison, weights = Comparison(), []
    for i in range(24):
        label = np.full(64, i // 2 % CLASSES)
        source = np.where(RNG.random(64) < right, label, even(64))
        comparison.add(adapted(label), source, -0.3 + 0.1 * RNG.standard_normal(64), classes=CLASSES)
        weights.append(comparison.weight)
    assert comparison.in_runs
    return comparison, weights


@pytest.mark.parametrize("spread", [True, False], ids=["over all classes", "over none"])
def test_in_runs_of_labels_the_source_keeps_most_of_the_weight(spread: bool) -> None:
    """Batch statistics spread the predictions of every batch, which says nothing in their favor."""
    _, weights = in_runs(lambda label: even(64) if spread else np.zeros(64, int), right=0.8)
    assert max(weights[12:]) <= 1 / (1 + math.exp(PRIOR)) + 1e-9


def test_in_runs_of_labels_an_adapted_network_that_is_right_leads_without_an_alarm() -> None:
    comparison, weights = in_runs(lambda label: np.where(RNG.random(64) < 0.9, label, even(64)))
    assert np.mean(weights[12:]) > 0.9
    assert comparison.test.peak < 10


def test_evidence_in_runs_compares_equal_pairs_inside_of_blocks_and_across() -> None:
    comparison, _ = in_runs(lambda label: np.where(RNG.random(64) < 0.9, label, even(64)))
    counts = [np.split(total[3:], 2) for _, total in comparison._runs.entries]
    ratios = []
    for kind in range(2):
        pairs = {True: [0, 0], False: [0, 0]}  # inside: equal, all
        images = [(b, c) for b, block in enumerate(counts) for c, n in enumerate(block[kind]) for _ in range(int(n))]
        for i, (block, label) in enumerate(images):
            for other, other_label in images[:i]:
                pairs[block == other][0] += label == other_label
                pairs[block == other][1] += 1
        inside, across = (pairs[same][0] / pairs[same][1] + MIN_EQUAL for same in (True, False))
        ratios.append(inside / across)
    assert comparison.evidence == pytest.approx(math.log(ratios[1] / ratios[0]))


def test_blocks_after_one_of_few_classes_do_not_enter_the_test() -> None:
    comparison = Comparison()
    feed(comparison, lambda n: np.zeros(n, int), few, batches=1)
    first = comparison.test.peak
    feed(comparison, lambda n: np.zeros(n, int), few)
    assert comparison.test.peak == first
    assert comparison.weight < 0.01


@pytest.mark.parametrize("runs", [False, True])
def test_runs_are_found_among_a_thousand_classes(runs: bool) -> None:
    comparison = Comparison()
    for i in range(24):
        source = np.full(64, 7 * i) if runs else RNG.integers(1000, size=64)
        adapted = np.where(RNG.random(64) < 0.3, RNG.integers(1000, size=64), source)
        comparison.add(adapted, source, np.full(64, -0.3), classes=1000)
        assert comparison.in_doubt
    assert comparison.in_runs is runs


@pytest.mark.parametrize(("source", "batches"), [(even, 1), (few, 2)])
def test_few_classes_of_the_source_count_from_the_second_batch_on(source: Any, batches: int) -> None:
    """Of one batch, they may be its labels'."""
    comparison = Comparison()
    weights = []
    for _ in range(2):
        feed(comparison, even if source is few else few, source, batches=1)
        weights.append(comparison.weight)
    prior = 1 / (1 + math.exp(PRIOR))
    assert [w != pytest.approx(prior) for w in weights] == [batches == 1, True]


def test_evidence_counts_pairs_of_equal_predictions_in_different_blocks() -> None:
    comparison, blocks = Comparison(), [(even(32), even(32)) for _ in range(4)]
    adapted, source = (np.concatenate([block[k] for block in blocks]) for k in range(2))
    comparison.add(adapted, source, np.full(128, -0.3), classes=CLASSES)
    equal = [
        sum(a == b for i in range(4) for j in range(i) for a in blocks[i][k] for b in blocks[j][k]) for k in range(2)
    ]
    assert comparison.evidence == pytest.approx(math.log((equal[0] + MIN_PAIRS) / (equal[1] + MIN_PAIRS)))


def test_batches_of_any_size_give_the_same_evidence() -> None:
    one, many = Comparison(), Comparison()
    adapted, source, confidence = few(64), even(64), np.full(64, -0.3)
    one.add(adapted[:32], source[:32], confidence[:32], classes=CLASSES)
    one.add(adapted[32:], source[32:], confidence[32:], classes=CLASSES)
    for i in range(64):
        many.add(adapted[i : i + 1], source[i : i + 1], confidence[i : i + 1], classes=CLASSES)
    assert (one.evidence, one.total, one.test.e_value) == (many.evidence, many.total, many.test.e_value)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-1, 1), min_size=1, max_size=60))
def test_regret_of_the_mixture_is_bounded(evidence: list[float]) -> None:
    """The inequality of the docstring, with weights computed from it independently of the class."""
    p = 1 / (1 + math.exp(PRIOR))
    total = served = 0.0
    for x in evidence:
        total = DISCOUNT * total + x
        odds = p * math.exp(-RATE * total)
        served = DISCOUNT * served + odds / (odds + 1 - p) * x
    assert served <= min(0.0, total) + math.log(1 / min(p, 1 - p)) / RATE + 1e-9


def test_labels_enter_the_same_test() -> None:
    comparison = Comparison()
    labels = even(40)
    wrong = np.where(RNG.random(40) < 0.5, (labels + 1) % CLASSES, labels)
    comparison.add_labels(wrong, labels, labels)
    assert comparison.test.e_value > 20
    assert comparison.weight < 0.05
    comparison.add_labels(labels, wrong, labels)
    assert comparison.weight > 0.9


def test_state_round_trip() -> None:
    comparison, again = Comparison(), Comparison()
    feed(comparison, few, even, batches=3)
    comparison.add(few(7), even(7), np.full(7, -0.3), classes=CLASSES)
    again.check_state(comparison.state())
    again.load(comparison.state())
    rows = few(40), even(40), np.full(40, -0.3)
    for each in (comparison, again):
        each.add(*rows, classes=CLASSES)
    assert again.state()["test"] == comparison.state()["test"]
    assert again.weight == comparison.weight
