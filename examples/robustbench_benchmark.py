"""RobustBench's loaders and its `benchmark` over our networks and methods.

    pip install robustbench
    python examples/robustbench_benchmark.py --data data --images 1000

`data` holds CIFAR-10 and CIFAR-10-C as RobustBench keeps them (it fetches them where they are missing). Images come
there as floats from 0 to 1, so the preprocessing of the network is put before it.
"""

from __future__ import annotations

import argparse

import torch
from robustbench.data import load_cifar10c
from robustbench.eval import benchmark
from robustbench.model_zoo.enums import BenchmarkDataset, ThreatModel
from robustbench.utils import clean_accuracy
from torch import Tensor, nn

import trust_tta as tt

CORRUPTIONS = ["fog", "contrast"]


class FromUnitRange(nn.Module):
    """Images from 0 to 1 into a network or a method."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, *, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("mean", torch.tensor(mean).view(3, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(3, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model((images - self.mean) / self.std)
        return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="data")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--benchmark", action="store_true", help="run RobustBench's own function, too")
    arguments = parser.parse_args()
    for name in ("source", "tent", "tide"):
        network = tt.create_model("vmamba_nano", checkpoint="vmamba_nano_cifar10")
        method = tt.create_method(name, network)
        wrapped = FromUnitRange(method, mean=network.preprocessing.mean, std=network.preprocessing.std).eval()
        for corruption in CORRUPTIONS:
            method.reset()
            images, labels = load_cifar10c(arguments.images, 5, arguments.data, False, [corruption])
            print(f"{name:6} {corruption:8} {clean_accuracy(wrapped, images, labels, batch_size=100):.1%}")
        if arguments.benchmark:
            method.reset()
            clean, robust = benchmark(
                wrapped, n_examples=arguments.images, dataset=BenchmarkDataset.cifar_10,
                threat_model=ThreatModel.corruptions, data_dir=arguments.data, batch_size=100,
            )  # fmt: skip
            print(f"{name:6} clean {clean:.1%}, mean of the corruptions {robust:.1%}")


if __name__ == "__main__":
    main()
