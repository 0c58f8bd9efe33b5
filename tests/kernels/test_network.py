"""A network whose layers are kernels, against the same network in PyTorch's operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trust_tta.kernels import norm
from trust_tta.methods.statistics import use_batch_statistics
from trust_tta.models.config import VMambaConfig
from trust_tta.models.vmamba import VMamba

CONFIG = VMambaConfig(depths=(2, 1), dims=(96, 192), num_classes=10, norm="batch", drop_path=0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("kinds", [{"norm"}, {"norm", "scan", "projection", "other"}], ids=["norms", "all"])
@pytest.mark.parametrize("low", [False, True], ids=["float32", "bf16"])
def test_logits_and_every_gradient(low: bool, kinds: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = VMamba(CONFIG).cuda().eval()
    use_batch_statistics(model)
    roles = model.parameter_roles()
    trained = [parameter for name, parameter in model.named_parameters() if roles[name].kind in kinds]
    for parameter in model.parameters():
        parameter.requires_grad_(any(parameter is one for one in trained))
    images = torch.randn(16, 3, 224, 224, device="cuda")
    labels = torch.arange(16, device="cuda") % 10
    called: list[int] = []
    kernel = norm.batch_norm

    def counted(*given: Any) -> tuple[Tensor, Tensor]:
        called.append(1)
        return kernel(*given)

    monkeypatch.setattr(norm, "batch_norm", counted)
    results = []
    for backend in ("auto", "reference"):
        model.set_scan_backend(backend)
        with (
            torch.autocast("cuda", torch.bfloat16, enabled=low),
            torch.backends.cudnn.flags(enabled=True, allow_tf32=False),
        ):
            logits = model(images)
            gradients = torch.autograd.grad(F.cross_entropy(logits, labels), trained, allow_unused=True)
        results.append([logits, *(g for g in gradients if g is not None)])
        if backend == "auto":
            used = len(called)
    assert used >= 6  # those before narrow MLPs may be in their kernels
    assert len(called) == used  # the reference takes none
    total = torch.stack([plain.double().norm() for plain in results[1][1:]]).norm()
    for ours, plain in zip(*results, strict=True):
        scale = plain.double().norm() if plain is results[1][0] else torch.maximum(plain.double().norm(), 1e-3 * total)
        assert (ours.double() - plain.double()).norm() <= (0.1 if low else 1e-4) * scale
