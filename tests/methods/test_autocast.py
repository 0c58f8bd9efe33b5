"""Every method under autocast, with the rules of a CPU and with those of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from tests.methods.networks import batches, make, run, vmamba
from trust_tta.methods.registry import list_methods

# What autocast does in float32 on a GPU and leaves as it comes on a CPU; without sums, which backward passes make.
WIDE = (
    "exp", "log", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "rsqrt", "reciprocal", "layer_norm", "logsumexp",
    "linalg_vector_norm", "norm.ScalarOpt_dim", "norm.Scalar", "cosine_similarity", "softmax.int", "log_softmax.int",
)  # fmt: skip


@contextmanager
def rules_of_a_gpu() -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL", "AutocastCPU")
    try:
        for name in WIDE:
            packet, _, overload = name.partition(".")
            library.impl(name, in_float32(getattr(getattr(torch.ops.aten, packet), overload or "default")))
        yield
    finally:
        library._destroy()


def in_float32(operator: Any) -> Callable[..., Any]:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def widen(value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return operator(*tree_map(widen, args), **tree_map(widen, kwargs))

    return call


@pytest.mark.parametrize("rules", ["cpu", "gpu"])
@pytest.mark.parametrize("name", list_methods())
def test_every_method_adapts_under_autocast(name: str, rules: str) -> None:
    method, stream = make(name, vmamba()), batches(4)
    with rules_of_a_gpu() if rules == "gpu" else nullcontext(), torch.autocast("cpu", torch.bfloat16):
        wide = torch.ones(2, dtype=torch.bfloat16).exp().dtype == torch.float32
        assert wide == (rules == "gpu")
        outputs = run(method, stream[:3])
        method.evaluate(stream[0])
    assert all(bool(output.isfinite().all()) for output in outputs)
    state = method.state_dict()  # and goes on without it
    method.reset()
    method.load_state_dict(state)
    assert bool(method(stream[3]).isfinite().all())
