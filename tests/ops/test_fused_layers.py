"""A network whose layers are kernels, against the same network in PyTorch's operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trust_tta.methods.statistics import use_batch_statistics
from trust_tta.models.config import VMambaConfig
from trust_tta.models.vmamba import VMamba
from trust_tta.ops import batch_norm as batch_norm_ops

CONFIG = VMambaConfig(depths=(2, 1), dims=(96, 192), num_classes=10, norm="batch", drop_path=0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("kinds", [{"norm"}, {"norm", "scan", "projection", "other"}], ids=["norms", "all"])
@pytest.mark.parametrize("low", [False, True], ids=["float32", "bf16"])
def test_logits_and_every_gradient(low: bool, kinds: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As near to float64 as PyTorch's operators are."""
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
    kernel = batch_norm_ops.batch_norm

    def counted(*given: Any, **named: Any) -> tuple[Tensor, Tensor]:
        called.append(1)
        return kernel(*given, **named)

    monkeypatch.setattr(batch_norm_ops, "batch_norm", counted)
    results = []
    for backend in ("auto", "reference"):
        model.set_scan_backend(backend)
        with (
            torch.autocast("cuda", torch.bfloat16, enabled=low),
            torch.backends.cudnn.flags(enabled=True, allow_tf32=False),
        ):
            results.append(outcome(model, trained, images, labels))
        if backend == "auto":
            used = len(called)
    assert used >= 6  # those before narrow MLPs may be in their kernels
    assert len(called) == used  # the reference takes none
    model.double()  # the parameters stay the same objects
    exact = outcome(model, trained, images.double(), labels)
    total = torch.stack([gradient.norm() for gradient in exact[1:]]).norm()
    for ours, plain, wanted in zip(*results, exact, strict=True):
        scale = wanted.norm() if wanted is exact[0] else torch.maximum(wanted.norm(), 1e-3 * total)
        error, own = ((found.double() - wanted).norm() / scale for found in (ours, plain))
        # A norm takes away what the bias of the norm before it adds: of such gradients rounding leaves little.
        assert error <= max(0.1 if low else 1e-4, 4 * float(own))


def outcome(model: VMamba, trained: list[nn.Parameter], images: Tensor, labels: Tensor) -> list[Tensor]:
    """The logits, and the gradients of the parameters that have one."""
    logits = model(images)
    gradients = torch.autograd.grad(F.cross_entropy(logits, labels), trained, allow_unused=True)
    return [logits.detach(), *(gradient for gradient in gradients if gradient is not None)]
