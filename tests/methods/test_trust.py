"""TRUST: its modes, its orders, and the ranking of orders."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.export.networks import small
from tests.methods.networks import CLASSES, batches, convnet, make, run, same, vmamba, weights
from trust_tta.errors import ConfigError, ShapeError, TrustError, TrustWarning
from trust_tta.methods.base import Method
from trust_tta.methods.parallel import equal_parts
from trust_tta.methods.ranking import rank_orders
from trust_tta.methods.trust import Trust
from trust_tta.ops.segmentation_logits import upsample
from trust_tta.orders import PAPER_ORDERS, ScanOrder

ORDERS = ["abcd", "bcda", "dbca"]  # the second is not its own inverse


def by_copies(orders: list[str], stream: list[Tensor], *, split: bool, steps: int = 1) -> list[Tensor]:
    """The parallel mode by its definition: a network for each order; weights and moments averaged after every batch."""
    members = [make("trust", vmamba().double(), orders=[order], steps=steps) for order in orders]
    judge = make("bn", vmamba().double())
    results = []
    for images in stream:
        parts = equal_parts(images, len(orders)) if split else [images] * len(orders)
        for member, part in zip(members, parts, strict=True):
            member(part)
        mean = torch.stack([m.weights.snapshot() for m in members]).mean(0)
        averages = {
            key: torch.stack([m.weights.optimizer_state[key] for m in members]).mean(0)
            for key in ("exp_avg", "exp_avg_sq")
        }
        for member in members:
            member.weights.load(mean)
            member.weights.load_optimizer_state({**member.weights.optimizer_state, **averages})
        names = dict(judge.model.named_parameters())
        for name, value in members[0].weights.unflatten(mean).items():
            names[name].data.copy_(value)
        results.append(judge(images))
    return results


@pytest.mark.parametrize("parallel", ["replicate", "split"])
@pytest.mark.parametrize("steps", [1, 2])
def test_parallel_is_independent_copies_merged_after_the_batch(parallel: str, steps: int) -> None:
    stream = [images.double() for images in batches(3, images=8)]  # not divisible by the three orders
    method = make("trust", vmamba().double(), orders=ORDERS, mode=parallel, steps=steps)
    expected = by_copies(sorted(ORDERS), stream, split=parallel == "split", steps=steps)
    for ours, theirs in zip(run(method, stream), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def refuse_one(method: Method, *, place: int, part: str) -> None:
    """Make the loss, or only the gradient, of the learning pass at `place` not a number."""
    plain: Any = method.logits
    passes = 0

    def predict(images: Tensor, **options: Any) -> Tensor:
        nonlocal passes
        logits: Tensor = plain(images, **options)
        passes += logits.requires_grad
        if not logits.requires_grad or passes != place:
            return logits
        if part == "loss":
            return logits * float("nan")
        logits.register_hook(lambda gradient: gradient * float("nan"))
        return logits

    method.logits = predict  # type: ignore[method-assign]


@pytest.mark.parametrize("part", ["loss", "gradient"])
@pytest.mark.parametrize("mode", ["sequential", "replicate"])
def test_a_refused_order_is_as_if_it_had_not_been_there(mode: str, part: str) -> None:
    orders = sorted(ORDERS)
    method = make("trust", vmamba().double(), orders=orders, mode=mode)
    assert isinstance(method, Trust)
    without = make("trust", vmamba().double(), orders=[orders[0], orders[2]], mode=mode)
    refuse_one(method, place=2, part=part)
    for images in batches(3):
        wanted = without(images.double())
        if method.counters.batches > 0:  # the order takes part again: go on without it by leaving it out
            method.orders = [method.orders[0], method.orders[-1]]
        torch.testing.assert_close(method(images.double()), wanted, rtol=1e-9, atol=1e-9)
    assert method.counters.skipped == 1
    assert method.counters.updates == without.counters.updates


def test_an_order_of_several_steps_counts_if_one_of_them_was_made() -> None:
    images = batches(1)[0].double()
    method = make("trust", vmamba().double(), orders=["abcd", "bcda"], mode="replicate", steps=2)
    refuse_one(method, place=4, part="loss")  # the second step of the second order
    method(images)
    assert (method.counters.updates, method.counters.skipped) == (3, 1)
    ends = []
    for order, steps in (("abcd", 2), ("bcda", 1)):
        single = make("trust", vmamba().double(), orders=[order], steps=steps)
        single(images)
        ends.append(single.weights.snapshot())
    torch.testing.assert_close(method.weights.snapshot(), (ends[0] + ends[1]) / 2, rtol=1e-9, atol=1e-12)


def test_entropy_weights_belong_to_their_orders() -> None:
    images = batches(1)[0].double()
    method = make("trust", vmamba().double(), orders=ORDERS, mode="replicate", merge="entropy")
    method(images)
    judge = make("bn", vmamba().double())
    ends, weights_of = [], []
    for order in ORDERS:
        single = make("trust", vmamba().double(), orders=[order])
        single(images)
        ends.append(single.weights.snapshot())
        p = judge.predict(images, order=ScanOrder(order)).detach().softmax(1)
        weights_of.append(float(1 / -(p * p.log()).sum(1).mean()))
    assert len(set(weights_of)) == len(ORDERS)  # little, but more than the tolerance below lets pass
    wanted = sum(w * end for w, end in zip(weights_of, ends, strict=True)) / sum(weights_of)
    torch.testing.assert_close(method.weights.snapshot(), wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("parallel", ["replicate", "split"])
@pytest.mark.parametrize("order", ["abcd", "bcda"])
def test_parallel_of_one_order_agrees_with_sequential(parallel: str, order: str) -> None:
    sequential = make("trust", vmamba().double(), orders=[order])
    method = make("trust", vmamba().double(), orders=[order], mode=parallel)
    for images in batches(3):
        torch.testing.assert_close(method(images.double()), sequential(images.double()), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("merge", ["mean", "entropy", "slerp", "slerp_released"])
def test_parallel_does_not_depend_on_how_the_orders_are_listed(merge: str) -> None:
    stream = batches(2)
    results = [
        run(make("trust", vmamba(), orders=orders, mode="replicate", merge=merge), stream)
        for orders in (ORDERS, ORDERS[::-1], [ORDERS[1], ORDERS[0], ORDERS[2]])
    ]
    assert same(results[0], results[1])
    assert same(results[0], results[2])


def test_sequential_visits_the_orders_as_listed() -> None:
    stream = batches(2)
    assert not same(
        run(make("trust", vmamba(), orders=ORDERS), stream), run(make("trust", vmamba(), orders=ORDERS[::-1]), stream)
    )


@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_a_batch_too_small_to_split_is_refused_and_changes_nothing(norm: str) -> None:
    method = make("trust", vmamba(norm), orders=ORDERS, mode="split")
    run(method, batches(1))
    before = method.state_dict()
    with pytest.raises(ShapeError, match="2 images cannot be split among 3 orders"):
        method(batches(1, images=2)[0])
    assert same(method.state_dict(), before)
    assert method(batches(1, images=3)[0]).shape == (3, CLASSES)


def test_equal_parts_use_every_image_and_repeat_as_few_as_need_be() -> None:
    parts = equal_parts(torch.arange(8.0).view(8, 1, 1, 1), 3)
    assert parts.flatten(1).tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 0]]


@pytest.mark.parametrize("merge", ["entropy", "slerp", "slerp_released"])
def test_merges_differ_and_work(merge: str) -> None:
    stream = batches(2)
    mean = run(make("trust", vmamba(), orders=ORDERS), stream)
    other = run(make("trust", vmamba(), orders=ORDERS, merge=merge), stream)
    assert all(logits.isfinite().all() for logits in other)
    assert not same(mean, other)
    torch.testing.assert_close(mean[0], other[0], rtol=0.5, atol=0.5)


def test_online_progress_is_kept_and_episodic_forgets() -> None:
    first, second = batches(2)
    for mode in ("sequential", "replicate"):
        online = make("trust", vmamba(), orders=ORDERS, mode=mode)
        fresh = make("trust", vmamba(), orders=ORDERS, mode=mode)
        episodic = make("trust", vmamba(), orders=ORDERS, mode=mode, episodic=True)
        assert not same(run(online, [first, second])[1], fresh(second))
        fresh.reset()
        assert same(run(episodic, [first, second])[1], fresh(second))


def test_several_steps_average_the_last_step_only() -> None:
    images = batches(1)[0]
    method = make("trust", vmamba(), orders=ORDERS, steps=2)
    method(images)
    chain = make("trust", vmamba(), orders=ORDERS)
    assert isinstance(chain, Trust)
    with torch.enable_grad():
        chain.adapt_under_orders(images)
        thetas = [step.weights for step in chain.adapt_under_orders(images)]
    torch.testing.assert_close(method.weights.snapshot(), torch.stack(thetas).mean(0))


def test_evaluate_order_decides_the_prediction_only() -> None:
    images = batches(1)[0]
    default, other = make("trust", vmamba(), k=2), make("trust", vmamba(), k=2, evaluate_order="bcda")
    assert not torch.equal(default(images), other(images))
    assert same(default.state_dict()["adapted"], other.state_dict()["adapted"])


@pytest.mark.parametrize("options", [{}, {"mode": "replicate"}, {"mode": "split", "split_statistics": "batch"}])
def test_class_confusion_takes_the_place_of_labels(options: dict[str, Any]) -> None:
    """By hand for one order: the loss is (sum of M - trace of M) / classes of the normalized confusion M."""
    images = batches(1)[0]
    method = make("trust", vmamba(), k=1, loss="confusion", optimizer="sgd", momentum=0, lr=0.1, **options)
    model = copy.deepcopy(vmamba()).train()
    p = (model(images) / 2.5).softmax(1)
    sure = 1 + torch.exp((p * (p + 1e-5).log()).sum(1)).detach()
    confusion = torch.einsum("n,nc,nd->cd", sure * len(p) / sure.sum(), p, p)
    confusion = confusion / confusion.sum(1, keepdim=True)
    ((confusion.sum() - confusion.trace()) / CLASSES).backward()
    method(images)
    for name, weight in method.adapted.items():
        start = model.get_parameter(name)
        assert start.grad is not None
        torch.testing.assert_close(weight, start - 0.1 * start.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("predict", ["before", "after"])
def test_mirrored_views_change_the_prediction_alone(predict: str) -> None:
    first, second = batches(2)
    plain, mirror = (make("trust", vmamba(), predict=predict, views=views) for views in ("none", "mirror"))
    source = make("bn", vmamba())
    outputs = [(plain(first), mirror(first)), (plain(second), mirror(second))]
    assert same(plain.state_dict()["adapted"], mirror.state_dict()["adapted"])
    assert mirror.counters.forwards - plain.counters.forwards == 2 * (1 if predict == "after" else 2)
    for images, (one, both) in zip((first, second), outputs, strict=True):
        assert torch.allclose(both.exp().sum(1), torch.ones(len(images)))
        assert not torch.allclose(one.log_softmax(1), both, atol=1e-4)
    if predict == "before":
        views = source(torch.cat([first, first.flip(-1)])).softmax(1).chunk(2)
        assert torch.allclose(outputs[0][1].exp(), sum(views) / 2, atol=1e-5)
    assert torch.allclose(mirror.evaluate(second), mirror.evaluate(second.flip(-1)), atol=1e-5)


def test_stochastic_depth_changes_the_run_repeats_it_and_spares_the_global_generator() -> None:
    stream = batches(2)
    with_depth = [make("trust", vmamba(drop_path=0.5), k=2, stochastic_depth=True) for _ in range(2)]
    torch.manual_seed(3)
    first = run(with_depth[0], stream)
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(1))
    assert same(first, run(with_depth[1], stream))
    assert not same(first, run(make("trust", vmamba(drop_path=0.5), k=2), stream))
    assert with_depth[0].counters.forwards == 2 * (2 * 2 + 1)  # labels need a forward of their own


def test_labels_of_stochastic_depth_come_from_the_undisturbed_network(monkeypatch: pytest.MonkeyPatch) -> None:
    method = make("trust", vmamba(drop_path=0.5), orders=["abcd"], stochastic_depth=True)
    assert isinstance(method, Trust)
    images = batches(1, images=32)[0]
    expected = make("bn", vmamba(drop_path=0.5))(images).argmax(1)
    seen: list[tuple[Any, Any]] = []
    plain = method.loss

    def loss(*given: Any) -> Tensor:
        seen.append((given[0], given[1]))
        return plain(*given)

    monkeypatch.setattr(method, "loss", loss)
    method(images)
    ((logits, labels),) = seen
    assert torch.equal(labels, expected)
    assert not torch.equal(upsample(logits).argmax(1), expected)


def test_logits_before_are_of_the_weights_before_the_batch() -> None:
    cases: list[tuple[dict[str, Any], bool]] = [
        ({"orders": ["abcd", "bcda"]}, True),
        ({"orders": ["bcda", "abcd"]}, False),  # the default order comes when weights have changed
        ({"orders": ["bcda", "abcd"], "mode": "replicate"}, True),
        ({"orders": ["bcda"]}, False),
        ({"orders": ["bcda"], "evaluate_order": "bcda"}, True),
    ]
    first, second = batches(2)
    for options, known in cases:
        method: Method = make("trust", vmamba(), **options)
        method(first)
        expected = method.fork()
        judged = expected.predict(second, order=options.get("evaluate_order", "abcd")).detach()
        method(second)
        assert (method.logits_before is not None) == known
        if method.logits_before is not None:
            torch.testing.assert_close(method.logits_before, judged, rtol=1e-4, atol=1e-4)


def test_adapted_parameters_are_those_of_the_paper() -> None:
    model = vmamba()
    ss2d = set(make("trust", model).adapted)
    expected = {n for n, _ in model.named_parameters() if ".op." in n and ".out_norm." not in n}
    norms = {
        f"{m}.{p}" for m, k in model.named_modules() if isinstance(k, torch.nn.BatchNorm2d) for p in ("weight", "bias")
    }
    assert ss2d == expected | norms
    assert set(make("trust", model, parameters="bn").adapted) == norms
    assert set(make("tent", model).adapted) == norms


def test_a_ranking_serves_as_the_orders() -> None:
    model = vmamba()
    ranking = rank_orders(model, batches(2))
    chosen = make("trust", model, orders=ranking, k=4).options.chosen()
    assert chosen == [order for order, _ in ranking[:4]]
    every = make("trust", model, orders=[order for order, _ in ranking], k=4).orders
    assert every == [order for order, _ in ranking]


def test_default_orders_are_the_papers_of_the_lowest_entropy() -> None:
    """CIFAR-10-C: abcd 0.62, abdc 0.75, dbca 0.75, adcb 0.77, badc 0.87, bacd 0.89; run in the paper's sequence."""
    expected = {1: "abcd", 2: "abcd abdc", 3: "abcd abdc dbca", 4: "abcd abdc adcb dbca", 5: "abcd abdc adcb badc dbca"}
    for k, orders in expected.items():
        assert [str(order) for order in make("trust", vmamba(), k=k).orders] == orders.split()
    assert tuple(make("trust", vmamba(), k=6).orders) == PAPER_ORDERS


