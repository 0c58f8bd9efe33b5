from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.data.trees import PACS_ROOT, WNIDS, Seen, class_tree, corrupted_arrays, save, thumbnails
from trust_tta.data.check import Finding, check_root, find_present
from trust_tta.data.class_names import PACS_CLASSES, imagenet_classes
from trust_tta.data.corrupt_dataset import corrupt_array, corrupt_folder


def _errors(findings: list[Finding]) -> list[str]:
    return [f"{finding.path.name}: {finding.message}" for finding in findings if finding.status == "error"]


def _levels(findings: list[Finding], level: str) -> list[str]:
    return [f"{finding.path.name}: {finding.message}" for finding in findings if finding.status == level]


@pytest.fixture
def pacs(tmp_path: Path) -> Path:
    """PACS with one picture of each class; its counts are wrong, nothing else is."""
    for domain in ("art_painting", "cartoon", "photo", "sketch"):
        class_tree(tmp_path / "PACS" / domain, PACS_CLASSES, per_class=1)
    return tmp_path


def _beyond_counts(findings: list[Finding]) -> list[str]:
    return [error for error in _errors(findings) if "the whole domain has" not in error]


@pytest.mark.skipif(not PACS_ROOT.is_dir(), reason="real PACS is not beside the checkout")
def test_real_pacs_is_whole() -> None:
    findings = check_root(PACS_ROOT)
    assert [finding.status for finding in findings] == ["ok"] * 4
    assert findings[0].message == "art_painting: 2048 images in 7 classes"


def test_incomplete_domains_are_counted(pacs: Path) -> None:
    findings = check_root(pacs)
    assert _beyond_counts(findings) == []
    assert "PACS: photo: there are 7 images; the whole domain has 1670" in _errors(findings)
    assert len(_errors(findings)) == 4


def test_broken_images_are_named_one_by_one(pacs: Path) -> None:
    photo = pacs / "PACS" / "photo"
    (photo / "dog" / "pic_000.jpg").write_bytes(b"")
    (photo / "house" / "pic_000.jpg").write_text("<html>not found</html>")
    found = _beyond_counts(check_root(pacs))
    assert len(found) == 2
    assert all(error.startswith("pic_000.jpg: cannot be read: cannot identify image file") for error in found)


def test_only_a_thorough_check_sees_a_truncated_image(pacs: Path) -> None:
    path = pacs / "PACS" / "photo" / "dog" / "pic_000.jpg"
    path.write_bytes(path.read_bytes()[:-300])
    assert _beyond_counts(check_root(pacs)) == []
    (error,) = _beyond_counts(check_root(pacs, thorough=True))
    assert error.startswith("pic_000.jpg: cannot be read: image file is truncated")


def test_unknown_and_empty_classes_are_named(pacs: Path) -> None:
    photo, sketch = pacs / "PACS" / "photo", pacs / "PACS" / "sketch"
    save(photo / "cat" / "x.png", thumbnails(1)[0])
    (sketch / "dog" / "pic_000.jpg").unlink()
    findings = check_root(pacs)
    (error,) = _beyond_counts(findings)
    assert error.startswith(f"PACS: photo: {photo / 'cat'} is not a class of pacs; allowed are dog, elephant")
    assert _levels(findings, "warning") == ["PACS: sketch: 1 of 7 classes have no images, such as dog"]


def test_missing_domain_and_unknown_folders(pacs: Path) -> None:
    (pacs / "PACS" / "sketch").rename(pacs / "somewhere")
    (pacs / "CIFAR-10-C").mkdir()
    findings = check_root(pacs)
    assert "PACS: sketch is missing" in _levels(findings, "warning")
    assert "somewhere: is not a known data set; skipped" in _levels(findings, "warning")
    assert "CIFAR-10-C: has none of its files; cifar10-c wants <corruption>.npy and labels.npy" in _errors(findings)


