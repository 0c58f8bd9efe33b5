"""The analyses against computations of their own."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from benchmarks.order_analysis import (
    LossSurface,
    adapt_under_orders,
    loss_surface,
    main,
    memory_by_k,
    span_plane,
    take_orders,
    trust_orders,
    weight_norms,
)

from tests.bench.tiny import read_config, tiny_config
from tests.cli.test_bench import config as config  # a fixture
from trust_tta.bench.experiment import Experiment
from trust_tta.errors import BackendError, ConfigError, DataError
from trust_tta.models.networks import require_ours
from trust_tta.orders import PAPER_ORDERS, ScanOrder

ORDERS = ["abcd", "badc", "dbca"]
TRUST: dict[str, Any] = {"name": "trust", "orders": ORDERS, "lr": 0.01}


def opened(folder: Path, **changes: Any) -> Experiment:
    changes = {"methods": [TRUST], "data": {"limit": 40}, **changes}
    return Experiment(tiny_config(folder, **changes))


def surface(place: Experiment, points: int = 3) -> LossSurface:
    return loss_surface(place, place.domains[0], points=points)


def by_hand(place: Experiment) -> list[dict[str, torch.Tensor]]:
    """The adapted tensors after each order on the last batch: pseudo-labels and Adam, written out."""
    domain = place.domains[0]
    model = copy.deepcopy(require_ours(place.network(domain), by="a test")).eval()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.track_running_stats, module.running_mean, module.running_var = False, None, None
    kinds = ("scan", "projection", "norm")
    adapted = {n: p for n, p in model.named_parameters() if model.parameter_roles()[n].kind in kinds}
    adam = torch.optim.Adam(adapted.values(), lr=0.01)
    kept: list[dict[str, torch.Tensor]] = []
    for batch in domain.batches:
        kept = []
        for order in ORDERS:
            logits = model(batch.images, order=order)
            adam.zero_grad()
            F.cross_entropy(logits, logits.argmax(1)).backward()
            adam.step()
            kept.append({n: p.detach().clone() for n, p in adapted.items()})
        with torch.no_grad():  # the mean is what the next batch begins with
            for name, parameter in adapted.items():
                parameter.copy_(torch.stack([weights[name] for weights in kept]).mean(0))
    return kept


def loss_by_hand(place: Experiment, weights: dict[str, torch.Tensor]) -> float:
    model = copy.deepcopy(require_ours(place.network(place.domains[0]), by="a test")).train()  # batch statistics
    model.set_stochastic_depth(False)
    model.load_state_dict(weights, strict=False)
    total, count = 0.0, 0
    with torch.no_grad():
        for batch in place.domains[0].batches:
            chosen = model(batch.images).log_softmax(1)[torch.arange(len(batch)), batch.labels]
            total, count = total - float(chosen.sum()), count + len(batch)
    return total / count


def test_losses_of_the_three_networks_and_their_mean(tmp_path: Path) -> None:
    place = opened(tmp_path)
    found, weights = surface(place), by_hand(place)
    assert [point.name for point in found.adapted] == ORDERS
    for point, theirs in zip(found.adapted, weights, strict=True):
        assert point.loss == pytest.approx(loss_by_hand(place, theirs), rel=1e-4)
    mean = {name: torch.stack([w[name] for w in weights]).mean(0) for name in weights[0]}
    assert found.mean.loss == pytest.approx(loss_by_hand(place, mean), rel=1e-4)
    assert len({round(point.loss, 6) for point in (*found.adapted, found.mean)}) == 4


def test_places_on_the_plane_are_distances_between_weights(tmp_path: Path) -> None:
    place = opened(tmp_path)
    found = surface(place)
    flat = [np.concatenate([t.numpy().ravel() for t in w.values()]).astype(np.float64) for w in by_hand(place)]
    for i in range(3):
        for j in range(i):
            one, other = found.adapted[i], found.adapted[j]
            apart = float(np.hypot(one.x - other.x, one.y - other.y))
            assert apart == pytest.approx(np.linalg.norm(flat[i] - flat[j]), rel=1e-3)
    assert found.mean.x == pytest.approx(np.mean([point.x for point in found.adapted]))
    assert found.mean.y == pytest.approx(np.mean([point.y for point in found.adapted]))
    assert min(found.x) < min(p.x for p in found.adapted) < max(p.x for p in found.adapted) < max(found.x)
    assert min(found.y) < min(p.y for p in found.adapted) < max(p.y for p in found.adapted) < max(found.y)


def test_the_plane_holds_its_corners_and_the_grid_is_the_loss_at_its_places(tmp_path: Path) -> None:
    place = opened(tmp_path)
    domain = place.domains[0]
    adapted = adapt_under_orders(place, domain, [ScanOrder(order) for order in ORDERS])
    plane = span_plane(adapted.weights)
    for corner, weights in zip(plane.corners, adapted.weights, strict=True):
        assert adapted.loss(plane.at(*corner)) == pytest.approx(adapted.loss(weights), abs=1e-5)
        torch.testing.assert_close(plane.at(*corner), weights, atol=1e-6, rtol=1e-5)
    adapted.method.reset()
    found = surface(place)
    for i, y in enumerate(found.y):
        for j, x in enumerate(found.x):
            named = adapted.method.weights.unflatten(plane.at(x, y))
            assert found.loss[i][j] == pytest.approx(loss_by_hand(place, named), rel=1e-4)


def test_the_network_is_left_as_it_was(tmp_path: Path) -> None:
    place = opened(tmp_path)
    before = {n: t.clone() for n, t in place.network(place.domains[0]).state_dict().items()}
    surface(place)
    weight_norms(place, place.domains[0])
    after = place.network(place.domains[0]).state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_norms_by_numpy(tmp_path: Path) -> None:
    place = opened(tmp_path)
    weights = by_hand(place)
    found = weight_norms(place, place.domains[0])
    assert sorted(found) == ["biases", "weights"]
    names = [name for record in found.values() for name in record.names]
    assert sorted(names) == sorted(n for n in weights[0] if ".op." in n)
    for kind, record in found.items():
        for name, mean, deviation in zip(record.names, record.mean, record.deviation, strict=True):
            assert name.endswith("bias") == (kind == "biases")
            stacked = np.stack([w[name].numpy().ravel() for w in weights]).astype(np.float64)
            assert mean == pytest.approx(np.mean(np.linalg.norm(stacked, axis=1)), rel=1e-5)
            assert deviation == pytest.approx(np.mean(np.std(stacked, axis=0, ddof=1)), rel=2e-3)


def test_orders_come_from_the_experiment(tmp_path: Path) -> None:
    assert [str(o) for o in trust_orders(opened(tmp_path).config)] == ORDERS
    assert len(trust_orders(opened(tmp_path, methods=["tent"]).config)) == 6
    place = opened(tmp_path, methods=[{"name": "trust", "k": 2}])
    with pytest.raises(ConfigError, match="TRUST has 2 orders here"):
        surface(place)


def test_orders_are_the_papers_first() -> None:
    assert take_orders(6) == list(PAPER_ORDERS)
    assert len(set(take_orders(24))) == 24


def test_networks_on_a_line_have_no_plane() -> None:
    line = [torch.tensor([1.0, 2.0, 3.0]) * i for i in (1, 2, 4)]
    with pytest.raises(DataError, match="on a line"):
        span_plane(line)
    with pytest.raises(DataError, match="on a line"):
        span_plane([line[0]] * 3)


def test_networks_of_equal_start_lie_around_their_mean(tmp_path: Path) -> None:
    """In the parallel mode every order starts where the others do; one after the other they move along a path."""
    apart = []
    for mode in ("sequential", "replicate"):
        place = opened(tmp_path, methods=[{"name": "trust", "k": 3, "lr": 0.01, "mode": mode}])
        first, second, third = ((point.x, point.y) for point in surface(place, points=2).adapted)
        apart.append(math.dist(first, third) / max(math.dist(first, second), math.dist(second, third)))
    assert apart[0] > 1.5 > 1.2 > apart[1]


def test_records_and_figures_are_written(config: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    main(["surface", str(config), "--points", "2", "--out", str(out)])
    main(["norms", str(config), "--out", str(out)])
    names = ["norms-biases-fog", "norms-weights-fog", "surface-fog"]
    assert sorted(path.name for path in out.iterdir()) == [f"{n}.{end}" for n in names for end in ("json", "pdf")]
    record = json.loads((out / "surface-fog.json").read_text())
    assert (len(record["x"]), len(record["loss"]), len(record["adapted"])) == (2, 2, 3)


def test_memory_needs_a_gpu(tmp_path: Path) -> None:
    place = opened(tmp_path)
    with pytest.raises(BackendError, match="needs a CUDA device and this run is on 'cpu'"):
        memory_by_k(place, place.domains[0])


@pytest.mark.gpu
def test_another_order_needs_only_the_memory_of_its_weights() -> None:
    path = Path(__file__).parents[2] / "configs" / "paper" / "table1.toml"
    place = Experiment(read_config(path, {"device": "cuda"}, small=True))
    domain = place.domains[0]
    found = memory_by_k(place, domain, counts=(2, 4, 8))
    model = require_ours(place.network(domain), by="a test")
    roles = model.parameter_roles()
    weights = sum(p.nbytes for name, p in model.named_parameters() if roles[name].kind != "other")
    two, four, eight = found.peak
    assert found.baseline < two
    assert eight - four < 8 * weights  # four more sets of weights and their like, no more activations
    assert four - two < 8 * weights