def test_scan_parameters_are_those_of_ss2d_alone() -> None:
    model = vmamba()
    expected = {n for n, _ in model.named_parameters() if ".op." in n and ".out_norm." not in n}
    assert set(make("trust", model, parameters="scan").adapted) == expected


class SideBySide:
    """The paper's parallel network by its definition: K blocks of SS2D beside each other, the rest shared."""

    def __init__(self, orders: list[str], lr: float) -> None:
        self.orders, self.net = [ScanOrder(o) for o in orders], vmamba().double().train()
        self.copies = [copy.deepcopy(self.net) for _ in orders]
        roles = self.net.parameter_roles()
        self.own = [n for n, role in roles.items() if role.kind in ("scan", "projection")]
        self.shared = [n for n, role in roles.items() if role.kind == "norm"]
        parameters = [self.net.get_parameter(n) for n in self.shared]
        parameters += [c.get_parameter(n) for c in self.copies for n in self.own]
        self.adam = torch.optim.Adam(parameters, lr=lr)

    def __call__(self, images: Tensor) -> Tensor:
        net: Any = self.net
        x = net.embed(images)
        for i, stage in enumerate(net.layers):
            for j, block in enumerate(stage.blocks):
                normal, outputs = block.norm(x).tensor_split(len(self.orders)), []
                for each, order, part in zip(self.copies, self.orders, normal, strict=True):
                    op = each.get_submodule(f"layers.{i}.blocks.{j}.op")
                    outputs.append(op(part, each.scan_directions(order, 1)))
                x = x + torch.cat(outputs)
                x = x + block.mlp(block.norm2(x))
            x = stage.downsample(x)
        return self.net.forward_head(self.net.pool(x))

    def adapt(self, images: Tensor) -> Tensor:
        logits = self(images)
        self.adam.zero_grad()
        torch.nn.functional.cross_entropy(logits, logits.detach().argmax(1)).backward()
        self.adam.step()
        merged = copy.deepcopy(self.net)
        for name in self.own:
            mean = torch.stack([c.get_parameter(name).detach() for c in self.copies]).mean(0)
            merged.get_parameter(name).data.copy_(mean)
        with torch.no_grad():
            result: Tensor = merged(images)
            return result


