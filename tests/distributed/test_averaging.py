"""The mathematics of a merge, against sums that are done another way, and against replicas that lie."""

from __future__ import annotations

import math

import pytest
import torch
from benchmarks.averaged_replica import Replica, load_into, source_of, state_of
from benchmarks.averaging import (
    AveragingConfig,
    Merger,
    ReplicaState,
    ReplicaUpdate,
    evidence_weights,
    find_inliers,
    group_by_domain,
    merge_updates,
    trimmed_mean,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import trust_tta as tt
from trust_tta.errors import StateError

SIZE, CHANNELS = 12, 5
PLAIN = AveragingConfig(trim=0.0, power=0.0, outlier=1e9)
SAME = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
OTHER = torch.tensor([[2.0, 2.0], [5.0, 5.0]])


def state(seed: int, *, remembered: float = 0.0) -> ReplicaState:
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn(CHANNELS, generator=generator)
    return ReplicaState(torch.randn(SIZE, generator=generator), means, means.square() + 1, remembered)


def update(name: str, weights: Tensor, *, images: int = 10, base: int = 0, signature: Tensor = SAME) -> ReplicaUpdate:
    return ReplicaUpdate(
        name, base, images, ReplicaState(weights, torch.zeros(CHANNELS), torch.ones(CHANNELS)), signature
    )


def zero() -> ReplicaState:
    return ReplicaState(torch.zeros(SIZE), torch.zeros(CHANNELS), torch.ones(CHANNELS))


def test_plain_merge_is_the_mean_weighted_by_images() -> None:
    updates = [update("a", torch.full((SIZE,), 1.0), images=20), update("b", torch.full((SIZE,), 2.0), images=10)]
    (merge,) = Merger(zero(), PLAIN).merge(updates)
    assert merge.members == ("a", "b")
    assert merge.images == 30
    assert torch.allclose(merge.state.weights, torch.full((SIZE,), 4 / 3))


def test_power_one_sums_the_weight_changes() -> None:
    updates = [update(str(i), torch.full((SIZE,), float(i))) for i in range(4)]
    (merge,) = Merger(zero(), PLAIN.changed(power=1.0)).merge(updates)
    assert torch.allclose(merge.state.weights, torch.full((SIZE,), 6.0))


def test_weight_changes_are_relative_to_the_last_merge() -> None:
    merger = Merger(zero(), PLAIN.changed(power=1.0))
    (first,) = merger.merge([update("a", torch.ones(SIZE)), update("b", torch.ones(SIZE))])
    again = [update(name, first.state.weights + 1, base=first.number) for name in "ab"]
    (second,) = merger.merge(again)
    assert torch.allclose(second.state.weights, torch.full((SIZE,), 4.0))


def test_unknown_base_is_averaged_without_changes() -> None:
    updates = [update("a", torch.ones(SIZE), base=77), update("b", torch.full((SIZE,), 3.0), base=78)]
    (merge,) = Merger(zero(), PLAIN.changed(power=1.0)).merge(updates)
    assert torch.allclose(merge.state.weights, torch.full((SIZE,), 2.0))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(32, 64), min_size=2, max_size=6), st.integers(1, 300), st.integers(0, 10_000))
