"""The loop on a stream made by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.bench.tiny import OVERRIDES, run, tiny_config, write_checkpoint
from tests.results.samples import PROVENANCE
from trust_tta.bench.experiment import Experiment
from trust_tta.bench.runner import EvaluationOptions, run_domain
from trust_tta.bench.sweep import run_sequence
from trust_tta.data.dataset import array_dataset
from trust_tta.data.sample import load_sample
from trust_tta.data.streams import Domain, StreamConfig, stream_datasets
from trust_tta.errors import ShapeError
from trust_tta.methods.base import Method
from trust_tta.methods.registry import create_method
from trust_tta.models.typed import create_model
from trust_tta.models.vmamba import VMamba
from trust_tta.preprocessing import find_preset
from trust_tta.progress import Progress

CPU = EvaluationOptions(device=torch.device("cpu"))


@pytest.fixture
def model() -> VMamba:
    torch.manual_seed(0)
    model: VMamba = create_model("vmamba_nano", **OVERRIDES).eval()
    return model


def make_domain(count: int = 20, *, mask: list[int] | None = None) -> Domain:
    """Images whose labels are 2 and 5, in batches of 8."""
    images, _ = load_sample()
    labels = np.where(np.arange(count) % 3 == 0, 5, 2)
    dataset = array_dataset(images[:count], labels, [str(i) for i in range(10)], name="x", domain="y")
    masked = replace(dataset, class_mask=None if mask is None else np.array(mask))
    (domain,) = stream_datasets([masked], StreamConfig(batch_size=8), preprocessing=find_preset("cifar32"), workers=0)
    return domain


def masked_accuracy(method: Method, domain: Domain, classes: list[int]) -> float:
    right = 0
    for batch in domain.batches:
        chosen = torch.tensor(classes)[method(batch.images)[:, classes].argmax(1)]
        right += int((chosen == batch.labels).sum())
    return right / domain.batches.images


def test_the_class_mask_restricts_predictions_unless_disabled(model: VMamba) -> None:
    domain = make_domain(mask=[2, 5])
    method = create_method("source", model)
    masked = run_domain(method, domain, CPU)
    assert masked.accuracy == masked_accuracy(create_method("source", model), domain, [2, 5])
    assert sum(masked.reliability.count[:7]) == 0  # between two classes nobody is less than half sure
    whole = run_domain(method, domain, replace(CPU, class_mask=False))
    assert whole.accuracy == masked_accuracy(create_method("source", model), domain, list(range(10)))
    assert whole.entropy > masked.entropy


def test_kept_samples_are_spread_over_the_stream(model: VMamba) -> None:
    kept = run_domain(create_method("source", model), make_domain(), replace(CPU, keep_samples=4))
    assert sorted(sample.index for sample in kept.predictions) == [0, 5, 10, 15]
    few = run_domain(create_method("source", model), make_domain(3), replace(CPU, keep_samples=9))
    assert len(few.predictions) == 3


class Steps(Progress):
    """Remembers the steps of progress."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def advance(self, n: int = 1) -> None:
        self.taken.append(n)


def test_a_batch_is_a_step_of_progress_and_a_clean_one_is_none(model: VMamba) -> None:
    steps, clean = Steps(), make_domain(9)
    run_domain(create_method("source", model), make_domain(), replace(CPU, clean=clean), progress=steps)
    assert steps.taken == [1, 1, 1, 0, 0]


def test_the_network_is_restored_even_when_a_batch_fails(tmp_path: Path) -> None:
    method = {"name": "trust", "lr": 0.1, "k": 2, "mode": "split"}
    stream = {"setting": "continual"}
    experiment = Experiment(tiny_config(tmp_path, methods=[method], data={"limit": 33}, stream=stream))
    (sequence,) = experiment.plan.sequences
    model = experiment.network(experiment.domains_of(sequence)[0])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    cells = run_sequence(experiment, sequence, PROVENANCE)
    with pytest.raises(ShapeError, match="1 images cannot be split"):  # after two batches that changed the network
        next(cells)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_counts_are_of_the_domain_alone(model: VMamba) -> None:
    method = create_method("tent", model)
    results = [run_domain(method, domain, CPU) for domain in (make_domain(16), make_domain(24))]
    assert [(r.forwards, r.backwards) for r in results] == [(4, 2), (6, 3)]


def test_each_domain_may_have_a_network_of_its_own(tmp_path: Path) -> None:
    for seed, domain in enumerate(("fog", "contrast")):
        weights = torch.load(write_checkpoint(tmp_path), weights_only=True)["model"]
        torch.manual_seed(seed)
        weights["classifier.head.weight"] = torch.randn_like(weights["classifier.head.weight"])
        torch.save(weights, tmp_path / f"{domain}.pth")
    both, _ = run(
        tiny_config(
            tmp_path,
            model={"checkpoint": str(tmp_path / "{domain}.pth")},
            data={"domains": ["fog", "contrast"]},
            methods=["source"],
        )
    )
    for cell in both:
        (alone,), _ = run(
            tiny_config(
                tmp_path,
                model={"checkpoint": str(tmp_path / f"{cell.key.domain}.pth")},
                data={"domains": [cell.key.domain]},
                methods=["source"],
                store=str(tmp_path / f"{cell.key.domain}.sqlite"),
            )
        )
        assert alone.key == cell.key
        assert alone.result.entropy == cell.result.entropy


@pytest.mark.parametrize("name", ["tent", "augmentation"])
def test_the_standard_setting_is_episodic_from_outside(model: VMamba, name: str) -> None:
    """Each batch starts from the source, and draws random numbers of its own."""
    domain, outside = make_domain(24), create_method(name, model, lr=0.05)
    result = run_domain(outside, replace(make_domain(24), reset_each_batch=True), CPU)
    outside.reset()
    expected = run_domain(create_method(name, model, lr=0.05, episodic=True), domain, CPU)
    assert result.history.entropy == expected.history.entropy
    assert result.updates == expected.updates > 0
