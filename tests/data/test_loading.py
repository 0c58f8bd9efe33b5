from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.data.trees import PACS_ROOT, WNID_LABELS, WNIDS, class_tree, corrupted_arrays, pictures, save, thumbnails
from trust_tta.data.arrays import open_images, read_batch
from trust_tta.data.check import check_root
from trust_tta.data.class_matching import imagenet_r_labels
from trust_tta.data.class_names import PACS_CLASSES
from trust_tta.data.corrupt_dataset import corrupt_array
from trust_tta.data.dataset import array_dataset, join_datasets
from trust_tta.data.loading import available_domains, open_dataset
from trust_tta.errors import ConfigError, DataError


@pytest.mark.parametrize("folder", ["CIFAR-10-C", "cifar10c", "Cifar-10-C/CIFAR-10-C", "."])
@pytest.mark.parametrize("severity", [1, 3, 5])
def test_cifar_c_blocks(tmp_path: Path, folder: str, severity: int) -> None:
    labels = corrupted_arrays(tmp_path / folder, ["fog", "snow"], images=37)
    dataset = open_dataset("cifar10-c", tmp_path, domain="fog", severity=severity)
    assert len(dataset) == 37
    assert (dataset.labels == labels).all()
    for i in (0, 1, 36):
        assert dataset.image(i)[0, 0, :2].tolist() == [severity, i]
    assert (dataset.domain, dataset.severity) == ("fog", severity)
    assert available_domains("cifar10-c", tmp_path) == ("snow", "fog")  # the field's order, not the alphabet's


def test_cifar_c_with_the_labels_of_one_block(tmp_path: Path) -> None:
    labels = corrupted_arrays(tmp_path, ["fog"], images=20)
    np.save(tmp_path / "labels.npy", labels)
    dataset = open_dataset("cifar10-c", tmp_path, domain="fog", severity=4)
    assert (dataset.labels == labels).all()
    assert dataset.image(7)[0, 0, 0] == 4


def test_single_block_without_record(tmp_path: Path) -> None:
    images, labels = thumbnails(25), np.arange(25) % 10
    np.save(tmp_path / "fog.npy", images)
    np.save(tmp_path / "labels.npy", np.sort(labels))
    dataset = open_dataset("cifar10-c", tmp_path, domain="fog", severity=5)
    assert len(dataset) == 25
    assert dataset.severity is None
    assert (dataset.image(24) == images[24]).all()


def test_labels_that_differ_between_blocks_are_refused(tmp_path: Path) -> None:
    """Taken as one block, severity 1 and 5 would both be the mean of all five."""
    corrupted_arrays(tmp_path, ["fog"], images=20)
    labels = np.load(tmp_path / "labels.npy")
    labels[67] = (labels[67] + 1) % 10
    np.save(tmp_path / "labels.npy", labels)
    for name in ("cifar10-c", "array-c"):
        with pytest.raises(DataError, match=r"labels\.npy is not 5 equal blocks, one for each severity"):
            open_dataset(name, tmp_path, domain="fog", severity=1)
    assert any("is not 5 equal blocks" in finding.message for finding in check_root(tmp_path))


def test_a_whole_cifar_c_without_repeating_labels_is_refused(tmp_path: Path) -> None:
    """50,000 images are five severities, whatever the labels."""
    np.lib.format.open_memmap(tmp_path / "fog.npy", mode="w+", dtype=np.uint8, shape=(50_000, 32, 32, 3)).flush()
    np.save(tmp_path / "labels.npy", np.sort(np.arange(50_000) % 10))
    with pytest.raises(DataError, match="is not 5 equal blocks"):
        open_dataset("cifar10-c", tmp_path, domain="fog")


@pytest.mark.parametrize("severities", [(5,), (2, 4), (1, 2, 3, 4, 5)])
def test_reads_what_corrupt_writes(tmp_path: Path, severities: tuple[int, ...]) -> None:
    # constant labels repeat in every division, so that only the record tells the blocks apart
    images, labels = thumbnails(20), np.zeros(20, dtype=np.int64)
    corrupt_array(images, tmp_path, labels=labels, corruptions=["contrast"], severities=severities)
    whole = np.load(tmp_path / "contrast.npy")
    for k, severity in enumerate(severities):
        dataset = open_dataset("array-c", tmp_path, domain="contrast", severity=severity)
        assert len(dataset) == 20
        assert (dataset.image(19) == whole[k * 20 + 19]).all()
    if 3 not in severities:
        with pytest.raises(DataError, match="no severity 3; it holds"):
            open_dataset("array-c", tmp_path, domain="contrast", severity=3)


