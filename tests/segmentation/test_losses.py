"""The training loss and one training step: golden numbers of MMSegmentation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.golden import load_golden
from tests.models.test_upernet import golden_network
from trust_tta.data.segmentation_metrics import count_confusion
from trust_tta.models.upernet import resize
from trust_tta.ops import segmentation_logits as bands
from trust_tta.training.segmentation import AUXILIARY_WEIGHT, segmentation_loss, two_head_loss

every_case = pytest.mark.parametrize("case", ["some", "all", "two"])


def leaf(array: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> Tensor:
    return torch.from_numpy(array).requires_grad_()


@pytest.mark.parametrize("band", [1, bands.MAX_CHUNK_ELEMENTS])
@every_case
def test_losses_and_gradients_are_the_original_ones(case: str, band: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bands, "MAX_CHUNK_ELEMENTS", band)
    golden = load_golden("segmentation/losses.npz")
    key, labels = f"avg_non_ignore_False/{case}", torch.from_numpy(golden[f"label_{case}"])
    full = leaf(golden["logits_full"])
    direct = segmentation_loss(full, labels)
    np.testing.assert_allclose(direct.item(), golden[f"{key}/direct_loss"], rtol=0, atol=1e-10)
    np.testing.assert_allclose(torch.autograd.grad(direct, full)[0], golden[f"{key}/direct_grad"], rtol=0, atol=1e-10)

    low, auxiliary = leaf(golden["logits_low"]), leaf(golden["logits_aux"])
    total = two_head_loss(low, auxiliary, labels)
    gradients = torch.autograd.grad(total, [low, auxiliary])
    np.testing.assert_allclose(total.item(), golden[f"{key}/total_loss"], rtol=0, atol=1e-10)
    np.testing.assert_allclose(gradients[0], golden[f"{key}/grad_low"], rtol=0, atol=1e-10)
    np.testing.assert_allclose(gradients[1], golden[f"{key}/grad_aux"], rtol=0, atol=1e-10)
    parts = [segmentation_loss(logits, labels).item() for logits in (low, auxiliary)]
    np.testing.assert_allclose(parts[0], golden[f"{key}/decode_loss"], rtol=0, atol=1e-10)
    np.testing.assert_allclose(AUXILIARY_WEIGHT * parts[1], golden[f"{key}/aux_loss_weighted"], rtol=0, atol=1e-10)


@pytest.mark.parametrize("case", ["some", "two"])
def test_the_accuracy_of_labeled_pixels_is_the_original_one(case: str) -> None:
    golden = load_golden("segmentation/losses.npz")
    labels = torch.from_numpy(golden[f"label_{case}"])
    for name, logits in (("decode", golden["logits_low"]), ("aux", golden["logits_aux"])):
        predictions = resize(torch.from_numpy(logits), labels.shape[1:]).argmax(1)
        found = 100 * count_confusion(predictions, labels, classes=5).accuracy
        assert found == pytest.approx(float(golden[f"avg_non_ignore_False/{case}/{name}_acc_seg"][0]), abs=1e-4)


def test_a_training_step_is_the_original_one() -> None:
    golden = load_golden("segmentation/train_step.npz")
    network = golden_network(dropout=0.0).train()
    labels = torch.from_numpy(golden["label"])
    main, auxiliary = network.forward_training(torch.from_numpy(golden["img"]).double())
    losses = {
        "decode.loss_ce": segmentation_loss(main, labels),
        "aux.loss_ce": AUXILIARY_WEIGHT * segmentation_loss(auxiliary, labels),
        "total": two_head_loss(main, auxiliary, labels),
    }
    for name, loss in losses.items():
        np.testing.assert_allclose(loss.item(), golden[f"out/{name}"], rtol=1e-10)
    losses["total"].backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None
        np.testing.assert_allclose(parameter.grad.norm(), golden[f"gradnorm/{name}"], rtol=1e-8, atol=1e-12)
        if f"grad/{name}" in golden:
            np.testing.assert_allclose(parameter.grad, golden[f"grad/{name}"], rtol=1e-5, atol=1e-8)
    for name, buffer in network.named_buffers():
        if f"buf_after/{name}" in golden:
            np.testing.assert_allclose(buffer, golden[f"buf_after/{name}"], rtol=1e-6, atol=1e-6)
    assert sum(name.startswith("buf_after/") for name in golden) >= 24
