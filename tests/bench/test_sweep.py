"""Whole sweeps of a tiny network: the numbers, failures, resuming."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.bench.tiny import Recorder, numbers, run, tiny_config
from tests.results.test_store import execute
from trust_tta.bench.config import RunConfig
from trust_tta.bench.data import ExperimentData
from trust_tta.bench.experiment import make_plan
from trust_tta.bench.sweep import sweep
from trust_tta.data.corrupt_dataset import corrupt_array
from trust_tta.data.sample import load_sample
from trust_tta.data.streams import Domain
from trust_tta.errors import BackendError, CheckpointError, ConfigError, DataError, StateError, TrustError
from trust_tta.methods.base import Method
from trust_tta.methods.registry import create_method
from trust_tta.models.typed import create_model
from trust_tta.models.vmamba import VMamba
from trust_tta.preprocessing import Preprocessing
from trust_tta.results import Cell, CellResult, Counts, ResultStore, format_gain, format_percent


def by_place(cells: list[Cell]) -> dict[tuple[str, str], CellResult]:
    return {(cell.key.method, cell.key.domain): cell.result for cell in cells}


def opened(config: RunConfig) -> list[Domain]:
    """The stream of the experiment's first batch size and seed, opened anew."""
    source = ExperimentData(config.data)
    preprocessing = make_plan(config, source).preprocessing
    stream = config.stream
    found = source.stream(stream, batch_size=stream.batch_size[0], seed=stream.seeds[0], workers=0)
    return [prepared(domain, preprocessing[domain.dataset.domain]) for domain in found]


def prepared(domain: Domain, preprocessing: Preprocessing) -> Domain:
    return replace(domain, batches=replace(domain.batches, preprocessing=preprocessing))


def fresh(config: RunConfig, method: str) -> Method:
    model = create_model(
        str(config.model.name), num_classes=10, checkpoint=config.model.checkpoint, **config.model.overrides
    )
    return create_method(method, model)


def accuracy(method: Method, domain: Domain, *, each: bool = False) -> float:
    """The plain loop that a reader would write."""
    right = 0
    for batch in domain.batches:
        if each:
            method.reset()
        right += int((method(batch.images).argmax(1) == batch.labels).sum())
    return right / domain.batches.images


