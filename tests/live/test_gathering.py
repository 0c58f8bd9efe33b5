"""Shared batches: everyone gets his own rows, nobody waits too long, and only he who errs hears of it."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import Tensor

from trust_tta.live.gathering import Gatherer


def gatherer(size: int, sizes: list[int]) -> Gatherer[Tensor]:
    def run(images: Tensor) -> Tensor:
        sizes.append(len(images))
        if bool((images < 0).any()):
            raise ValueError("negative")
        return 2 * images

    return Gatherer(run, lambda result, start, stop: result[start:stop], size=size)


def call_at_once(gather: Gatherer[Tensor], batches: list[Tensor], wait: float) -> list[Tensor | Exception]:
    answers: list[Tensor | Exception] = [torch.zeros(0)] * len(batches)

    def call(i: int) -> None:
        try:
            answers[i] = gather(batches[i], wait)
        except ValueError as error:
            answers[i] = error

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return answers


def test_everyone_gets_his_own_rows() -> None:
    sizes: list[int] = []
    batches = [torch.full((1 + i % 3, 2), float(i)) for i in range(40)]
    answers = call_at_once(gatherer(8, sizes), batches, 0.02)
    for batch, answer in zip(batches, answers, strict=True):
        assert isinstance(answer, Tensor)
        assert torch.equal(answer, 2 * batch)
    assert sum(sizes) == sum(map(len, batches))
    assert max(sizes) <= 8


def test_a_full_batch_does_not_wait() -> None:
    sizes: list[int] = []
    start = time.monotonic()
    call_at_once(gatherer(3, sizes), [torch.ones(1, 2)] * 3, 300.0)
    assert sizes == [3]
    assert time.monotonic() - start < 60


def test_a_lonely_caller_waits_no_longer_than_he_allows() -> None:
    sizes: list[int] = []
    gather = gatherer(8, sizes)
    gather(torch.ones(1, 2), 0.0)
    gather(torch.ones(20, 2), 300.0)  # larger than a batch: there is nobody to wait for
    assert sizes == [1, 20]


def test_the_most_impatient_decides() -> None:
    sizes: list[int] = []
    gather = gatherer(8, sizes)
    patient = threading.Thread(target=gather, args=(torch.ones(1, 2), 300.0))
    patient.start()
    while not gather._waiting:
        time.sleep(0.001)
    gather(torch.ones(1, 2), 0.01)
    patient.join(60)
    assert sizes == [2]


def test_images_of_other_sizes_are_not_mixed() -> None:
    sizes: list[int] = []
    batches = [torch.ones(1, 2), torch.ones(1, 3), torch.ones(1, 2), torch.ones(1, 3)]
    answers = call_at_once(gatherer(2, sizes), batches, 5.0)
    assert [a.shape for a in answers if isinstance(a, Tensor)] == [b.shape for b in batches]


def test_only_he_whose_images_are_wrong_hears_of_it() -> None:
    batches = [torch.ones(1, 2), -torch.ones(1, 2), torch.ones(1, 2)]
    answers = call_at_once(gatherer(3, []), batches, 300.0)
    assert [isinstance(a, ValueError) for a in answers] == [False, True, False]


def test_an_error_of_one_caller_is_his_own() -> None:
    with pytest.raises(ValueError, match="negative"):
        gatherer(1, [])(-torch.ones(1, 2), 0.0)
