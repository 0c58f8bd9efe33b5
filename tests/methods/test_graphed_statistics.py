"""Per-batch statistics before the first forward: capturable in a CUDA graph, and the same when replayed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.methods.networks import batches, make, same, vmamba
from trust_tta.methods.statistics import Statistics
from trust_tta.ops import cuda_graphs

aten = torch.ops.aten
FORBIDDEN = (aten._local_scalar_dense.default, aten.lift_fresh.default, aten.scalar_tensor.default, aten.equal.default)


class HostValues(TorchDispatchMode):
    """Counts values that go from the host to the device or back."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in FORBIDDEN
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("parts", [False, True])
def test_statistics_need_no_host_synchronization(parts: bool) -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3))
    statistics = Statistics(model, "stream", mix_source=parts, cluster_domains=parts)
    with HostValues() as values:  # type: ignore[no-untyped-call]
        statistics._observe_images(torch.randn(4, 3, 9, 9), 4.0)
        assert values.count == 0
        statistics.start_batch(torch.randn(4, 3, 9, 9))
        assert values.count == parts  # whether domains are mixed is asked once


@pytest.mark.gpu
@pytest.mark.parametrize("low", [False, True])
def test_replay_equals_plain_call(low: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for captured in (True, False):
        if not captured:
            monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 0)
        method = make("tide", vmamba().cuda())
        with torch.autocast("cuda", torch.bfloat16, enabled=low):
            for i, images in enumerate(batches(8)):
                method((1 + 2 * (i > 4)) * images.cuda())
        assert len(method.statistics._observe.graphs) == captured
        found.append(
            [method.statistics.state()["domain"], *(norm.previous_images for norm in method.statistics.stream_norms)]
        )
    assert same(found[0], found[1])


@pytest.mark.gpu
def test_a_mixed_stream_is_observed_with_the_groups_of_its_own_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise of many strengths, while the domain is young: a graph would hold the groups of an earlier batch."""
    generator = torch.Generator().manual_seed(0)
    strengths = torch.logspace(-2, 1, 32)[:, None, None, None]
    chosen = [torch.randperm(32, generator=generator)[:n] for n in (32, 24, 32, 24, 32, 24)]
    stream = [strengths[index] * torch.randn(len(index), 3, 16, 16, generator=generator) for index in chosen]
    found = []
    for captured in (True, False):
        if not captured:
            monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 0)
        method = make("tide", vmamba().cuda())
        outputs = [method(images.cuda()) for images in stream]
        assert method.statistics.clusters is not None
        assert method.statistics.clusters.active
        found.append([*outputs, method.state_dict()["extra"]["evidence"]])
    assert same(found[0], found[1])


@pytest.mark.gpu
def test_moved_method_captures_again() -> None:
    method, other = make("tide", vmamba().cuda()), make("tide", vmamba().cuda())
    stream = [images.cuda() for images in batches(6)]
    for images in stream[:3]:
        method(images)
        other(images)
    method = method.cpu().cuda()
    assert not method.statistics._observe.graphs
    assert all(torch.allclose(method(images), other(images), atol=1e-4) for images in stream[3:])