def test_split_with_the_statistics_of_the_batch_is_the_papers_parallel_network() -> None:
    images = batches(1, images=11)[0].double()  # not divisible by the three orders
    orders = sorted(ORDERS)
    method = make("trust", vmamba().double(), orders=orders, mode="split", split_statistics="batch", lr=1e-2)
    expected = SideBySide(orders, lr=1e-2).adapt(images)
    torch.testing.assert_close(method(images), expected, rtol=1e-7, atol=1e-7)
    assert (method.counters.forwards, method.counters.backwards, method.counters.updates) == (2, 1, 3)
    of_parts = make("trust", vmamba().double(), orders=orders, mode="split", lr=1e-2)
    assert not torch.allclose(of_parts(images), expected, atol=1e-3)


def test_where_images_do_not_meet_the_statistics_of_a_split_make_no_difference() -> None:
    stream = batches(2)
    for norm, options in (("layer", {}), ("batch", {"statistics": "source"})):
        runs = [
            run(make("trust", vmamba(norm), orders=ORDERS, mode="split", split_statistics=s, **options), stream)
            for s in ("part", "batch")
        ]
        assert same(runs[0], runs[1])


def test_a_network_without_a_place_for_copies_is_refused() -> None:
    """GroupMamba stacks the weights of its groups itself: copies of them were made, and never met an image."""
    with pytest.raises(ConfigError, match="for which GroupMamba has no place; use 'part'"):
        make("trust", small("groupmamba"), mode="split", split_statistics="batch")
    learned = make("trust", small("groupmamba"), mode="split", split_statistics="batch", statistics="source", k=2)
    before = {name: weight.detach().clone() for name, weight in learned.adapted.items() if ".A_logs" in name}
    learned(batches(1)[0])
    assert any(not torch.equal(weight, learned.adapted[name]) for name, weight in before.items())


