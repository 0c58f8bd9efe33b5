"""FOA: its statistics, its tokens, its fitness, its search."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch

from tests.methods.networks import CLASSES, batches, make, run, same, vmamba, weights
from trust_tta.errors import ConfigError, ShapeError
from trust_tta.methods.foa import Foa, Search
from trust_tta.methods.prompts import append_row, take_prompts
from trust_tta.methods.registry import create_method
from trust_tta.methods.source_data import gather_source_statistics


def foa(**options: object) -> Foa:
    method = make("foa", vmamba(), **options)
    assert isinstance(method, Foa)
    return method


def test_statistics_against_numpy() -> None:
    model, stream = vmamba(), batches(3, images=4)
    before, modes = weights(model), [m.training for m in model.modules()]
    statistics = gather_source_statistics(model, iter(stream))
    judge = copy.deepcopy(model).train()  # batch statistics
    tokens, pooled = [], []
    with torch.no_grad():
        for images in stream:
            maps = judge.forward_maps(judge.embed(images))
            tokens.append(np.concatenate([m.numpy().mean((2, 3)) for m in maps], axis=1))
            pooled.append(judge.pool(maps[-1]).numpy())
    np.testing.assert_allclose(statistics.mean, np.concatenate(tokens).mean(0), atol=1e-5)
    np.testing.assert_allclose(statistics.std, np.concatenate(tokens).std(0, ddof=1), atol=1e-5)
    np.testing.assert_allclose(statistics.features, np.concatenate(pooled).mean(0), atol=1e-5)
    np.testing.assert_allclose(statistics.features_std, np.concatenate(pooled).std(0, ddof=1), atol=1e-5)
    assert same(weights(model), before)
    assert [m.training for m in model.modules()] == modes


def test_statistics_of_too_few_images_are_refused() -> None:
    with pytest.raises(ConfigError, match="0 clean images"):
        gather_source_statistics(vmamba(), [])


def test_without_statistics_the_error_names_the_call() -> None:
    with pytest.raises(ConfigError, match=r"gather_source_statistics\(model, clean_batches\)"):
        create_method("foa", vmamba())


def test_tokens_fill_a_row_below_the_map_in_equal_stretches() -> None:
    first_map = torch.zeros(3, 8, 5, 7)
    tokens = torch.stack([torch.arange(8.0), 10 + torch.arange(8.0)])
    extended = append_row(first_map, tokens)
    assert extended.shape == (3, 8, 6, 7)
    assert not extended[:, :, :5].any()
    for image in extended:
        assert image[:, 5].T.tolist() == [tokens[0].tolist()] * 4 + [tokens[1].tolist()] * 3


def test_more_tokens_than_the_row_holds_are_refused() -> None:
    method = foa(prompts=5)  # 16 pixels make a map of 4 x 4
    before = method.state_dict()
    with pytest.raises(ShapeError, match="5 prompts do not fit in a row of 4 tokens"):
        method(batches(1)[0])
    assert same(method.state_dict(), before)


@pytest.mark.parametrize("entropy_of", ["unshifted", "shifted"])
def test_fitness_and_shift_against_numpy(entropy_of: str) -> None:
    method = foa(weight=0.7, fitness=entropy_of)
    (first, second) = batches(2)
    method(first)
    statistics, shift = method.source, method.mean_features
    assert shift is not None
    candidate = np.linspace(-1, 1, 16)
    judge = copy.deepcopy(vmamba()).train()
    with torch.no_grad():
        start = judge.embed(second)
        maps = judge.forward_maps(append_row(start, torch.from_numpy(candidate).float().view(2, 8)))
        pooled = judge.pool(maps[-1])
        logits = judge.forward_head(pooled + statistics.features - shift)
        judged = judge.forward_head(pooled) if entropy_of == "unshifted" else logits
        fitness, ours, mean = method.try_tokens(take_prompts(method.model), start, candidate)
    tokens = np.concatenate([m.double().numpy().mean((2, 3)) for m in maps], axis=1)
    p = judged.double().softmax(1).numpy()
    distance = ((tokens.mean(0) - statistics.mean.numpy()) ** 2).sum()
    distance += ((tokens.std(0, ddof=1) - statistics.std.numpy()) ** 2).sum()
    expected = -(p * np.log(p)).sum() + 0.7 * len(second) / 64 * distance
    assert float(fitness) == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(ours, logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mean, pooled.mean(0), rtol=1e-4, atol=1e-4)


def test_the_features_follow_with_momentum() -> None:
    method = foa()
    method.update_mean_features(torch.ones(3))
    assert method.mean_features is not None
    assert method.mean_features.tolist() == [1, 1, 1]
    method.update_mean_features(torch.zeros(3))
    torch.testing.assert_close(method.mean_features, torch.full((3,), 0.9))


def test_the_prediction_is_the_best_candidates_and_the_old_best_competes() -> None:
    method = foa()
    (images,) = batches(1)
    logits = method(images)
    assert method.search is not None
    again = method.fork()
    assert isinstance(again, Foa)
    again.mean_features = None  # as it was during that batch
    assert method.search.ask()[-1] is method.search.best
    with torch.no_grad():
        start = vmamba().train().embed(images)
        _, expected, _ = again.try_tokens(take_prompts(again.model), start, method.search.best)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("initial", ["random", "zero"])
def test_the_first_tokens(initial: str) -> None:
    """Uniform as in visual prompt tuning: the images' channels times the patch, and the width of a token."""
    method = foa(initial=initial)
    (images,) = batches(1)
    tried: list[np.ndarray] = []
    evaluate = method.try_tokens
    method.try_tokens = lambda *a: (tried.append(a[2]), evaluate(*a))[1]  # type: ignore[method-assign, func-returns-value]
    method(images)
    first = tried[-1]
    bound = math.sqrt(6 / (3 * 4 * 4 + 8))
    if initial == "zero":
        assert not first.any()
        return
    assert np.abs(first).max() <= bound
    assert np.abs(first).max() > 0.6 * bound
    assert len(set(first)) == 16
    other = foa(seed=1)
    other(images)
    assert other.search is not None