def _npy_cifar(folder: Path) -> None:
    folder.mkdir(parents=True)
    for part, count in (("train", 50), ("test", 10)):
        np.save(folder / f"{part}_images.npy", thumbnails(count, seed=count))
        np.save(folder / f"{part}_labels.npy", np.arange(count) % 10)


def _official_cifar10(folder: Path) -> None:
    folder.mkdir(parents=True)
    whole = thumbnails(50, seed=50)
    parts = {f"data_batch_{k + 1}": whole[10 * k : 10 * k + 10] for k in range(5)}
    parts["test_batch"] = thumbnails(10, seed=10)
    for name, images in parts.items():
        rows = images.transpose(0, 3, 1, 2).reshape(10, 3072)
        content = {b"data": rows, b"labels": [k % 10 for k in range(10)], b"batch_label": b"x"}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))


@pytest.mark.parametrize(
    ("make", "folder"),
    [
        (_npy_cifar, "cifar10"),
        (_official_cifar10, "cifar-10-batches-py"),
        (_official_cifar10, "CIFAR10/cifar-10-batches-py"),
    ],
    ids=["npy", "official", "official-nested"],
)
def test_clean_cifar(tmp_path: Path, make: Callable[[Path], None], folder: str) -> None:
    make(tmp_path / folder)
    test, train = open_dataset("cifar10", tmp_path), open_dataset("cifar10", tmp_path, domain="train")
    assert (len(test), len(train)) == (10, 50)
    assert (np.stack([train.image(i) for i in range(50)]) == thumbnails(50, seed=50)).all()
    assert (test.labels == np.arange(10)).all()
    assert test.class_names[3] == "cat"


def test_both_forms_of_cifar_have_one_fingerprint(tmp_path: Path) -> None:
    _npy_cifar(tmp_path / "a" / "cifar10")
    _official_cifar10(tmp_path / "b" / "cifar10")
    a, b = (open_dataset("cifar10", tmp_path / side) for side in "ab")
    assert a.fingerprint == b.fingerprint
    assert a.fingerprint != open_dataset("cifar10", tmp_path / "a", domain="train").fingerprint


def test_cifar100_fine_labels(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    rows = thumbnails(5).transpose(0, 3, 1, 2).reshape(5, 3072)
    content = {b"data": rows, b"fine_labels": [99, 0, 3, 4, 5], b"coarse_labels": [1, 1, 1, 1, 1]}
    (folder / "test").write_bytes(pickle.dumps(content, protocol=2))
    dataset = open_dataset("cifar100", tmp_path)
    assert dataset.labels.tolist() == [99, 0, 3, 4, 5]
    assert (dataset.image(4) == thumbnails(5)[4]).all()


def test_a_batch_that_would_run_code_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "test_batch").write_bytes(pickle.dumps({b"data": Path}, protocol=2))
    with pytest.raises(DataError, match="which no CIFAR batch holds"):
        open_dataset("cifar10", tmp_path)


@pytest.mark.parametrize("folder", ["ImageNet-C/fog", "Imagenet-C/weather/fog", "fog"])
def test_imagenet_c(tmp_path: Path, folder: str) -> None:
    class_tree(tmp_path / folder / "5", WNIDS)
    class_tree(tmp_path / folder / "2", WNIDS[:1])
    dataset = open_dataset("imagenet-c", tmp_path, domain="fog")
    assert dataset.labels.tolist() == list(np.repeat(WNID_LABELS, 2))
    assert len(dataset.class_names) == 1000
    assert len(open_dataset("imagenet-c", tmp_path, domain="fog", severity=2)) == 2
    assert available_domains("imagenet-c", tmp_path) == ("fog",)
    with pytest.raises(DataError, match="has no severity 4"):
        open_dataset("imagenet-c", tmp_path, domain="fog", severity=4)
    with pytest.raises(DataError, match="has no domain snow; it has fog"):
        open_dataset("imagenet-c", tmp_path, domain="snow")


@pytest.mark.parametrize("folder", ["ImageNet-Sketch/sketch", "Imagenet-S", "imagenet_sketch", "sketch"])
def test_imagenet_sketch(tmp_path: Path, folder: str) -> None:
    class_tree(tmp_path / folder, WNIDS, suffix=".JPEG")
    dataset = open_dataset("imagenet-sketch", tmp_path)
    assert dataset.labels.tolist() == list(np.repeat(WNID_LABELS, 2))
    assert dataset.class_mask is None


