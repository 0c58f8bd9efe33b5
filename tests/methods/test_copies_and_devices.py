"""Methods that travel: through pickles, to other processes, between threads, through torch.compile."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.methods.networks import batches, convnet, make, run, same, vmamba, weights
from trust_tta.methods.base import Method
from trust_tta.methods.registry import list_methods

KINDS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in list_methods()} | {
    "tent-sgd": ("tent", {"optimizer": "sgd", "nesterov": True}),
    "tent-stream": ("tent", {"statistics": "stream"}),
    "eta-loose": ("eta", {"margin": 0.95, "d_margin": 2.0}),
    "trust-split": ("trust", {"mode": "split"}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["pickle", "copy"])
def test_a_method_that_was_packed_goes_on_as_the_original(kind: str, way: str) -> None:
    name, options = KINDS[kind]
    method: Method = make(name, vmamba(), **options)
    stream = batches(4)
    run(method, stream[:2])
    packed = pickle.loads(pickle.dumps(method)) if way == "pickle" else copy.deepcopy(method)
    before = method.state_dict()
    assert same(packed.state_dict(), before)
    outputs = run(packed, stream[2:])
    assert same(method.state_dict(), before)  # the copy's learning does not come back
    assert same(run(method, stream[2:]), outputs)
    assert same(packed.state_dict(), method.state_dict())
    assert same(weights(packed.detach()), weights(method.detach()))
    for name, parameter in packed.detach().named_parameters():  # the two networks share their memory again
        assert parameter.data_ptr() == packed.model.get_parameter(name).data_ptr()
    packed.reset()
    method.reset()
    assert same(packed.state_dict(), method.state_dict())


def adapt(method: Method, stream: list[Tensor]) -> tuple[Any, Any]:
    outputs = run(method, stream)
    return [o.numpy() for o in outputs], [p.detach().numpy().copy() for p in method.adapted.values()]


def test_another_process_adapts_alike_and_leaves_ours_alone() -> None:
    """PyTorch hands tensors to processes as shared memory; a method must not share its weights."""
    method, stream = make("tent", convnet(), statistics="stream"), batches(3)
    run(method, stream[:1])
    before = method.state_dict()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        outputs, adapted = pool.apply(adapt, (method, stream[1:]))
    assert same(method.state_dict(), before)
    assert same([torch.from_numpy(o) for o in outputs], run(method, stream[1:]))
    assert same([torch.from_numpy(w) for w in adapted], [p.detach() for p in method.adapted.values()])


@pytest.mark.parametrize("name", ["tent", "sar", "trust"])
def test_calls_from_several_threads_take_turns(name: str) -> None:
    method = make(name, vmamba())
    (images,) = batches(1)  # the same for all, so that the order of the threads does not matter
    expected = run(alone := make(name, vmamba()), [images] * 12)
    outputs: list[Tensor] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(3):
                outputs.append(method(images))
                method.evaluate(images)
                method.state_dict()
        except BaseException as error:  # what a thread raises would be lost
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert method.counters == alone.counters
    assert same(method.state_dict(), alone.state_dict())
    assert {tuple(o.flatten().tolist()) for o in outputs} == {tuple(o.flatten().tolist()) for o in expected}


SIDE_BY_SIDE = KINDS | {"tent-depth": ("tent", {"stochastic_depth": True}), "tide-alone": ("tide", {"lr": 1e-3})}


@pytest.mark.parametrize("kind", SIDE_BY_SIDE)
def test_forks_in_several_threads_adapt_as_each_would_alone(kind: str) -> None:
    """Bit for bit: they share the frozen weights and nothing else, not even random numbers."""
    name, options = SIDE_BY_SIDE[kind]
    method, streams = make(name, vmamba(drop_path=0.5), **options), [batches(4, seed=seed) for seed in (1, 2, 3)]
    expected = [run(method.fork(), stream) for stream in streams]
    start, forks = threading.Barrier(3), [method.fork() for _ in streams]

    def work(fork: Method, stream: list[Tensor]) -> list[Tensor]:
        start.wait(30)
        return run(fork, stream)

    with ThreadPoolExecutor(3) as pool:
        outputs = list(pool.map(work, forks, streams))
    assert same(outputs, expected)
    assert not same(outputs[0], outputs[1])


@pytest.mark.parametrize("name", ["source", "bn_alpha", "bn_ema"])
def test_predictions_of_a_fixed_method_run_side_by_side(name: str) -> None:
    method, both = make(name, convnet(), statistics="source"), threading.Barrier(2)

    def meet(*_: object) -> None:
        both.wait(30)

    method.model.register_forward_pre_hook(meet)
    assert method.stateless
    stream = batches(2)
    with ThreadPoolExecutor(2) as pool:  # in turns, each would wait for the other in vain
        outputs = list(pool.map(method.evaluate, stream))
    network = convnet().eval()
    assert same(outputs, [network(images).detach() for images in stream])


@pytest.mark.parametrize("kind", KINDS)
def test_no_other_method_is_stateless(kind: str) -> None:
    name, options = KINDS[kind]
    assert make(name, vmamba(), **options).stateless == (name == "source")
    assert not make("source", vmamba(), statistics="stream").stateless
    assert not make("source", vmamba(), statistics="batch").stateless


def test_a_compiled_network_is_taken_as_it_was() -> None:
    network = convnet()
    compiled: Any = torch.compile(network, backend="eager")
    method = make("tent", compiled)
    outputs = run(method, batches(2))
    assert same(outputs, run(make("tent", convnet()), batches(2)))
    assert method.detach() is compiled
    assert torch.equal(network.get_parameter("body.1.weight"), method.adapted["body.1.weight"])


def test_a_compiled_method_adapts_as_it_would_alone() -> None:
    compiled: Any = torch.compile(make("tent", convnet()), backend="eager")
    assert same([compiled(images) for images in batches(2)], run(make("tent", convnet()), batches(2)))


@pytest.mark.parametrize("name", list_methods())
def test_a_method_shows_its_options_in_one_line(name: str) -> None:
    method = make(name, vmamba())
    text = repr(method)
    assert "\n" not in text
    assert text.startswith(f"{type(method).__name__}(VMamba, statistics=")
    assert len(text) < 400