def test_the_network_is_not_touched() -> None:
    model = vmamba()
    before = weights(model)
    method = make("foa", model)
    run(method, batches(2))
    assert same(weights(model), before)
    assert not method.adapted
    assert method.counters.backwards == 0


def test_the_fitness_of_one_batch_falls_when_it_comes_again() -> None:
    method = foa(population=8, sigma=0.5)
    (images,) = batches(1)
    run(method, [images] * 12)
    assert method.search is not None
    told = method.search.told.min(1).values
    assert told[6:].mean() < told[1]


def test_seeds_decide_and_the_global_generators_are_left_alone() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    expected = (torch.rand(1).item(), np.random.rand())
    torch.manual_seed(1)
    np.random.seed(1)
    stream = batches(2)
    first = run(foa(seed=4), stream)
    assert (torch.rand(1).item(), np.random.rand()) == expected
    np.random.seed(77)
    assert same(run(foa(seed=4), stream), first)
    assert not same(run(foa(seed=5), stream), first)


@pytest.mark.parametrize("dimension", [2, 16, 90])
def test_a_search_replays_and_copies_to_the_bit(dimension: int) -> None:
    def search() -> Search:
        return Search(np.zeros(dimension), population=7, sigma=0.8, seed=3)

    def advance(s: Search, rounds: int) -> None:
        for _ in range(rounds):
            candidates = s.ask()
            s.tell(
                candidates, torch.tensor([math.cos(i) + float(((c - 1) ** 2).sum()) for i, c in enumerate(candidates)])
            )

    one = search()
    advance(one, 40)
    two, three = search(), copy.deepcopy(one)
    two.replay(one.told)
    for s in (one, two, three):
        advance(s, 10)
    assert np.array_equal(one.best, two.best)
    assert np.array_equal(one.best, three.best)
    assert torch.equal(one.told, two.told)
    assert one.told.shape == (50, 8)
    assert one.told[-1].min() < one.told[0].min()


def test_some_candidates_that_are_not_finite_lose() -> None:
    method = foa(population=6)
    calls = [0]
    evaluate = method.try_tokens

    def sometimes(*arguments: object) -> object:
        calls[0] += 1
        fitness, logits, features = evaluate(*arguments)  # type: ignore[arg-type]
        spoilt = torch.tensor(torch.nan) if calls[0] % 2 else torch.tensor(1.0)
        return fitness * spoilt, logits * spoilt, features * spoilt

    method.try_tokens = sometimes  # type: ignore[method-assign, assignment]
    for logits in run(method, batches(3)):
        assert logits.isfinite().all()
        assert logits.shape == (9, CLASSES)
    assert method.counters.skipped == 0
    assert method.search is not None
    assert method.search.told.isfinite().all()
    assert method.mean_features is not None
    assert method.mean_features.isfinite().all()


@pytest.mark.parametrize(
    "options", [{"prompts": 0}, {"population": 3}, {"sigma": 0.0}, {"weight": -1.0}, {"seed": -1}], ids=str
)
def test_wrong_options(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="give a value >="):
        foa(**options)