@pytest.mark.parametrize("folder", ["imagenet2012/val", "ILSVRC/Data/CLS-LOC/val", "ImageNet/validation", "imagenet"])
def test_imagenet(tmp_path: Path, folder: str) -> None:
    class_tree(tmp_path / folder, WNIDS, suffix=".JPEG")
    assert open_dataset("imagenet", tmp_path).labels.tolist() == list(np.repeat(WNID_LABELS, 2))


def test_imagenet_r_masks_its_200_classes(tmp_path: Path) -> None:
    class_tree(tmp_path / "imagenet-r", WNIDS)
    dataset = open_dataset("imagenet-r", tmp_path)
    assert dataset.class_mask is not None
    assert (dataset.class_mask == imagenet_r_labels()).all()
    assert set(dataset.labels.tolist()) <= set(dataset.class_mask.tolist())
    class_tree(tmp_path / "imagenet-r", ["n01440764"])  # tench: in ImageNet, not in ImageNet-R
    with pytest.raises(DataError, match="n01440764 is not a class of imagenet-r; allowed are its 200"):
        open_dataset("imagenet-r", tmp_path)


@pytest.mark.parametrize(
    "folder",
    [
        "imagenetv2-matched-frequency-format-val",
        "imagenet-v2/imagenetv2-matched-frequency-format-val",
        "Imagenet-V2",
        "imagenetv2/matched-frequency",
    ],
)
@pytest.mark.parametrize("names", [("1", "10", "2", "207"), WNIDS], ids=["numbers", "wnids"])
def test_imagenet_v2_reads_folders_as_numbers(tmp_path: Path, folder: str, names: tuple[str, ...]) -> None:
    class_tree(tmp_path / folder, names, suffix=".jpeg")
    dataset = open_dataset("imagenet-v2", tmp_path, domain="matched-frequency")
    expected = [1, 2, 10, 207] if names != WNIDS else list(WNID_LABELS)
    assert dataset.labels.tolist() == list(np.repeat(expected, 2))


def test_a_part_of_imagenet_v2_does_not_pass_for_another(tmp_path: Path) -> None:
    folder = tmp_path / "imagenetv2-top-images-format-val"
    class_tree(folder, ("1", "10"), suffix=".jpeg")
    assert available_domains("imagenet-v2", folder) == ("top-images",)
    assert open_dataset("imagenet-v2", folder, domain="top-images").labels.tolist() == [1, 1, 10, 10]
    with pytest.raises(DataError):
        open_dataset("imagenet-v2", folder, domain="matched-frequency")


@pytest.mark.parametrize("folder", ["PACS", "pacs/kfold", "PACS/PACS", "pacs_data", "."])
def test_pacs_layouts(tmp_path: Path, folder: str) -> None:
    for domain in ("art_painting", "cartoon", "photo", "sketch"):
        class_tree(tmp_path / folder / domain, PACS_CLASSES, per_class=1)
    assert available_domains("pacs", tmp_path) == ("art_painting", "cartoon", "photo", "sketch")
    dataset = open_dataset("pacs", tmp_path, domain="sketch")
    assert dataset.labels.tolist() == list(range(7))
    assert dataset.class_names == PACS_CLASSES


@pytest.mark.skipif(not PACS_ROOT.is_dir(), reason="real PACS is not beside the checkout")
def test_real_pacs() -> None:
    sizes = {
        domain: len(open_dataset("pacs", PACS_ROOT, domain=domain)) for domain in available_domains("pacs", PACS_ROOT)
    }
    assert sizes == {"art_painting": 2048, "cartoon": 2344, "photo": 1670, "sketch": 3929}
    photo = open_dataset("pacs", PACS_ROOT.parent, domain="photo")
    assert np.bincount(photo.labels).tolist() == [189, 202, 182, 186, 199, 280, 432]
    assert photo.image(99).shape == (96, 96, 3)


def test_generic_folders(tmp_path: Path) -> None:
    class_tree(tmp_path / "flat", ["10", "9", "1"], per_class=1)
    flat = open_dataset("folder", tmp_path / "flat")
    assert (flat.domain, flat.class_names) == ("all", ("1", "9", "10"))
    for domain in ("night", "day"):
        class_tree(tmp_path / "deep" / domain, ["zebra", "ape"], per_class=3)
    assert available_domains("folder", tmp_path / "deep") == ("day", "night")
    deep = open_dataset("folder", tmp_path / "deep", domain="night")
    assert deep.class_names == ("ape", "zebra")
    with pytest.raises(ConfigError, match="has no domain None; choose one of day, night"):
        open_dataset("folder", tmp_path / "deep")


