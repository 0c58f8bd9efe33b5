"""Small segmentation data sets in the layouts of the known ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

HEIGHT, WIDTH = 24, 32
STORED = (0, 1, 7, 11, 255)  # one column of labels each, in every mask


def stored_mask(height: int = HEIGHT, width: int = WIDTH) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    columns = np.arange(width) * len(STORED) // width
    return np.broadcast_to(np.array(STORED, dtype=np.uint8)[columns], (height, width)).copy()


def write_pair(image: Path, mask: Path, *, seed: int = 0, palette: bool = False) -> None:
    image.parent.mkdir(parents=True, exist_ok=True)
    mask.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(image)
    labels = Image.fromarray(stored_mask())
    if palette:
        labels.putpalette(list(range(256)) * 3)
    labels.save(mask)


def make_tree(name: str, root: Path, *, images: int = 3) -> Path:
    """The folder of a data set `name` under `root`, with its evaluation split."""
    for i in range(images):
        if name in ("voc20", "voc21", "context59", "context60"):
            year, part = ("2012", "") if name.startswith("voc") else ("2010", "Context")
            base = root / "VOCdevkit" / f"VOC{year}"
            write_pair(base / f"JPEGImages/a{i}.jpg", base / f"SegmentationClass{part}/a{i}.png", seed=i, palette=True)
            lists = base / f"ImageSets/Segmentation{part}"
            lists.mkdir(parents=True, exist_ok=True)
            (lists / "val.txt").write_text("".join(f"a{k}\n" for k in range(images)))
        elif name == "ade20k":
            base = root / "ADEChallengeData2016"
            write_pair(base / f"images/validation/a{i}.jpg", base / f"annotations/validation/a{i}.png", seed=i)
        elif name == "cityscapes":
            base = root / "cityscapes"
            city = f"val/bonn/bonn_{i}"
            write_pair(
                base / f"leftImg8bit/{city}_leftImg8bit.png", base / f"gtFine/{city}_gtFine_labelIds.png", seed=i
            )
        elif name == "camvid":
            base = root / "CamVid"
            write_pair(base / f"test/a{i}.png", base / f"testannot/a{i}.png", seed=i)
        else:
            base = root / "own"
            write_pair(base / f"images/a{i}.jpg", base / f"masks/a{i}.png", seed=i)
            (base / "classes.txt").write_text("".join(f"class {k}\n" for k in range(12)))
    return root / "own" if name == "masks" else root
