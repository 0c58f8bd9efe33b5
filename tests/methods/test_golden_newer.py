"""The newer methods against the authors' own code, in float64: network, stream and settings come from the files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.golden import Arrays, golden_folder, load_golden
from trust_tta.methods import gather_fisher
from trust_tta.methods.base import Learner, Method
from trust_tta.methods.deyo import shuffle_patches, shuffle_pixels
from trust_tta.methods.losses import (
    ENTROPIES,
    class_confusion,
    come_entropy,
    confusion_loss,
    entropy,
    soft_likelihood_ratio,
    symmetric_cross_entropy,
)
from trust_tta.methods.registry import create_method

TOLERANCE = 1e-8


class Net(nn.Module):
    """Three convolutions with BatchNorms, and a linear classifier, as the README of the files has it."""

    def __init__(self, parameters: dict[str, Tensor]) -> None:
        super().__init__()
        for i in (1, 2, 3):
            out, given = parameters[f"conv{i}.weight"].shape[:2]
            self.add_module(f"conv{i}", nn.Conv2d(given, out, 3, stride=min(i, 2), padding=1, bias=False))
            self.add_module(f"bn{i}", nn.BatchNorm2d(out))
        outputs, features = parameters["fc.weight"].shape
        self.fc = nn.Linear(features, outputs)
        self.load_state_dict(parameters)

    def forward_features(self, images: Tensor) -> Tensor:
        for i in (1, 2, 3):
            images = self.get_submodule(f"bn{i}")(self.get_submodule(f"conv{i}")(images)).relu()
        return images.mean((2, 3))

    def forward_head(self, features: Tensor) -> Tensor:
        logits: Tensor = self.fc(features)
        return logits

    def forward(self, images: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(images))


@pytest.fixture(scope="module")
def common() -> Arrays:
    return load_golden("newer/common.npz")


def network(common: Arrays) -> Net:
    return Net(part(common, "param/")).double().eval()


def part(arrays: Arrays, prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): torch.from_numpy(v) for k, v in arrays.items() if k.startswith(prefix)}


def stream(common: Arrays) -> list[Tensor]:
    return list(torch.from_numpy(common["x"]).double())


def error(ours: Tensor | np.ndarray[Any, Any], theirs: np.ndarray[Any, Any] | Tensor) -> float:
    """The largest difference over the largest expected value."""
    a, b = np.asarray(ours, dtype=np.float64), np.asarray(theirs, dtype=np.float64)
    assert a.shape == b.shape
    assert np.array_equal(np.isnan(a), np.isnan(b))
    return float(np.nanmax(np.abs(a - b)) / np.nanmax(np.abs(b)))


def classes(common: Arrays) -> int:
    return int(common["param/fc.bias"].shape[0])


def descent(hyper: dict[str, Any]) -> dict[str, Any]:
    """The optimizer, and the prediction that the authors return."""
    rule = {"optimizer": hyper["optimizer"].lower(), "lr": hyper["lr"], "predict": "before"}
    if rule["optimizer"] == "adam":
        return {**rule, "momentum": hyper["beta"]}
    return {**rule, "momentum": hyper["momentum"], "nesterov": hyper.get("nesterov", False)}


def filtered(common: Arrays, hyper: dict[str, Any]) -> dict[str, Any]:
    return {"margin": hyper["e_margin"] / math.log(classes(common)), "d_margin": hyper["d_margin"]}


def flip(images: Tensor) -> Tensor:
    return images.flip(-1)


class Rpl(Learner):
    """Generalized cross-entropy to own labels: a method of two lines from outside."""

    q = 0.8

    def loss(self, logits: Tensor) -> Tensor:
        return generalized_cross_entropy(logits, self.q).mean()


def generalized_cross_entropy(logits: Tensor, q: float) -> Tensor:
    p = logits.softmax(1)
    return (1 - p.gather(1, p.argmax(1, keepdim=True))[:, 0] ** q) / q


class Shaken:
    """The permutations of a file in place of chance."""

    def __init__(self, method: Any, golden: Arrays) -> None:
        self.method, self.golden = method, golden

    def __call__(self, images: Tensor, places: Tensor) -> Tensor:
        order = torch.from_numpy(self.golden["perm"][self.method.counters.batches]).long()
        if self.method.options.destroy == "pixel":
            return shuffle_pixels(images, order)
        return shuffle_patches(images, order[places], self.method.options.patches)


def make_eata(common: Arrays, golden: Arrays, hyper: dict[str, Any]) -> Method:
    model = network(common)
    fisher = gather_fisher(model, list(torch.from_numpy(common["fisher_x"]).double()))
    for name, value in part(golden, "fisher/").items():
        assert error(fisher.values[name], value) < TOLERANCE
    kind = "come" if "K" in hyper else "softmax"
    options = {"fisher": fisher, "fisher_alpha": hyper["fisher_alpha"], "entropy": kind}
    return create_method("eata", model, **options, **filtered(common, hyper), **descent(hyper))


def make_rdumb(common: Arrays, golden: Arrays, hyper: dict[str, Any]) -> Method:
    options = {"reset_every": hyper["reset_every"], **filtered(common, hyper), **descent(hyper)}
    return create_method("rdumb", network(common), **options)


def make_roid(common: Arrays, golden: Arrays, hyper: dict[str, Any]) -> Method:
    shared = {key: hyper[key] for key in ("temperature", "momentum_probs", "batch_size")}
    name = "cmf" if "q" in hyper else "roid"
    own = ("alpha", "gamma", "q") if name == "cmf" else ("momentum_src",)
    method = create_method(name, network(common), **shared, **{key: hyper[key] for key in own}, **descent(hyper))
    method.augment = flip  # type: ignore[assignment]
    return method


def make_deyo(common: Arrays, golden: Arrays, hyper: dict[str, Any]) -> Method:
    nats = math.log(classes(common))
    kind = {"occ": "occlusion"}.get(hyper["aug"], hyper["aug"])
    own = {"patch": {"patches": hyper.get("patch_len")}, "pixel": {}}.get(
        kind, {"row": hyper.get("row"), "column": hyper.get("col"), "size": hyper.get("size")}
    )
    margins = {"margin": hyper["ent_margin"] / nats, "weight_margin": hyper["ent_weight_margin"] / nats}
    options = {"destroy": kind, "plpd": hyper["plpd"], "skip_last": False, **own, **margins, **descent(hyper)}
    method = create_method("deyo", network(common), **options)
    if "perm" in golden:
        method.destroyed = Shaken(method, golden)  # type: ignore[assignment]
    return method


def make_tent(common: Arrays, golden: Arrays, hyper: dict[str, Any]) -> Method:
    return create_method("tent", network(common), entropy="come", **descent(hyper))


def make_rpl(common: Arrays, golden: Arrays, hyper: dict[str, Any]) -> Method:
    method = create_method(Rpl, network(common), **descent(hyper))
    method.q = hyper["q"]
    return method


def make_cotta(common: Arrays, golden: Arrays, hyper: dict[str, Any]) -> Method:
    options = {"threshold": hyper["ap"], "decay": hyper["mt"], "restore": hyper["rst"]}
    options["symmetric"] = "symmetric" in hyper["file"]
    method = create_method("cotta", network(common), **options, **descent(hyper))
    method.augment = cycle_of_four  # type: ignore[assignment]
    masks = part(golden, "mask/")

    def forgotten(student: Tensor) -> Tensor:
        return torch.cat([masks[name][method.counters.batches].flatten() for name in method.adapted]).bool()

    method.forgotten = forgotten  # type: ignore[assignment]
    return method


def cycle_of_four(images: Tensor, number: int) -> Tensor:
    images = images.flip(-1) if number % 4 in (1, 3) else images
    return images.roll(2, -1) if number % 4 in (2, 3) else images


def make_rotta(common: Arrays, golden: Arrays, hyper: dict[str, Any]) -> Method:
    own = ("alpha", "nu", "memory_size", "update_frequency", "lambda_t", "lambda_u")
    method = create_method("rotta", network(common), **{key: hyper[key] for key in own}, **descent(hyper))
    method.augment = flip  # type: ignore[assignment]
    return method


def make_neo(common: Arrays, golden: Arrays, hyper: dict[str, Any]) -> Method:
    return create_method("neo", network(common), alpha=hyper.get("alpha"))


def make_bn(common: Arrays, golden: Arrays, hyper: dict[str, Any]) -> Method:
    if "alpha" in hyper:
        return create_method("bn_alpha", network(common), alpha=hyper["alpha"])
    return create_method("bn_ema", network(common), momentum=hyper["momentum"])


# By the beginning of a file's name.
MAKERS: dict[str, Callable[[Arrays, Arrays, dict[str, Any]], Any]] = {
    "eata": make_eata,
    "come_eata": make_eata,
    "come_tent": make_tent,
    "rdumb": make_rdumb,
    "roid": make_roid,
    "cmf": make_roid,
    "rpl": make_rpl,
    "bn_alpha": make_bn,
    "bn_ema": make_bn,
    "cotta": make_cotta,
    "neo": make_neo,
    "rotta": make_rotta,
    "deyo": make_deyo,
}
FOLDER = golden_folder("newer/common.npz")
FOUND = {path.stem for path in (FOLDER / "newer").glob("*.npz")} if FOLDER else set(MAKERS)
FILES = sorted(FOUND - {"common", "losses", "mcc"})  # other runs beside these are run as well
# What is compared after every batch: the name in the file, and where the method has it.
TRACES: dict[str, Callable[[Any], Any]] = {
    "mean_probs": lambda method: method.mean_prediction,
    "class_probs": lambda method: method.class_probs,
    "hidden_var": lambda method: method.variance,
    "mean": lambda method: method.mean_features,
}


def test_the_network_is_rebuilt(common: Arrays) -> None:
    for name, expected in (("source", "source_outputs"), ("bn", "batch_stat_outputs")):
        method = create_method(name, network(common))
        assert error(torch.stack([method(x) for x in stream(common)]), common[expected]) < TOLERANCE


@pytest.mark.parametrize("file", FILES)
def test_run(common: Arrays, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = load_golden(f"newer/{file}.npz")
    hyper = {"file": file, **json.loads(str(golden["hyper"]))}
    if "K" in hyper:  # the official constant, which is the number of classes here
        monkeypatch.setitem(ENTROPIES, "come", partial(come_entropy, uncertainty=hyper["K"]))
    (make,) = (make for name, make in MAKERS.items() if file.startswith(name))
    method = make(common, golden, hyper)
    for b, images in enumerate(stream(common)):
        assert error(method(images), golden["outputs"][b]) < TOLERANCE
        for name, value in part(golden, "trace/").items():
            assert error(learned(method)[name], value[b]) < TOLERANCE, (name, b)
        for name, look in TRACES.items():
            if name in golden:
                found = look(method)
                missing = np.full_like(golden[name][b], np.nan)
                assert error(missing if found is None else found, golden[name][b]) < TOLERANCE, (name, b)
        if memory := part(golden, f"memory/{b}/"):
            check_memory(method, memory, torch.cat(stream(common)))
    check_end(method, golden)


def check_end(method: Any, golden: Arrays) -> None:
    """The weights after the last batch, and what else a file holds of them."""
    for name, value in part(golden, "param/").items():
        assert error(learned(method)[name], value) < TOLERANCE, name
    for name, value in part(golden, "teacher/").items():
        assert error(method.adapted[name].detach(), value) < TOLERANCE, name
    statistics = method.statistics.state()
    if "teacher_stat/bn1.running_mean" in golden:
        check_statistics(statistics, part(golden, "teacher_stat/"))
        statistics = method.student_statistics
    check_statistics(statistics, part(golden, "stat/"))
    if hidden := part(golden, "hidden/"):
        ours = method.weights.unflatten(method.hidden)
        assert all(error(ours[name], value) < TOLERANCE for name, value in hidden.items())


def learned(method: Any) -> dict[str, Tensor]:
    """The weights that the optimizer moves: the student's, where the network holds a teacher's."""
    if hasattr(method, "student"):
        found: dict[str, Tensor] = method.weights.unflatten(method.student)
        return found
    return {name: value.detach() for name, value in method.adapted.items()}


def check_statistics(ours: dict[str, Any], theirs: dict[str, Tensor]) -> None:
    names = {"running_mean": "mean", "running_var": "variance"}
    for name, value in theirs.items():
        layer, _, kind = name.rpartition(".")
        if kind in names:  # the count of batches is the method's own
            assert error(ours[names[kind]][layer], value) < TOLERANCE, name


def check_memory(method: Any, theirs: dict[str, Tensor], images: Tensor) -> None:
    """Which images of the stream are remembered, in which order, and what is known of them."""
    assert method.labels.tolist() == theirs["class"].tolist()
    assert method.ages.tolist() == theirs["age"].tolist()
    assert error(method.entropies, theirs["entropy"]) < TOLERANCE
    assert torch.equal(method.images, images[theirs["index"].long()])


LOSSES: dict[str, Callable[..., Tensor]] = {
    "entropy": entropy,
    "slr": soft_likelihood_ratio,
    "sce": symmetric_cross_entropy,
}


def test_losses_and_their_gradients() -> None:
    golden = load_golden("newer/losses.npz")
    hyper = json.loads(str(golden["hyper"]))
    losses = LOSSES | {f"gce_{q}": partial(generalized_cross_entropy, q=q) for q in hyper["gce_q"]}
    losses |= {f"come_{mass}": partial(come_entropy, uncertainty=mass) for mass in hyper["come_mass"]}
    found = {key.split("/")[1] for key in golden if key.startswith("loss/")} - {"logits", "logits2", "weight"}
    assert found == losses.keys()
    for name, loss in losses.items():
        logits = [torch.from_numpy(golden[f"loss/{key}"]).requires_grad_() for key in ("logits", "logits2")]
        given = logits if name == "sce" else logits[:1]
        values = loss(*given)
        gradients = torch.autograd.grad((torch.from_numpy(golden["loss/weight"]) * values).sum(), given)
        assert error(values.detach(), golden[f"loss/{name}/value"]) < TOLERANCE, name
        for gradient, key in zip(gradients, ("grad", "grad2"), strict=False):
            assert error(gradient, golden[f"loss/{name}/{key}"]) < TOLERANCE, name


def test_losses_serve_dense_predictions() -> None:
    """The same value for each pixel as for as many images."""
    logits = torch.from_numpy(load_golden("newer/losses.npz")["loss/logits"]).double()
    dense = logits.view(2, 3, 4, 10).movedim(-1, 1)
    for loss in (entropy, come_entropy):
        torch.testing.assert_close(loss(dense), loss(logits).view(2, 3, 4))


def test_minimum_class_confusion() -> None:
    golden = load_golden("newer/mcc.npz")
    for i, case in enumerate(json.loads(str(golden["hyper"]))["cases"]):
        logits = torch.from_numpy(golden[f"case/{i}/logits"]).requires_grad_()
        loss = confusion_loss(class_confusion(logits, temperature=case["temperature"]))
        (gradient,) = torch.autograd.grad(loss, logits)
        np.testing.assert_allclose(loss.item(), golden[f"case/{i}/value"], rtol=TOLERANCE)
        np.testing.assert_allclose(gradient, golden[f"case/{i}/grad"], rtol=TOLERANCE, atol=1e-14)