def test_split_with_the_statistics_of_the_batch_of_one_order_is_sequential() -> None:
    one = make("trust", vmamba().double(), orders=["bcda"], mode="split", split_statistics="batch", steps=2)
    sequential = make("trust", vmamba().double(), orders=["bcda"], steps=2)
    for images in batches(3):
        torch.testing.assert_close(one(images.double()), sequential(images.double()), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"orders": []}, "orders: the list is empty"),
        ({"orders": ["abca"]}, "not a permutation"),
        ({"k": 7}, "1 to 6"),
        ({"k": 0}, "k is 0; give a value >= 1"),
        ({"mode": "both"}, "mode is 'both'; choose one of sequential, replicate, split"),
        ({"mode": "replicated"}, "did you mean 'replicate'"),
        ({"parallel": "x"}, "no such option"),
        ({"merge": "middle"}, "choose one of mean, entropy, slerp, slerp_released"),
        ({"parameters": "head"}, "choose one of auto, ss2d, scan, bn, all"),
        ({"steps": 0}, "steps is 0; give a value >= 1"),
        ({"steps": 1.5}, "steps is 1.5; give an integer"),
        ({"lr": -1.0}, "lr is -1.0; give a value >= 0"),
        ({"lr": float("nan")}, "lr is nan"),
    ],
    ids=str,
)
def test_wrong_options_say_what_is_allowed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        make("trust", vmamba(), **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["trust", "trust_naive", "ensemble", "repetition", "augmentation"])
def test_a_network_without_orders_is_refused_with_a_way_on(name: str) -> None:
    with pytest.raises(TrustError, match="use a VMamba, or another method such as 'tent'"):
        make(name, convnet())


