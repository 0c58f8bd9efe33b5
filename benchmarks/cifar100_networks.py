"""VMamba nano for CIFAR-100, fine-tuned from the networks for CIFAR-10: two minutes each on one CPU core, 44 % clean.

    python -m benchmarks.cifar100_networks --data FOLDER --networks FOLDER

writes nano100.pt (BatchNorm) and ln100.pt (LayerNorm) beside vmamba_nano_ln_cifar10.safetensors in the folder of
networks; `recipes/cifar100.toml` trains better ones from scratch on a GPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trust_tta as tt
from trust_tta.models.vmamba import VMamba

PROBE_IMAGES, PROBE_EPOCHS = 10_240, 30
STEPS, BATCH, RATE = 220, 64, 8e-4


def fine_tune(network: VMamba, images: np.ndarray, labels: Tensor) -> None:
    """Replace the classifier of a VMamba by one for CIFAR-100, fit it to fixed features, then train all weights."""
    assert network.preprocessing is not None
    generator = np.random.default_rng(0)
    torch.manual_seed(0)
    probe = np.sort(generator.permutation(len(images))[:PROBE_IMAGES])
    with torch.no_grad():
        parts = [network.forward_features(network.preprocessing(images[part])) for part in np.split(probe, 40)]
    features, wanted = torch.cat(parts), labels[torch.from_numpy(probe)]
    head = nn.Linear(features.shape[1], 100)
    optimizer = torch.optim.AdamW(head.parameters(), lr=5e-3)
    for _ in range(PROBE_EPOCHS):
        for batch in torch.randperm(len(features)).split(512):
            _descend(optimizer, F.cross_entropy(head(features[batch]), wanted[batch], label_smoothing=0.05))
        optimizer.param_groups[0]["lr"] *= 0.88
    network.classifier.head = head
    network.train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, weight_decay=0.05)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = RATE * min(1, (step + 1) / 10) * (1 - step / STEPS)
        batch = np.sort(generator.integers(0, len(images), BATCH))
        x = network.preprocessing(images[batch]).roll(tuple(generator.integers(-3, 4, 2).tolist()), (2, 3))
        x = x.flip(-1) if generator.random() < 0.5 else x
        _descend(optimizer, F.cross_entropy(network(x), labels[torch.from_numpy(batch)], label_smoothing=0.05))
    network.eval()


def _descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="holds cifar100/*.npy")
    parser.add_argument("--networks", type=Path, required=True, metavar="FOLDER")
    arguments = parser.parse_args()
    images = np.load(arguments.data / "cifar100" / "train_images.npy")
    labels = torch.from_numpy(np.load(arguments.data / "cifar100" / "train_labels.npy")).long()
    sources = {
        "nano100.pt": "vmamba_nano_cifar10",
        "ln100.pt": str(arguments.networks / "vmamba_nano_ln_cifar10.safetensors"),
    }
    for name, source in sources.items():
        network = tt.create_model(checkpoint=source)
        assert isinstance(network, VMamba)
        fine_tune(network, images, labels)
        torch.save(network.state_dict(), arguments.networks / name)


if __name__ == "__main__":
    main()