def test_other_modes_and_hidden_files_are_read_as_rgb(tmp_path: Path) -> None:
    folder = class_tree(tmp_path / "set", ["a"], per_class=1)
    Image.fromarray(pictures(1)[0]).convert("L").save(folder / "a" / "grey.png")
    Image.fromarray(pictures(1)[0]).convert("CMYK").save(folder / "a" / "press.jpg")
    (folder / "a" / ".DS_Store").write_bytes(b"x")
    (folder / "a" / "notes.txt").write_text("x")
    (folder / "__MACOSX").mkdir()
    dataset = open_dataset("folder", folder)
    assert len(dataset) == 3
    assert all(dataset.image(i).shape[2] == 3 and dataset.image(i).dtype == np.uint8 for i in range(3))


def test_image_is_what_was_saved(tmp_path: Path) -> None:
    save(tmp_path / "a" / "x.png", pictures(1)[0])
    assert (open_dataset("folder", tmp_path).image(0) == pictures(1)[0]).all()


def test_fingerprint_of_a_folder_sees_changes(tmp_path: Path) -> None:
    class_tree(tmp_path, ["a", "b", "c"], per_class=4)
    before = open_dataset("folder", tmp_path).fingerprint
    assert before == open_dataset("folder", tmp_path).fingerprint
    (tmp_path / "b" / "pic_001.jpg").write_bytes(b"changed")
    assert before != open_dataset("folder", tmp_path).fingerprint


def test_broken_files_are_named(tmp_path: Path) -> None:
    class_tree(tmp_path / "pics", ["a"], per_class=1)
    path = tmp_path / "pics" / "a" / "pic_000.jpg"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(DataError, match=r"pic_000\.jpg cannot be read"):
        open_dataset("folder", tmp_path / "pics").image(0)
    corrupted_arrays(tmp_path, ["fog"], images=10)
    whole = (tmp_path / "fog.npy").read_bytes()
    (tmp_path / "fog.npy").write_bytes(whole[:-1000])
    with pytest.raises(DataError, match=r"fog\.npy is not a whole \.npy file"):
        open_dataset("cifar10-c", tmp_path, domain="fog")
    np.save(tmp_path / "fog.npy", thumbnails(50).astype(np.float32))
    with pytest.raises(DataError, match=r"fog\.npy is float32 \(50, 32, 32, 3\); images must be uint8"):
        open_dataset("cifar10-c", tmp_path, domain="fog")
    np.save(tmp_path / "fog.npy", thumbnails(45))
    with pytest.raises(DataError, match="has 50 labels for the 45 images"):
        open_dataset("cifar10-c", tmp_path, domain="fog")
    (tmp_path / "labels.npy").unlink()
    with pytest.raises(DataError, match=r"labels\.npy is missing"):
        open_dataset("cifar10-c", tmp_path, domain="fog")


def test_labels_out_of_range(tmp_path: Path) -> None:
    corrupted_arrays(tmp_path, ["fog"], images=20, classes=12)
    with pytest.raises(DataError, match=r"run from 0 to 11; they must lie in 0\.\.9"):
        open_dataset("cifar10-c", tmp_path, domain="fog")


def test_user_mistakes(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="pacs is not in .*: it wants <domain>/<class>/<image>"):
        open_dataset("pacs", tmp_path, domain="photo")
    with pytest.raises(DataError, match="is not a folder"):
        open_dataset("pacs", tmp_path / "nowhere", domain="photo")
    with pytest.raises(ConfigError, match="severity is 6"):
        open_dataset("cifar10-c", tmp_path, domain="fog", severity=6)
    class_tree(tmp_path / "PACS" / "photo", ["dog", "cat"])
    with pytest.raises(DataError, match="cat is not a class of pacs; allowed are dog, elephant"):
        open_dataset("pacs", tmp_path, domain="photo")


def test_a_folder_named_for_another_set_is_not_taken(tmp_path: Path) -> None:
    class_tree(tmp_path / "imagenet-r", WNIDS)
    with pytest.raises(DataError, match="imagenet-sketch is not in"):
        open_dataset("imagenet-sketch", tmp_path / "imagenet-r")


