"""Adapting inside an evaluation loop of your own: the method takes the place of the network, and nothing else changes.

python examples/plain_loop.py
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trust_tta as tt
from trust_tta.data.sample import load_sample


def evaluate(model: nn.Module, loader: DataLoader[tuple[torch.Tensor, ...]]) -> float:
    """A loop as everybody has one."""
    correct = total = 0
    model.eval()
    with torch.no_grad():
        for images, labels in loader:
            correct += int((model(images).argmax(1) == labels).sum())
            total += len(labels)
    return correct / total


def main() -> None:
    network = tt.create_model("vmamba_nano", checkpoint="vmamba_nano_cifar10")
    pixels, labels = load_sample()
    chosen = np.random.default_rng(0).permutation(len(labels))[:128]
    foggy = tt.corrupt(pixels[chosen], "fog", severity=5)
    data = TensorDataset(network.preprocessing(foggy), torch.from_numpy(labels[chosen]))
    loader = DataLoader(data, batch_size=32)
    print(f"source {evaluate(network, loader):.1%}")
    method = tt.create_method("tide", network)
    print(f"tide   {evaluate(method, loader):.1%}")
    method.reset()  # the network is as it was


if __name__ == "__main__":
    main()