class Stop(Recorder):
    """Ends a sweep from within after so many cells, as an interrupt would."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after

    def note(self, text: str) -> None:
        super().note(text)
        if len(self.done) == self.after:
            raise KeyboardInterrupt


def test_online_equals_a_new_method_on_each_domain(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, methods=["source", "tent"], stream={"seeds": [4]})
    cells, recorder = run(config)
    found = by_place(cells)
    for domain in opened(config):
        for name in ("source", "tent"):
            assert found[name, domain.name].accuracy == accuracy(fresh(config, name), domain)
    tent = found["tent", "contrast"]
    assert (tent.samples, len(tent.history.samples)) == (50, 4)
    assert (tent.forwards, tent.backwards, tent.updates, tent.skipped_updates) == (8, 4, 4, 0)
    assert tent.accuracy_before is not None
    assert tent.peak_memory is None
    assert recorder.passes == recorder.total == 2 * 4 * (1 + 4)  # of source, and of Tent: two forward, one backward


def test_continual_equals_one_method_on_all_domains(tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path, methods=[{"name": "tent", "lr": 0.05}], stream={"setting": "continual"}, data={"limit": 64}
    )
    found = by_place(run(config)[0])
    model = create_model("vmamba_nano", num_classes=10, checkpoint=config.model.checkpoint, **config.model.overrides)
    method = create_method("tent", model, lr=0.05)
    for domain in opened(config):
        assert found["tent", domain.name].accuracy == accuracy(method, domain)
    alone = tiny_config(
        tmp_path, methods=[{"name": "tent", "lr": 0.05}], data={"limit": 64}, store=str(tmp_path / "alone.sqlite")
    )
    second = by_place(run(alone)[0])["tent", "contrast"]
    assert second.entropy != found["tent", "contrast"].entropy


def test_standard_equals_a_new_method_on_each_batch(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, methods=["tent"], stream={"setting": "standard"})
    found = by_place(run(config)[0])
    for domain in opened(config):
        result = found["tent", domain.name]
        assert result.accuracy == accuracy(fresh(config, "tent"), domain, each=True)
        assert (result.forwards, result.updates) == (8, 4)


def test_every_method_runs(tmp_path: Path) -> None:
    from trust_tta.methods.registry import list_methods

    config = tiny_config(
        tmp_path, methods=list_methods(), data={"domains": ["fog"], "limit": 24}, stream={"batch_size": 12}
    )
    cells, recorder = run(config)
    assert not recorder.failures
    assert {cell.key.method for cell in cells} == set(list_methods())
    lame = by_place(cells)["lame", "fog"]
    assert 0 <= lame.ece <= 1


def test_each_cell_restores_the_network(tmp_path: Path) -> None:
    methods = [{"name": "tent", "lr": 0.1}, "source"]
    config = tiny_config(tmp_path, methods=methods, data={"domains": ["fog"]})
    after_tent = by_place(run(config)[0])["source", "fog"]
    (domain,) = opened(config)
    assert after_tent.accuracy == accuracy(fresh(config, "source"), domain)


def test_clean_accuracy_samples_and_confusion(tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path,
        methods=["source"],
        data={"domains": ["fog"], "limit": 40},
        clean_after=True,
        keep_samples=5,
        confusion=True,
    )
    (cell,) = run(config)[0]
    source = ExperimentData(config.data)
    clean = source.clean_stream(batch_size=16, limit=40, workers=0)
    (preprocessing,) = set(make_plan(config, source).preprocessing.values())
    assert cell.result.clean_accuracy == accuracy(fresh(config, "source"), prepared(clean, preprocessing))
    assert len(cell.result.predictions) == 5
    assert cell.result.confusion is not None
    assert sum(map(sum, cell.result.confusion)) == 40
    labels = ExperimentData(config.data).clean().labels
    assert all(kept.label == labels[kept.index] for kept in cell.result.predictions)


def test_bf16_runs_and_is_recorded(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, methods=["tent"], data={"domains": ["fog"]}, dtype="bf16")
    (cell,) = run(config)[0]
    assert cell.provenance.dtype == "bf16"
    assert cell.result.broken == 0


def test_facts_tell_the_circumstances(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, methods=["source"], data={"domains": ["fog"]})
    (cell,) = run(config)[0]
    assert cell.provenance.torch == str(torch.__version__)
    assert cell.provenance.device == "cpu"
    assert cell.provenance.config == config.to_json()
    assert cell.provenance.started < cell.provenance.finished


SPLIT = {"name": "trust", "mode": "split", "k": 2}


def test_a_failing_cell_is_recorded_and_the_others_run(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, methods=[SPLIT, "source"], data={"limit": 33})  # the last batch has one image
    cells, recorder = run(config)
    assert {cell.key.method for cell in cells} == {"source"}
    assert [line.split()[0] for line in recorder.failures] == ["trust", "trust"]
    with ResultStore(config.store) as store:
        assert all("1 images cannot be split" in failure.message for failure in store.failures())
    again, recorder = run(config)
    assert numbers(again) == numbers(cells)
    assert not recorder.failures
    with ResultStore(config.store) as store:
        sweep(config, store, progress=(recorder := Recorder()), retry=True)
        assert store.counts() == Counts(done=2, failed=2)
    assert len(recorder.failures) == 2


def test_a_process_that_lost_its_device_fails_one_cell_and_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tmp_path, methods=["bn", "source"])

    def broken(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    with monkeypatch.context() as patched:
        patched.setattr(torch.accelerator, "synchronize", broken)
        patched.setattr(Method, "forward", broken)
        with pytest.raises(BackendError, match="lost its GPU .* run the command again"):
            run(config)
    with ResultStore(config.store) as store:
        assert len(store.failures()) == 1
        sweep(config, store, retry=True)
        assert not store.failures()


class NoRoom(Recorder):
    """After the first batch the store takes what is named no more, as on a disk that is full."""

    def __init__(self, store: Path, event: str) -> None:
        super().__init__()
        self.store, self.event = store, event

    def advance(self, n: int = 1) -> None:
        if not self.passes:
            execute(self.store, f"CREATE TRIGGER full BEFORE {self.event} BEGIN SELECT RAISE(ABORT, 'no room'); END")
        super().advance(n)


@pytest.mark.parametrize("event", ["INSERT ON pictures", "UPDATE OF expires ON cells WHEN NEW.expires IS NOT NULL"])
def test_a_store_that_fails_ends_the_run_and_no_cell_fails(tmp_path: Path, event: str) -> None:
    config = tiny_config(tmp_path, methods=["source", "bn"], keep_samples=3, data={"limit": 32})
    recorder = NoRoom(Path(config.store), event)
    with ResultStore(config.store, lease=0) as store, pytest.raises(TrustError, match="no room"):
        sweep(config, store, progress=recorder)
    assert (recorder.done, recorder.failures) == ([], [])
    execute(Path(config.store), "DROP TRIGGER full")
    cells, again = run(config)
    assert (len(cells), len(again.done), again.failures) == (4, 4, [])


def test_a_failure_ends_its_chain(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, methods=[SPLIT], data={"limit": 33}, stream={"setting": "continual"})
    cells, recorder = run(config)
    assert cells == []
    assert [line.split("  seed")[0].split()[-1] for line in recorder.failures] == ["gaussian_noise", "contrast"]


def test_finished_cells_are_not_run_again(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    cells, _ = run(config)
    again, recorder = run(config)
    assert again == cells
    assert recorder.done == []
    assert recorder.passes == 0


@pytest.mark.parametrize("change", [{"clean_after": True}, {"keep_samples": 4}, {"confusion": True}], ids=str)
def test_a_measure_that_finished_cells_lack_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    few: dict[str, Any] = {"methods": ["source"], "data": {"domains": ["fog"], "limit": 20}, "keep_samples": 3}
    before, _ = run(tiny_config(tmp_path, **few))
    more = tiny_config(tmp_path, **few | {"methods": ["source", "bn"]} | change)
    with pytest.raises(ConfigError, match=f"finished without this {next(iter(change))}: 1; .*: give another store"):
        run(more)
    assert run(tiny_config(tmp_path, **few | {"keep_samples": 2}))[0] == before
    elsewhere = more.changed(store=str(tmp_path / "other.sqlite"))
    cells, _ = run(elsewhere)
    assert len(cells) == 2
    assert run(elsewhere)[0] == cells


@pytest.mark.parametrize("setting", ["online", "continual"])
@pytest.mark.parametrize("after", [1, 3])
def test_an_interrupted_sweep_goes_on(tmp_path: Path, setting: str, after: int) -> None:
    changes: dict[str, Any] = {"methods": ["bn", {"name": "tent", "lr": 0.05}], "stream": {"setting": setting}}
    undisturbed, _ = run(tiny_config(tmp_path, store=str(tmp_path / "whole.sqlite"), **changes))
    config = tiny_config(tmp_path, **changes)
    with pytest.raises(KeyboardInterrupt), ResultStore(config.store) as store:
        sweep(config, store, progress=Stop(after))
    resumed, recorder = run(config)
    assert numbers(resumed) == numbers(undisturbed)
    assert len(recorder.done) == 4 - after


@contextmanager
def before_each_pass(note: Callable[[int], None]) -> Iterator[None]:
    """Call `note` with the number of images before every pass of any network."""

    def hook(module: nn.Module, inputs: Any) -> None:
        if isinstance(module, VMamba):
            note(len(inputs[0]))

    handle = nn.modules.module.register_module_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def test_warm_up_needs_no_more_memory_than_a_cell(tmp_path: Path) -> None:
    passes: list[tuple[int, bool]] = []
    config = tiny_config(tmp_path, methods=["source"], data={"domains": ["fog"], "limit": 32}, dtype="bf16")
    with before_each_pass(lambda images: passes.append((images, torch.is_autocast_enabled("cpu")))):
        run(config)
    assert passes == [(2, True), (16, True), (16, True)]


@pytest.mark.parametrize(("broken", "failures"), [(1, 0), (99, 2)], ids=["once", "always"])
def test_a_failing_warm_up_does_not_stop_the_run(tmp_path: Path, broken: int, failures: int) -> None:
    left = iter(range(broken))

    def fail(images: int) -> None:
        if next(left, None) is not None:
            raise RuntimeError("out of memory")

    with before_each_pass(fail):
        cells, recorder = run(config := tiny_config(tmp_path, methods=["source"]))
    assert len(recorder.failures) == failures
    with ResultStore(config.store) as store:
        assert [failure.message for failure in store.failures()] == ["RuntimeError: out of memory"] * failures
    assert len(cells) == 2 - failures


def test_a_user_s_mistake_is_raised_and_records_nothing(tmp_path: Path) -> None:
    wrong = tiny_config(tmp_path, model={"num_classes": 7})
    with ResultStore(wrong.store) as store:
        with pytest.raises(ConfigError, match="outputs 7 classes"):
            sweep(wrong, store, progress=Recorder())
        misfit = tiny_config(tmp_path, model={"overrides": {"dims": [8, 24]}})
        with pytest.raises(CheckpointError, match="does not fit the network"):
            sweep(misfit, store, progress=Recorder())
        images, labels = tmp_path / "x.npy", tmp_path / "y.npy"
        arrays = {"dataset": "array", "images": str(images), "labels": str(labels)}
        with pytest.raises(DataError, match="x.npy is missing"):
            sweep(tiny_config(tmp_path, data=arrays), store, progress=Recorder())
        assert store.keys() == []


def test_missing_clean_images_are_reported_before_the_first_cell(tmp_path: Path) -> None:
    corrupt_array(load_sample()[0][:40], tmp_path / "CIFAR-10-C", labels=load_sample()[1][:40], corruptions=["fog"])
    data = {"dataset": "cifar10-c", "root": str(tmp_path), "domains": ["fog"]}
    config = tiny_config(tmp_path, data=data, methods=["source"], clean_after=True)
    with ResultStore(config.store) as store:
        with pytest.raises(DataError, match="cifar10 is not in"):
            sweep(config, store, progress=Recorder())
        assert store.keys() == []
    (cell,) = run(tiny_config(tmp_path, data=data, methods=["source"]))[0]
    assert (cell.key.dataset, cell.key.severity, cell.result.samples) == ("cifar10-c", 5, 40)


@pytest.mark.parametrize(("setting", "cells"), [("mixed", 1), ("correlated", 2), ("gradual", 18)])
def test_other_streams_run_to_their_end(tmp_path: Path, setting: str, cells: int) -> None:
    config = tiny_config(tmp_path, methods=["bn"], stream={"setting": setting}, data={"limit": 16})
    found, recorder = run(config)
    assert len(found) == cells
    assert not recorder.failures
    assert {cell.key.setting for cell in found} == {setting}
    assert sum(cell.result.samples for cell in found) == (32 if setting == "mixed" else 16 * cells)


class Remover(Recorder):
    """Removes the store after the first finished cell, as a user may who clears up."""

    def __init__(self, store: Path) -> None:
        super().__init__()
        self.store = store

    def note(self, text: str) -> None:
        super().note(text)
        for file in self.store.parent.glob(f"{self.store.name}*") if self.done else ():
            file.unlink()


def test_removing_the_store_during_a_run_raises_and_saves_the_results(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, methods=["source", "bn"], data={"limit": 32})
    undisturbed, _ = run(config.changed(store=str(tmp_path / "whole.sqlite")))
    store = ResultStore(config.store)
    with pytest.raises(StateError, match=r"was removed during the run; all results so far are in '.*results\.saved"):
        sweep(config, store, progress=Remover(Path(config.store)))
    store.close()
    saved = tmp_path / "results.saved.sqlite"
    saved.rename(config.store)
    resumed, recorder = run(config)
    assert numbers(resumed) == numbers(undisturbed)
    assert 0 < len(recorder.done) < 4  # what was saved is not run again


def test_progress_counts_estimated_passes(tmp_path: Path) -> None:
    methods: list[Any] = ["source", {"name": "trust", "k": 4}]
    plan = make_plan(tiny_config(tmp_path, methods=methods, data={"domains": ["fog"], "limit": 16}))
    assert [sequence.cost for sequence in plan.sequences] == [1, 1 + 3 * 4]


def test_the_line_of_a_cell_names_label_domain_gain_and_time(tmp_path: Path) -> None:
    methods: list[Any] = ["source", {"name": "tent", "lr": 0.01, "label": "fast"}]
    cells, recorder = run(tiny_config(tmp_path, methods=methods, data={"domains": ["fog"], "limit": 16}))
    source, fast = (next(c for c in cells if c.label == label) for label in ("source", "fast"))
    gain = format_gain(fast.result.accuracy - source.result.accuracy)
    assert recorder.done[0].startswith(
        f"source  fog                 seed 0  {format_percent(source.result.accuracy):>5} %"
    )
    assert (
        f"fast    fog                 seed 0  {format_percent(fast.result.accuracy):>5} %  {gain:>6}"
        in recorder.done[1]
    )