def test_merged_statistics_equal_one_norm_over_all_images(counts: list[int], memory: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    base_mean, base_square = torch.randn(CHANNELS, generator=generator), torch.full((CHANNELS,), 9.0)
    base = ReplicaState(torch.zeros(SIZE), base_mean, base_square, float(memory))
    updates, images = [], []
    for i, count in enumerate(counts):
        seen = torch.randn(count, CHANNELS, generator=generator)
        images.append(seen)
        worth = len(counts)  # each stands for those that the others see
        share = worth * count / (memory + worth * count)
        means = base_mean + share * (seen.mean(0) - base_mean)
        squares = base_square + share * (seen.square().mean(0) - base_square)
        own = ReplicaState(torch.zeros(SIZE), means, squares, float(memory + worth * count))
        updates.append(ReplicaUpdate(str(i), 0, count, own, SAME, worth))
    merge = merge_updates(updates, {0: base}, PLAIN, number=1)
    seen = torch.cat(images)
    total = memory + len(seen)
    assert torch.allclose(merge.state.means, (memory * base_mean + seen.sum(0)) / total, atol=1e-4)
    assert torch.allclose(merge.state.squares, (memory * base_square + seen.square().sum(0)) / total, atol=1e-3)
    assert merge.state.remembered == pytest.approx(total)


def test_merged_domain_means_equal_one_method_over_all_images() -> None:
    torch.manual_seed(0)
    seen, forget, shares = torch.rand(6, 8, 4), 2 ** (-1 / 64), torch.full((4,), 0.25)

    def follow(sums: Tensor, images: Tensor, worth: int = 1) -> Tensor:
        for image in images:
            sums = forget**worth * sums + worth * image / image.sum()
        return sums

    start = 50 * shares
    base = ReplicaState(torch.zeros(SIZE), torch.zeros(CHANNELS), torch.ones(CHANNELS), 0.0, shares, 50.0)
    updates = []
    for i, images in enumerate(seen):
        sums = follow(start, images, worth=6)
        own = ReplicaState(base.weights, base.means, base.squares, 8.0, sums / sums.sum(), float(sums.sum()))
        updates.append(ReplicaUpdate(str(i), 0, len(images), own, SAME, 6))
    merged = merge_updates(updates, {0: base}, PLAIN, number=1).state
    one = follow(start, seen.flatten(0, 1))
    assert torch.allclose(merged.domain_means, one / one.sum(), atol=0.01)
    assert merged.domain_images == pytest.approx(float(one.sum()), rel=0.15)


def test_merged_statistics_move_no_farther_than_the_replicas() -> None:
    base = ReplicaState(torch.zeros(SIZE), torch.zeros(CHANNELS), torch.ones(CHANNELS), 32.0)
    own = ReplicaState(torch.zeros(SIZE), torch.full((CHANNELS,), 0.2), torch.full((CHANNELS,), 1.1), 40.0)
    merged = merge_updates([ReplicaUpdate(name, 0, 8, own, SAME) for name in "abcd"], {0: base}, PLAIN, number=1).state
    assert torch.allclose(merged.means, own.means)
    assert merged.remembered == pytest.approx(40)


def test_domain_means_of_another_size_are_ignored() -> None:
    shares = [torch.full((4,), 0.25), torch.full((3,), 1 / 3), torch.full((4,), 0.25)]
    states = [ReplicaState(torch.ones(SIZE), torch.zeros(CHANNELS), torch.ones(CHANNELS), 0.0, s, 10.0) for s in shares]
    (merge,) = Merger(zero(), PLAIN).merge([ReplicaUpdate(str(i), 0, 10, each, SAME) for i, each in enumerate(states)])
    assert torch.allclose(merge.state.domain_means, shares[0])
    assert merge.state.domain_images == 20


def test_replicas_of_other_domains_are_not_merged() -> None:
    updates = [
        update("a", torch.ones(SIZE)),
        update("b", torch.ones(SIZE)),
        update("c", torch.ones(SIZE), signature=OTHER),
    ]
    (merge,) = Merger(zero()).merge(updates)
    assert merge.members == ("a", "b")


def test_two_domains_give_two_merges() -> None:
    kinds = [SAME, OTHER, SAME, OTHER]
    updates = [update(str(i), torch.full((SIZE,), float(i)), signature=kind) for i, kind in enumerate(kinds)]
    merges = Merger(zero(), PLAIN).merge(updates)
    assert [merge.members for merge in merges] == [("0", "2"), ("1", "3")]
    assert len({merge.number for merge in merges}) == 2


def test_domains_are_linked_by_near_signatures() -> None:
    step = torch.tensor([[0.3, 0.3], [0.09, 0.09]])
    chain = [update(str(i), torch.ones(SIZE), signature=SAME + i * step) for i in (0, 2, 1)]
    assert [[o.replica for o in group] for group in group_by_domain(chain, limit=0.2)] == [["0", "2", "1"]]
    assert len(group_by_domain(chain[:2], limit=0.2)) == 2


def test_invalid_updates_are_ignored() -> None:
    good = [update("a", torch.ones(SIZE)), update("b", torch.ones(SIZE))]
    bad = [
        update("nan", torch.full((SIZE,), math.nan)),
        update("short", torch.ones(SIZE - 1)),
        update("idle", torch.ones(SIZE), images=0),
        update("odd", torch.ones(SIZE), signature=torch.full((2, 1), math.nan)),
        update("half", torch.ones(SIZE).half()),
    ]
    (merge,) = Merger(zero()).merge([*bad, *good])
    assert merge.members == ("a", "b")


def test_first_merges_have_shorter_intervals() -> None:
    assert [AveragingConfig(every=256).interval(merges) for merges in range(6)] == [16, 32, 64, 128, 256, 256]
    assert AveragingConfig(every=2).interval(0) == 1


def test_single_replica_is_not_merged() -> None:
    assert Merger(zero()).merge([update("a", torch.ones(SIZE))]) == []


@pytest.mark.parametrize("garbage", [1e3, -50.0, 1e30])
def test_one_outlier_of_eight_is_left_out(garbage: float) -> None:
    torch.manual_seed(0)
    honest = [update(str(i), torch.ones(SIZE) + 0.1 * torch.randn(SIZE)) for i in range(7)]
    liar = update("liar", torch.full((SIZE,), garbage), images=10**9)
    (with_liar,) = Merger(zero(), AveragingConfig(power=0.0)).merge([*honest, liar])
    (without,) = Merger(zero(), AveragingConfig(power=0.0)).merge(honest)
    assert with_liar.left_out == ("liar",)
    assert torch.allclose(with_liar.state.weights, without.state.weights)


def test_trimmed_mean_bounds_a_hidden_outlier() -> None:
    rows = torch.arange(8.0)[:, None].expand(8, 3).clone()
    rows[7] = 1e6
    evidence = torch.full((8,), 1 / 8, dtype=torch.float64)
    assert torch.allclose(trimmed_mean(rows, evidence, trim=0.125), torch.full((3,), 3.5))
    assert torch.allclose(trimmed_mean(rows[:7], evidence[:7] * 8 / 7, trim=0.0), torch.full((3,), 3.0))


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 9), st.floats(0, 0.5), st.booleans(), st.integers(0, 10_000))
def test_trimmed_mean_equals_sorted_columns(count: int, trim: float, even: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(-3, 4, (count, 7), generator=generator).float() / 3
    shares = torch.ones(count) if even else torch.rand(count, generator=generator) + 0.1
    shares = shares.double() / shares.sum()
    cut = min(int(trim * count), (count - 1) // 2)
    order = rows.argsort(dim=0, stable=True)[cut : count - cut]
    expected = (rows.gather(0, order).double() * shares[order]).sum(0) / shares[order].sum(0)
    ties = (rows.sort(0).values.diff(dim=0) == 0).any(0)  # of equal values, either may be cut
    found = trimmed_mean(rows, shares, trim=trim)
    assert torch.allclose(found[~ties | even], expected.float()[~ties | even], atol=1e-5)


def test_trimming_keeps_at_least_one_value() -> None:
    rows = torch.tensor([[0.0], [1.0], [5.0]])
    assert trimmed_mean(rows, torch.ones(3, dtype=torch.float64), trim=0.9).item() == 1.0


def test_outliers_need_three_updates() -> None:
    assert find_inliers(torch.tensor([[0.0], [100.0]]), factor=3.0) == [True, True]
    assert find_inliers(torch.tensor([[0.0], [0.1], [0.2], [100.0]]), factor=3.0) == [True, True, True, False]


def test_evidence_is_at_most_twice_the_median() -> None:
    assert evidence_weights([10, 10, 10, 10**9]).tolist() == pytest.approx([0.2, 0.2, 0.2, 0.4])


def test_old_merges_are_dropped_but_not_the_source() -> None:
    merger = Merger(zero(), PLAIN)
    for _ in range(9):
        merger.merge([update("a", torch.ones(SIZE)), update("b", torch.ones(SIZE))])
    assert 0 in merger.bases
    assert len(merger.bases) <= 4
    assert merger.number in merger.bases


# Replicas over real streams


def make_replicas(count: int) -> list[Replica]:
    torch.manual_seed(0)
    model = tt.create_model("vmamba_nano", num_classes=4, depths=[1], dims=[8], patch_size=4)
    first = tt.create_method("tide", model)
    methods = [first, *(first.fork() for _ in range(count - 1))]
    return [Replica(tt.Stream(method), f"replica {i}", replicas=count) for i, method in enumerate(methods)]


def test_state_round_trips_through_a_method() -> None:
    (replica,) = make_replicas(1)
    replica(torch.randn(8, 3, 16, 16))
    method = replica.stream.method
    before = state_of(method)
    method.reset()
    load_into(method, before)
    after = state_of(method)
    assert torch.equal(after.weights, before.weights)
    assert torch.allclose(after.means, before.means)
    assert torch.allclose(after.squares, before.squares, atol=1e-5)
    assert after.remembered == before.remembered


def test_replicas_are_equal_after_adopting_a_merge() -> None:
    replicas = make_replicas(3)
    torch.manual_seed(2)
    for replica in replicas:
        replica(torch.randn(8, 3, 16, 16))
    merger = Merger(source_of(replicas[0].stream.method))
    updates = {replica.name: replica.make_update() for replica in replicas}
    assert {o.images for o in updates.values()} == {8}
    (merge,) = merger.merge(list(updates.values()))
    events = [replica.adopt(merge, updates[replica.name]) for replica in replicas]
    assert [(event.kind, event.action) for event in events] == [("merge", "take")] * 3
    states = [state_of(replica.stream.method) for replica in replicas]
    assert all(torch.equal(s.weights, merge.state.weights) for s in states)
    assert all(s.remembered == pytest.approx(merge.state.remembered) for s in states)
    assert all(
        torch.allclose(s.domain_means, merge.state.domain_means) and s.domain_images == pytest.approx(24)
        for s in states
    )
    assert [(replica.base, replica.images) for replica in replicas] == [(merge.number, 0)] * 3


def test_weight_changes_during_a_merge_are_kept() -> None:
    first, second = make_replicas(2)
    torch.manual_seed(1)
    first(torch.randn(8, 3, 16, 16))
    second(torch.randn(8, 3, 16, 16))
    updates = [first.make_update(), second.make_update()]
    (merge,) = Merger(source_of(first.stream.method)).merge(updates)
    first(torch.randn(8, 3, 16, 16))
    learned = state_of(first.stream.method).weights - updates[0].state.weights
    assert first.adopt(merge, updates[0]).action == "take"
    assert torch.allclose(state_of(first.stream.method).weights, merge.state.weights + learned, atol=1e-6)
    assert first.images == 8


def test_guard_rejects_a_harmful_merge() -> None:
    first, second = make_replicas(2)
    torch.manual_seed(1)
    images = torch.randn(32, 3, 16, 16)
    first(images)
    second(images)
    updates = [first.make_update(), second.make_update()]
    (merge,) = Merger(source_of(first.stream.method)).merge(updates)
    torch.manual_seed(2)
    weights = 30 * torch.randn_like(merge.state.weights)
    garbage = ReplicaState(weights, merge.state.means, merge.state.squares, merge.state.remembered)
    before = state_of(first.stream.method).weights
    event = first.adopt(type(merge)(merge.number, merge.members, (), merge.images, garbage), updates[0])
    assert event.action == "return"
    assert torch.equal(state_of(first.stream.method).weights, before)
    assert (first.base, first.images) == (0, 32)


def test_replica_without_images_has_no_evidence() -> None:
    (replica,) = make_replicas(1)
    nothing = replica.make_update()
    assert nothing.images == 0
    with pytest.raises(StateError, match="has seen no image"):
        replica.adopt(Merger(nothing.state).merge([]) or None, nothing)  # type: ignore[arg-type]


def test_reset_replica_starts_from_the_source() -> None:
    (replica,) = make_replicas(1)
    torch.manual_seed(1)
    for _ in range(3):
        replica(torch.randn(8, 3, 16, 16))
    replica.base = 5
    replica.stream.reset()
    replica(torch.randn(8, 3, 16, 16))
    assert (replica.base, replica.images) == (0, 8)
