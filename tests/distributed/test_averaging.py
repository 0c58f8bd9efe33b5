"""The mathematics of a merge, against sums that are done another way, and against replicas that lie."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import trust_tta as tt
from trust_tta.distributed.averaging import (
    Averaging,
    Merger,
    Offer,
    State,
    bounded,
    by_domain,
    keep_alike,
    merge_offers,
    trimmed_mean,
)
from trust_tta.distributed.replicas import Replica, load_into, source_of, state_of
from trust_tta.errors import StateError

SIZE, CHANNELS = 12, 5
PLAIN = Averaging(trim=0.0, power=0.0, outlier=1e9)
SAME = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
OTHER = torch.tensor([[2.0, 2.0], [5.0, 5.0]])


def state(seed: int, *, remembered: float = 0.0) -> State:
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn(CHANNELS, generator=generator)
    return State(torch.randn(SIZE, generator=generator), means, means.square() + 1, remembered)


def offer(name: str, weights: Tensor, *, images: int = 10, base: int = 0, signature: Tensor = SAME) -> Offer:
    return Offer(name, base, images, State(weights, torch.zeros(CHANNELS), torch.ones(CHANNELS)), signature)


def zero() -> State:
    return State(torch.zeros(SIZE), torch.zeros(CHANNELS), torch.ones(CHANNELS))


def test_the_plain_merge_is_the_mean_by_evidence() -> None:
    offers = [offer("a", torch.full((SIZE,), 1.0), images=20), offer("b", torch.full((SIZE,), 2.0), images=10)]
    (merge,) = Merger(zero(), PLAIN).merge(offers)
    assert merge.members == ("a", "b")
    assert merge.images == 30
    assert torch.allclose(merge.state.weights, torch.full((SIZE,), 4 / 3))


def test_power_one_is_the_sum_of_what_was_learned() -> None:
    offers = [offer(str(i), torch.full((SIZE,), float(i))) for i in range(4)]
    (merge,) = Merger(zero(), PLAIN.changed(power=1.0)).merge(offers)
    assert torch.allclose(merge.state.weights, torch.full((SIZE,), 6.0))


def test_later_rounds_start_from_the_merge_they_come_from() -> None:
    merger = Merger(zero(), PLAIN.changed(power=1.0))
    (first,) = merger.merge([offer("a", torch.ones(SIZE)), offer("b", torch.ones(SIZE))])
    again = [offer(name, first.state.weights + 1, base=first.number) for name in "ab"]
    (second,) = merger.merge(again)
    assert torch.allclose(second.state.weights, torch.full((SIZE,), 4.0))


def test_a_base_that_nobody_remembers_is_averaged_as_it_is() -> None:
    offers = [offer("a", torch.ones(SIZE), base=77), offer("b", torch.full((SIZE,), 3.0), base=78)]
    (merge,) = Merger(zero(), PLAIN.changed(power=1.0)).merge(offers)
    assert torch.allclose(merge.state.weights, torch.full((SIZE,), 2.0))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(32, 64), min_size=2, max_size=6), st.integers(1, 300), st.integers(0, 10_000))
def test_merged_statistics_are_those_of_one_norm_that_saw_all_images(counts: list[int], memory: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    base_mean, base_square = torch.randn(CHANNELS, generator=generator), torch.full((CHANNELS,), 9.0)
    base = State(torch.zeros(SIZE), base_mean, base_square, float(memory))
    offers, images = [], []
    for i, count in enumerate(counts):
        seen = torch.randn(count, CHANNELS, generator=generator)
        images.append(seen)
        worth = len(counts)  # each stands for those that the others see
        share = worth * count / (memory + worth * count)
        means = base_mean + share * (seen.mean(0) - base_mean)
        squares = base_square + share * (seen.square().mean(0) - base_square)
        own = State(torch.zeros(SIZE), means, squares, float(memory + worth * count))
        offers.append(Offer(str(i), 0, count, own, SAME, worth))
    merge = merge_offers(offers, {0: base}, PLAIN, number=1)
    seen = torch.cat(images)
    total = memory + len(seen)
    assert torch.allclose(merge.state.means, (memory * base_mean + seen.sum(0)) / total, atol=1e-4)
    assert torch.allclose(merge.state.squares, (memory * base_square + seen.square().sum(0)) / total, atol=1e-3)
    assert merge.state.remembered == pytest.approx(total)


def test_pooled_sums_are_those_of_one_method_that_forgets_as_it_sees_all_images() -> None:
    torch.manual_seed(0)
    seen, forget, shares = torch.rand(6, 8, 4), 2 ** (-1 / 64), torch.full((4,), 0.25)

    def follow(sums: Tensor, images: Tensor, worth: int = 1) -> Tensor:
        for image in images:
            sums = forget**worth * sums + worth * image / image.sum()
        return sums

    start = 50 * shares
    base = State(torch.zeros(SIZE), torch.zeros(CHANNELS), torch.ones(CHANNELS), 0.0, shares, 50.0)
    offers = []
    for i, images in enumerate(seen):
        sums = follow(start, images, worth=6)
        own = State(base.weights, base.means, base.squares, 8.0, sums / sums.sum(), float(sums.sum()))
        offers.append(Offer(str(i), 0, len(images), own, SAME, 6))
    merged = merge_offers(offers, {0: base}, PLAIN, number=1).state
    one = follow(start, seen.flatten(0, 1))
    assert torch.allclose(merged.shares, one / one.sum(), atol=0.01)
    assert merged.shared == pytest.approx(float(one.sum()), rel=0.15)


def test_statistics_never_move_farther_than_those_of_the_replicas() -> None:
    base = State(torch.zeros(SIZE), torch.zeros(CHANNELS), torch.ones(CHANNELS), 32.0)
    own = State(torch.zeros(SIZE), torch.full((CHANNELS,), 0.2), torch.full((CHANNELS,), 1.1), 40.0)
    merged = merge_offers([Offer(name, 0, 8, own, SAME) for name in "abcd"], {0: base}, PLAIN, number=1).state
    assert torch.allclose(merged.means, own.means)
    assert merged.remembered == pytest.approx(40)


def test_sums_in_an_odd_form_are_left_out_of_the_pool() -> None:
    shares = [torch.full((4,), 0.25), torch.full((3,), 1 / 3), torch.full((4,), 0.25)]
    states = [State(torch.ones(SIZE), torch.zeros(CHANNELS), torch.ones(CHANNELS), 0.0, s, 10.0) for s in shares]
    (merge,) = Merger(zero(), PLAIN).merge([Offer(str(i), 0, 10, each, SAME) for i, each in enumerate(states)])
    assert torch.allclose(merge.state.shares, shares[0])
    assert merge.state.shared == 20


def test_replicas_in_other_domains_are_left_alone() -> None:
    offers = [offer("a", torch.ones(SIZE)), offer("b", torch.ones(SIZE)), offer("c", torch.ones(SIZE), signature=OTHER)]
    (merge,) = Merger(zero()).merge(offers)
    assert merge.members == ("a", "b")


def test_two_domains_give_two_merges() -> None:
    kinds = [SAME, OTHER, SAME, OTHER]
    offers = [offer(str(i), torch.full((SIZE,), float(i)), signature=kind) for i, kind in enumerate(kinds)]
    merges = Merger(zero(), PLAIN).merge(offers)
    assert [merge.members for merge in merges] == [("0", "2"), ("1", "3")]
    assert len({merge.number for merge in merges}) == 2


def test_domains_are_chains_of_near_signatures() -> None:
    step = torch.tensor([[0.3, 0.3], [0.09, 0.09]])
    chain = [offer(str(i), torch.ones(SIZE), signature=SAME + i * step) for i in (0, 2, 1)]
    assert [[o.replica for o in group] for group in by_domain(chain, limit=0.2)] == [["0", "2", "1"]]
    assert len(by_domain(chain[:2], limit=0.2)) == 2


def test_offers_that_cannot_be_merged_are_passed_over() -> None:
    good = [offer("a", torch.ones(SIZE)), offer("b", torch.ones(SIZE))]
    bad = [
        offer("nan", torch.full((SIZE,), math.nan)),
        offer("short", torch.ones(SIZE - 1)),
        offer("idle", torch.ones(SIZE), images=0),
        offer("odd", torch.ones(SIZE), signature=torch.full((2, 1), math.nan)),
        offer("half", torch.ones(SIZE).half()),
    ]
    (merge,) = Merger(zero()).merge([*bad, *good])
    assert merge.members == ("a", "b")


def test_the_first_merges_come_sooner() -> None:
    assert [Averaging(every=256).interval(merges) for merges in range(6)] == [16, 32, 64, 128, 256, 256]
    assert Averaging(every=2).interval(0) == 1


def test_one_replica_is_no_fleet() -> None:
    assert Merger(zero()).merge([offer("a", torch.ones(SIZE))]) == []


@pytest.mark.parametrize("garbage", [1e3, -50.0, 1e30])
def test_one_liar_of_eight_moves_nothing(garbage: float) -> None:
    torch.manual_seed(0)
    honest = [offer(str(i), torch.ones(SIZE) + 0.1 * torch.randn(SIZE)) for i in range(7)]
    liar = offer("liar", torch.full((SIZE,), garbage), images=10**9)
    (with_liar,) = Merger(zero(), Averaging(power=0.0)).merge([*honest, liar])
    (without,) = Merger(zero(), Averaging(power=0.0)).merge(honest)
    assert with_liar.left_out == ("liar",)
    assert torch.allclose(with_liar.state.weights, without.state.weights)


def test_the_trimmed_mean_bounds_a_liar_that_hides_among_the_others() -> None:
    rows = torch.arange(8.0)[:, None].expand(8, 3).clone()
    rows[7] = 1e6
    evidence = torch.full((8,), 1 / 8, dtype=torch.float64)
    assert torch.allclose(trimmed_mean(rows, evidence, trim=0.125), torch.full((3,), 3.5))
    assert torch.allclose(trimmed_mean(rows[:7], evidence[:7] * 8 / 7, trim=0.0), torch.full((3,), 3.0))


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 9), st.floats(0, 0.5), st.booleans(), st.integers(0, 10_000))
def test_the_trimmed_mean_is_that_of_sorted_columns(count: int, trim: float, even: bool, seed: int) -> None:
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


def test_alike_is_a_matter_of_three() -> None:
    assert keep_alike(torch.tensor([[0.0], [100.0]]), factor=3.0) == [True, True]
    assert keep_alike(torch.tensor([[0.0], [0.1], [0.2], [100.0]]), factor=3.0) == [True, True, True, False]


def test_nobody_counts_for_more_than_twice_the_median() -> None:
    assert bounded([10, 10, 10, 10**9]).tolist() == pytest.approx([0.2, 0.2, 0.2, 0.4])


def test_old_merges_are_forgotten_and_the_source_is_not() -> None:
    merger = Merger(zero(), PLAIN)
    for _ in range(9):
        merger.merge([offer("a", torch.ones(SIZE)), offer("b", torch.ones(SIZE))])
    assert 0 in merger.bases
    assert len(merger.bases) <= 4
    assert merger.number in merger.bases


# Replicas over real streams


def make_replicas(count: int) -> list[Replica]:
    torch.manual_seed(0)
    model = tt.create_model("vmamba_nano", num_classes=4, depths=[1], dims=[8], patch_size=4)
    first = tt.create_method("tide", model)
    methods = [first, *(first.fork() for _ in range(count - 1))]
    return [Replica(tt.Stream(method), f"replica {i}", fleet=count) for i, method in enumerate(methods)]


def test_a_state_survives_the_way_into_a_method_and_out_again() -> None:
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


def test_replicas_that_take_a_merge_are_one() -> None:
    replicas = make_replicas(3)
    torch.manual_seed(2)
    for replica in replicas:
        replica(torch.randn(8, 3, 16, 16))
    merger = Merger(source_of(replicas[0].stream.method))
    offers = {replica.name: replica.offer() for replica in replicas}
    assert {o.images for o in offers.values()} == {8}
    (merge,) = merger.merge(list(offers.values()))
    events = [replica.take(merge, offers[replica.name]) for replica in replicas]
    assert [(event.kind, event.action) for event in events] == [("merge", "take")] * 3
    states = [state_of(replica.stream.method) for replica in replicas]
    assert all(torch.equal(s.weights, merge.state.weights) for s in states)
    assert all(s.remembered == pytest.approx(merge.state.remembered) for s in states)
    assert all(torch.allclose(s.shares, merge.state.shares) and s.shared == pytest.approx(24) for s in states)
    assert [(replica.base, replica.images) for replica in replicas] == [(merge.number, 0)] * 3


def test_what_was_learned_while_a_merge_was_made_is_kept() -> None:
    first, second = make_replicas(2)
    torch.manual_seed(1)
    first(torch.randn(8, 3, 16, 16))
    second(torch.randn(8, 3, 16, 16))
    offers = [first.offer(), second.offer()]
    (merge,) = Merger(source_of(first.stream.method)).merge(offers)
    first(torch.randn(8, 3, 16, 16))
    learned = state_of(first.stream.method).weights - offers[0].state.weights
    assert first.take(merge, offers[0]).action == "take"
    assert torch.allclose(state_of(first.stream.method).weights, merge.state.weights + learned, atol=1e-6)
    assert first.images == 8


def test_the_guard_returns_a_merge_that_is_garbage() -> None:
    first, second = make_replicas(2)
    torch.manual_seed(1)
    images = torch.randn(32, 3, 16, 16)
    first(images)
    second(images)
    offers = [first.offer(), second.offer()]
    (merge,) = Merger(source_of(first.stream.method)).merge(offers)
    torch.manual_seed(2)
    weights = 30 * torch.randn_like(merge.state.weights)
    garbage = State(weights, merge.state.means, merge.state.squares, merge.state.remembered)
    before = state_of(first.stream.method).weights
    event = first.take(type(merge)(merge.number, merge.members, (), merge.images, garbage), offers[0])
    assert event.action == "return"
    assert torch.equal(state_of(first.stream.method).weights, before)
    assert (first.base, first.images) == (0, 32)


def test_a_replica_that_saw_nothing_offers_no_evidence() -> None:
    (replica,) = make_replicas(1)
    nothing = replica.offer()
    assert nothing.images == 0
    with pytest.raises(StateError, match="has seen no image"):
        replica.take(Merger(nothing.state).merge([]) or None, nothing)  # type: ignore[arg-type]


def test_a_replica_that_was_reset_starts_from_the_source_again() -> None:
    (replica,) = make_replicas(1)
    torch.manual_seed(1)
    for _ in range(3):
        replica(torch.randn(8, 3, 16, 16))
    replica.base = 5
    replica.stream.reset()
    replica(torch.randn(8, 3, 16, 16))
    assert (replica.base, replica.images) == (0, 8)
