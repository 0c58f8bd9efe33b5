"""Pack CIFAR's arrays into small lossless parts that travel to a machine in several goes.

Example: python -m benchmarks.pack_images --data data/cifar10 --out data/packed --parts 4
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from benchmarks.packing import pack, unpack


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with {train,test}_{images,labels}.npy")
    parser.add_argument("--out", type=Path, required=True, help="folder for the parts")
    parser.add_argument("--parts", type=int, default=4, help="parts of the training images; the test images are one")
    options = parser.parse_args()
    for name, parts in (("train", options.parts), ("test", 1)):
        images = np.load(options.data / f"{name}_images.npy", mmap_mode="r")
        labels = np.load(options.data / f"{name}_labels.npy")
        for path in pack(images, labels, options.out, name=name, parts=parts):
            print(f"{path}  {path.stat().st_size / 2**20:.1f} MiB")
        found, found_labels = unpack(options.out, name)
        if not (np.array_equal(found, images) and np.array_equal(found_labels, labels)):
            raise SystemExit(f"{name}: what was unpacked is not what was packed")


if __name__ == "__main__":
    main()
