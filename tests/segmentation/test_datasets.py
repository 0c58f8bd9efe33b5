"""Data sets with a label for every pixel: layouts, classes, label rules, protocols, checks, streams."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.golden import shared_folder
from tests.segmentation.trees import HEIGHT, STORED, WIDTH, make_tree, stored_mask
from trust_tta.data.check import check_root
from trust_tta.data.loading import available_domains, open_dataset
from trust_tta.data.registry import DATASETS, find_spec
from trust_tta.data.segmentation import SegmentationDataset, distinct_colors
from trust_tta.data.streams import StreamConfig, stream_datasets
from trust_tta.errors import ConfigError, DataError
from trust_tta.preprocessing import Preprocessing

CLASSES = {
    "voc21": 21, "voc20": 20, "context59": 59, "context60": 60, "ade20k": 150, "cityscapes": 19, "camvid": 11,
    "masks": 12,
}  # fmt: skip
# What the stored labels 0, 1, 7, 11 and 255 become.
READ = {
    "voc21": (0, 1, 7, 11, 255),
    "voc20": (255, 0, 6, 10, 255),
    "context59": (255, 0, 6, 10, 255),
    "context60": (0, 1, 7, 11, 255),
    "ade20k": (255, 0, 6, 10, 255),
    "cityscapes": (255, 255, 0, 2, 255),
    "camvid": (0, 1, 7, 255, 255),
    "masks": (0, 1, 7, 11, 255),
}
every_set = pytest.mark.parametrize("name", CLASSES)


def open_segmentation(name: str, root: Path, **options: object) -> SegmentationDataset:
    dataset = open_dataset(name, root, options=options)
    assert isinstance(dataset, SegmentationDataset)
    return dataset


@every_set
def test_labels_are_read_by_the_rules_of_each_set(name: str, tmp_path: Path) -> None:
    dataset = open_segmentation(name, make_tree(name, tmp_path), protocol="native")
    assert len(dataset) == 3
    assert len(dataset.class_names) == len(dataset.palette) == CLASSES[name]
    assert len({tuple(color) for color in dataset.palette.tolist()}) >= CLASSES[name] - 3  # ADE's table repeats some
    expected = dict(zip(STORED, READ[name], strict=True))
    np.testing.assert_array_equal(dataset.mask(0), np.vectorize(expected.get)(stored_mask()))


@every_set
def test_protocols_decide_on_the_sizes(name: str, tmp_path: Path) -> None:
    root = make_tree(name, tmp_path)
    native = open_segmentation(name, root, protocol="native", scale=(64, 48))
    assert native.image(0).shape == (48, 64, 3)
    assert native.mask(0).shape == (HEIGHT, WIDTH)
    squash = open_segmentation(name, root, protocol="squash")
    size = (560, 1120) if name == "cityscapes" else (224, 224)
    assert squash.image(0).shape == (*size, 3)
    assert squash.mask(0).shape == size
    assert squash.fingerprint != native.fingerprint


@every_set
def test_each_set_is_checked(name: str, tmp_path: Path) -> None:
    root = make_tree(name, tmp_path)
    findings = [f for f in check_root(root, thorough=True) if f.dataset == name]
    assert [f.status for f in findings if f.status == "error"] == []
    assert any(f"3 images in {CLASSES[name]} classes" in f.message for f in findings)
    assert available_domains(name, root) == (("all",) if name == "masks" else (find_spec(name).domains[0].name,))


def test_broken_files_are_found(tmp_path: Path) -> None:
    root = make_tree("camvid", tmp_path, images=5) / "CamVid"
    (root / "testannot/a0.png").unlink()
    (root / "testannot/a1.png").write_bytes(b"nothing")
    (root / "test/a2.png").write_bytes((root / "testannot/a3.png").read_bytes()[:40])
    from PIL import Image

    Image.fromarray(stored_mask(10, 10)).save(root / "testannot/a3.png")
    Image.fromarray(np.full((HEIGHT, WIDTH), 77, dtype=np.uint8)).save(root / "testannot/a4.png")
    messages = {f.path.name: f.message for f in check_root(root, thorough=True) if f.status == "error"}
    assert "No such file" in messages["a0.png"]
    assert "cannot be read" in messages["a1.png"]
    assert "cannot be read" in messages["a2.png"]
    assert messages["a3.png"] == f"has 10x10 labels for {HEIGHT}x{WIDTH} pixels"
    assert "has the label 77; camvid has the labels 0..10 and 255" in messages["a4.png"]
    assert all("\n" not in message for message in messages.values())


def test_a_folder_of_ones_own_may_have_splits_and_must_name_its_classes(tmp_path: Path) -> None:
    own = make_tree("masks", tmp_path)
    for part in ("images", "masks"):
        files = list((own / part).iterdir())
        (own / part / "fog").mkdir()
        (own / part / "rain").mkdir()
        for i, file in enumerate(sorted(files)):
            file.rename(own / part / ("fog" if i else "rain") / file.name)
    assert available_domains("masks", own) == ("fog", "rain")
    assert len(open_dataset("masks", own, domain="fog")) == 2
    with pytest.raises(ConfigError, match="masks has no domain 'fogg'; did you mean 'fog'"):
        open_dataset("masks", own, domain="fogg")
    (own / "classes.txt").unlink()
    with pytest.raises(DataError, match=r"has no classes\.txt; write the names of its classes there"):
        open_dataset("masks", own, domain="fog")


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    root = make_tree("camvid", tmp_path)
    with pytest.raises(ConfigError, match="protocol is 'nativ'; did you mean 'native'"):
        open_segmentation("camvid", root, protocol="nativ")
    with pytest.raises(ConfigError, match="protokol: there is no such option; did you mean 'protocol'"):
        open_segmentation("camvid", root, protokol="native")
    with pytest.raises(ConfigError, match="scale is 5; give a list"):
        open_segmentation("camvid", root, scale=5)


def test_batches_hold_pictures_and_labels(tmp_path: Path) -> None:
    dataset = open_segmentation("camvid", make_tree("camvid", tmp_path), scale=(40, 40), protocol="squash")
    (domain,) = stream_datasets([dataset], StreamConfig(batch_size=2), preprocessing=Preprocessing(), workers=2)
    batches = list(domain.batches)
    assert [tuple(b.images.shape) for b in batches] == [(2, 3, 40, 40), (1, 3, 40, 40)]
    assert [tuple(b.labels.shape) for b in batches] == [(2, 40, 40), (1, 40, 40)]
    first = batches[0]
    index = int(first.indices[0])
    pixels = torch.from_numpy(dataset.image(index))[None]
    torch.testing.assert_close(first.images[:1], Preprocessing().normalize(pixels))
    np.testing.assert_array_equal(first.labels[0], dataset.mask(index))


def test_colors_of_classes_differ() -> None:
    colors = distinct_colors(255)
    assert len(np.unique(colors, axis=0)) == 255
    assert colors[:3].tolist() == [[128, 0, 0], [0, 128, 0], [128, 128, 0]]


def test_class_names_are_whole() -> None:
    specs = {spec.name: spec for spec in DATASETS if spec.layout == "segmentation"}
    assert set(specs) == set(CLASSES)
    assert specs["voc20"].class_names == specs["voc21"].class_names[1:]
    assert specs["context59"].class_names == specs["context60"].class_names[1:]
    assert specs["ade20k"].class_names[0] == "wall"
    assert specs["ade20k"].class_names[149] == "flag"
    assert all(len(set(spec.class_names)) == len(spec.class_names) for spec in specs.values())


def test_real_camvid_is_read() -> None:
    root = shared_folder("data/CamVid")
    dataset = open_segmentation("camvid", root, protocol="native")
    assert (len(dataset), dataset.domain) == (233, "test")
    assert dataset.image(0).shape == (180, 240, 3)
    counts = np.bincount(np.concatenate([dataset.mask(i).ravel() for i in range(0, 233, 29)]), minlength=256)
    assert (counts[:11] > 0).all()
    assert counts[11:255].sum() == 0
    assert 0 < counts[255] < 0.1 * counts.sum()
    road = dataset.class_names.index("road")
    bottom = np.stack([dataset.mask(i)[150:, 100:140] for i in range(0, 233, 29)])
    assert (bottom == road).mean() > 0.5  # where the car drives
    assert dataset.mask(0).shape == (180, 240)