def test_rank_orders_against_a_slow_loop() -> None:
    model, stream = vmamba(), batches(2)
    before, flags = weights(model), [m.training for m in model.modules()]
    ranking = rank_orders(model, iter(stream))
    judge = copy.deepcopy(model).train()  # batch statistics
    expected: dict[ScanOrder | str, float] = {}
    for order in ScanOrder.all():
        with torch.no_grad():
            p = torch.cat([judge(images, order=order) for images in stream]).double().softmax(1).numpy()
        expected[order] = float(np.mean([-sum(x * np.log(x) for x in row) for row in p]))
    assert sorted(order for order, _ in ranking) == sorted(expected)
    assert [e for _, e in ranking] == sorted(e for _, e in ranking)
    for ranked, value in ranking:
        assert value == pytest.approx(expected[ranked], rel=1e-4)
    assert same(weights(model), before)
    assert [m.training for m in model.modules()] == flags


def test_rank_orders_without_images_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one batch"):
        rank_orders(vmamba(), [])


def test_labels_loss_warns_on_networks_without_batch_norm() -> None:
    with pytest.warns(TrustWarning, match="pseudo-labels collapse .* loss='confusion' works there"):
        make("trust", vmamba("layer"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", TrustWarning)
        make("trust", vmamba("layer"), loss="confusion")
        make("trust", vmamba("batch"))