def test_cifar_c_of_every_kind_of_damage(tmp_path: Path) -> None:
    folder = tmp_path / "CIFAR-10-C"
    corrupted_arrays(folder, ["fog"], images=10)
    np.save(folder / "snow.npy", np.zeros((50, 32, 32, 3), np.float32))
    np.save(folder / "frost.npy", np.zeros((50, 33, 32, 3), np.uint8))
    whole = (folder / "fog.npy").read_bytes()
    (folder / "contrast.npy").write_bytes(whole[: len(whole) // 2])
    (folder / "pixelate.npy").write_bytes(b"<html>")
    np.save(folder / "saturate.npy", thumbnails(30))
    found = _errors(check_root(tmp_path))
    for expected in (
        "CIFAR-10-C: fog: there are 10 images; the whole domain has 10000",
        f"CIFAR-10-C: snow: {folder / 'snow.npy'} is float32 (50, 32, 32, 3); images must be uint8 "
        "(n, h, w, 3), values 0 to 255",
        f"CIFAR-10-C: saturate: {folder / 'labels.npy'} has 50 labels for the 30 images of saturate.npy; it must have "
        "30 or 6",
    ):
        assert expected in found or expected in _levels(check_root(tmp_path), "warning")
    for name in ("contrast", "pixelate"):
        assert any(f"{name}.npy is not a whole .npy file" in error for error in found)
    missing = [warning for warning in _levels(check_root(tmp_path), "warning") if "is missing" in warning]
    assert len(missing) == 15 - 5


def test_labels_of_cifar_c(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-c"
    corrupted_arrays(folder, ["fog"], images=20, classes=5)
    warnings = _levels(check_root(tmp_path), "warning")
    assert any("95 of 100 classes have no images, such as bed, bee, beetle" in warning for warning in warnings)
    labels = np.load(folder / "labels.npy")
    labels[7::20] = 100
    np.save(folder / "labels.npy", labels)
    assert any("100" in error and "0..99" in error for error in _errors(check_root(tmp_path)))
    np.save(folder / "labels.npy", labels.astype(np.float64))
    assert any("give integers (n,)" in error for error in _errors(check_root(tmp_path)))
    (folder / "labels.npy").unlink()
    assert any("labels.npy is missing" in error for error in _errors(check_root(tmp_path)))


def test_thorough_sees_what_was_never_written(tmp_path: Path) -> None:
    array = thumbnails(20)
    array[13:] = 0
    np.save(tmp_path / "fog.npy", array)
    np.save(tmp_path / "labels.npy", np.arange(20) // 2)
    assert _errors(check_root(tmp_path)) == []
    black = [f"image {i}: of fog is entirely black" for i in range(13, 20)]
    assert _errors(check_root(tmp_path, thorough=True)) == black


def test_what_corrupt_writes_is_whole(tmp_path: Path) -> None:
    corrupt_array(
        thumbnails(20),
        tmp_path / "CIFAR-10-C",
        labels=np.arange(20) % 10,
        corruptions=["contrast"],
        severities=[2, 5],
    )
    class_tree(tmp_path / "plain", ["a", "b"])
    corrupt_folder(tmp_path / "plain", tmp_path / "hard", corruptions=["contrast"], severities=[5], size=32)
    arrays = check_root(tmp_path / "CIFAR-10-C", thorough=True)
    assert _errors(arrays) == []
    assert _levels(arrays, "ok") == ["CIFAR-10-C: contrast/5: 20 images in 10 classes"]
    assert [str(finding) for finding in check_root(tmp_path / "hard", thorough=True)] == [
        f"ok: {tmp_path / 'hard'}: contrast/5: 4 images in 2 classes"
    ]


def test_clean_cifar(tmp_path: Path) -> None:
    folder = tmp_path / "cifar10"
    folder.mkdir()
    np.save(folder / "test_images.npy", thumbnails(10_000))
    np.save(folder / "test_labels.npy", np.arange(10_000) % 10)
    findings = check_root(tmp_path)
    differing = "(sha256 differs); download it again"
    expected = [f"cifar10: test: the {part} are not CIFAR-10's {differing}" for part in ("images", "labels")]
    assert _errors(findings) == expected
    assert any(
        warning.startswith("cifar10: train: ") and "lacks train_images.npy" in warning
        for warning in _levels(findings, "warning")
    )
    np.save(folder / "test_images.npy", thumbnails(9))
    assert any("9 test images but 10000 labels" in error for error in _errors(check_root(tmp_path)))


def test_imagenet_layouts(tmp_path: Path) -> None:
    class_tree(tmp_path / "imagenet-r", WNIDS)
    class_tree(tmp_path / "imagenet-r", ["n01440764", "n99999999"])
    class_tree(tmp_path / "ImageNet-C" / "fog" / "3", WNIDS)
    (tmp_path / "ImageNet-C" / "snow").mkdir()
    class_tree(tmp_path / "imagenetv2" / "top-images", ["0", "999", "1000"])
    findings = check_root(tmp_path)
    found = "\n".join(_beyond_counts(findings))
    assert "n01440764 is not a class of imagenet-r" in found
    assert "1000 is not a class of imagenet-v2" in found
    assert "ImageNet-C: snow is missing" in _levels(findings, "warning")
    assert {spec.name for spec, _ in find_present(tmp_path)} == {"imagenet-r", "imagenet-c", "imagenet-v2"}


@pytest.mark.parametrize("names", [("0", "1", "2"), WNIDS], ids=["numbers", "wnids"])
def test_some_class_folders_do_not_make_a_known_data_set(tmp_path: Path, names: tuple[str, ...]) -> None:
    class_tree(tmp_path, names)
    findings = check_root(tmp_path)
    assert [(finding.status, finding.dataset) for finding in findings] == [("ok", "folder")]


def test_folder_of_another_name_is_a_generic_one(tmp_path: Path) -> None:
    for c in imagenet_classes()[:3]:
        (tmp_path / "val" / c.wnid).mkdir(parents=True)
        save(tmp_path / "val" / c.wnid / "x.png", thumbnails(1)[0])
    assert [spec.name for spec, _ in find_present(tmp_path / "val")] == ["folder"]
    (tmp_path / "val").rename(tmp_path / "imagenet")
    assert [spec.name for spec, _ in find_present(tmp_path)] == ["imagenet"]


def test_a_generic_folder(tmp_path: Path) -> None:
    class_tree(tmp_path / "day", ["ape", "zebra"])
    class_tree(tmp_path / "night", ["ape", "zebra"])
    (tmp_path / "night" / "void").mkdir()
    findings = check_root(tmp_path)
    assert {finding.dataset for finding in findings} == {"folder"}
    lacking = "1 of 3 classes have no images, such as void"
    assert _levels(findings, "warning") == [f"{tmp_path.name}: {domain}: {lacking}" for domain in ("day", "night")]
    assert _errors(findings) == []


def test_nothing_there(tmp_path: Path) -> None:
    (nothing,) = check_root(tmp_path / "nowhere")
    assert nothing.message == "is not a folder; give the folder that holds your data sets"
    (empty,) = check_root(tmp_path)
    assert empty.status == "error"
    assert empty.message.startswith("holds no data set; known folders are cifar10, ")


def test_progress_reaches_the_end(pacs: Path) -> None:
    seen = Seen()
    check_root(pacs, progress=seen)
    assert seen.stages == [(f"checking pacs/{d}", 7) for d in ("art_painting", "cartoon", "photo", "sketch")]
    assert seen.steps == [[1] * 7] * 4
    assert seen.finished == 4


def test_arbitrary_damage_is_reported_and_never_raised(tmp_path: Path) -> None:
    corrupted_arrays(tmp_path / "CIFAR-10-C", ["fog"], images=4)
    for name, suffix in (("dog", ".jpg"), ("horse", ".png"), ("house", ".webp"), ("guitar", ".gif")):
        class_tree(tmp_path / "PACS" / "photo", [name], per_class=1, suffix=suffix)
    (tmp_path / "cifar10").mkdir()
    batch = {b"data": np.zeros((2, 3072), np.uint8), b"labels": [0, 1]}
    (tmp_path / "cifar10" / "test_batch").write_bytes(pickle.dumps(batch, protocol=2))
    generator = np.random.default_rng(11)
    for path in [path for path in sorted(tmp_path.rglob("*")) if path.is_file()]:
        whole = path.read_bytes()
        for _ in range(25):
            damaged = bytearray(whole)
            for place in generator.integers(0, min(len(whole), 130), size=3):
                damaged[place] = generator.integers(0, 256)
            path.write_bytes(damaged[: generator.integers(1, len(damaged) + 1)])
            findings = check_root(tmp_path, thorough=True)
            assert not any("\n" in finding.message for finding in findings)
        path.write_bytes(whole)


def test_checking_and_reading_do_without_torch() -> None:
    modules = "trust_tta.data.check, trust_tta.data.loading, trust_tta.data.sample"
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
