"""Adapting inside Lightning's evaluation loop: `trainer.test` calls the method where it called the network.

pip install lightning
python examples/lightning_loop.py
"""

from __future__ import annotations

from typing import Any

import lightning
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trust_tta as tt
from trust_tta.data.sample import load_sample


class Evaluation(lightning.LightningModule):
    """A module as you have one; `self.model` may be a network or a method."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def test_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        images, labels = batch
        accuracy = (self.model(images).argmax(1) == labels).float().mean()
        self.log("accuracy", accuracy, on_step=False, on_epoch=True, batch_size=len(labels))


class ResetBeforeEachRun(lightning.Callback):
    """Every evaluation starts from the source."""

    def on_test_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if isinstance(pl_module.model, tt.Method):
            pl_module.model.reset()


def main() -> None:
    network = tt.create_model("vmamba_nano", checkpoint="vmamba_nano_cifar10")
    pixels, labels = load_sample()
    chosen = np.random.default_rng(0).permutation(len(labels))[:128]
    foggy = tt.corrupt(pixels[chosen], "fog", severity=5)
    data: Any = TensorDataset(network.preprocessing(foggy), torch.from_numpy(labels[chosen]))
    loader = DataLoader(data, batch_size=32)
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, callbacks=[ResetBeforeEachRun()],
    )  # fmt: skip
    for name, model in (("source", network), ("tide", tt.create_method("tide", network))):
        (found,) = trainer.test(Evaluation(model), loader, verbose=False)
        print(f"{name:6} {found['accuracy']:.1%}")


if __name__ == "__main__":
    main()