def test_a_record_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    corrupted_arrays(tmp_path, ["fog"], images=12)
    (tmp_path / "corrupt.json").write_text(json.dumps([1]))
    assert len(open_dataset("cifar10-c", tmp_path, domain="fog")) == 12


def test_fingerprints_see_pixels_and_labels() -> None:
    images, labels = thumbnails(4), np.array([0, 1, 0, 1])
    other = images.copy()
    other[3, 31, 31, 2] ^= 1
    prints = {
        array_dataset(pixels, marks, ["a", "b"], name="x", domain="y").fingerprint
        for pixels, marks in ((images, labels), (other, labels), (images, 1 - labels), (images.copy(), labels.copy()))
    }
    assert len(prints) == 3


def test_joined_data_sets() -> None:
    parts = [
        array_dataset(thumbnails(n, seed=n), np.full(n, k), ["a", "b"], name="x", domain=str(n), severity=5)
        for k, n in enumerate((3, 5))
    ]
    joined = join_datasets(parts, domain="both")
    expected = np.concatenate([thumbnails(3, seed=3), thumbnails(5, seed=5)])
    assert (np.stack([joined.image(i) for i in range(8)]) == expected).all()
    assert joined.labels.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    assert joined.severity == 5
    other = array_dataset(thumbnails(2), np.zeros(2, np.int64), ["c"], name="y", domain="z")
    with pytest.raises(DataError, match="have different classes"):
        join_datasets([parts[0], other], domain="both")


class _Dtype:
    """A numpy.dtype with a state of its own: an itemsize of 10**9 over three bytes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return np.dtype, ("V8",), (3, "|", None, None, None, 1_000_000_000, 1, 0)


@pytest.mark.parametrize("kind", [_Dtype(), np.dtype("O"), np.dtype("V8"), np.dtype([("a", "u1")]), np.dtype("<f8")])
def test_a_batch_holds_bytes_only(tmp_path: Path, kind: object) -> None:
    class State:
        def __reduce__(self) -> tuple[Any, ...]:
            start = np.empty(0, np.uint8).__reduce__()
            return start[0], start[1], (1, (1, 3072), kind, False, bytes(3072))

    content = pickle.dumps({b"data": State(), b"labels": [0]}, protocol=2)
    with pytest.raises(DataError, match="is not a CIFAR batch: the file has an array of .*; CIFAR batches are bytes"):
        read_batch(content, name="x")


@pytest.mark.parametrize(
    ("shape", "content", "message"),
    [
        ((2, 3072), bytes(9), "cannot reshape array of size 9"),
        ((-7, 3072), bytes(3072), "holds 1 images but 2 labels"),
        ((2, 3072), [0] * 6144, "a bytes-like object is required"),
    ],
)
def test_an_array_fits_its_bytes(shape: tuple[int, ...], content: object, message: str) -> None:
    class State:
        def __reduce__(self) -> tuple[Any, ...]:
            start = np.empty(0, np.uint8).__reduce__()
            return start[0], start[1], (1, shape, np.dtype("u1"), False, content)

    with pytest.raises(DataError, match=message):
        read_batch(pickle.dumps({b"data": State(), b"labels": [0, 1]}, protocol=2), name="x")


def test_a_batch_that_claims_many_objects_takes_no_memory() -> None:
    """Stores an empty dict as object number four billion: a table of that size would be 32 GB."""
    with pytest.raises(DataError, match="is not a CIFAR batch"):
        read_batch(b"\x80\x02}r\xf0\xff\xff\xff.", name="x")


def test_labels_of_a_batch_are_a_flat_list() -> None:
    """Lists of the same list double at each level: thirty of them would be a billion labels."""
    nested: list[object] = [0]
    for _ in range(30):
        nested = [nested, nested]
    pixels = np.zeros((1, 3072), np.uint8)
    with pytest.raises(DataError, match="its labels are not a list of integers"):
        read_batch(pickle.dumps({b"data": pixels, b"labels": nested}, protocol=2), name="x")


def test_an_archive_in_place_of_an_array_is_not_unpacked(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "bomb.npz", x=np.zeros(1 << 24, np.uint8))
    (tmp_path / "bomb.npz").rename(tmp_path / "fog.npy")
    with pytest.raises(DataError, match=r"fog\.npy is not a whole \.npy file: the magic string is not correct"):
        open_images(tmp_path / "fog.npy")
