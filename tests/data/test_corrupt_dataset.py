"""Whole data sets: layouts, resuming after a kill, and what is refused."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.data.image_files import make_pictures
from tests.data.trees import Seen
from trust_tta.data.corrupt_dataset import corrupt_array, corrupt_folder, cut_image
from trust_tta.data.corruptions.apply import corrupt
from trust_tta.data.images import SUFFIXES, find_images, read_image
from trust_tta.data.loading import open_dataset
from trust_tta.errors import ConfigError, DataError


def save_images(root: Path, sizes: dict[str, tuple[int, int]]) -> Path:
    for k, (name, (height, width)) in enumerate(sizes.items()):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(make_pictures(1, height, width, seed=k)[0]).save(path)
    return root


def contents(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


SIZES = {"cat/a.png": (60, 90), "cat/b.JPEG": (70, 50), "dog/deep/c.png": (41, 33), "dog/d.webp": (48, 48)}


def test_array_holds_a_block_for_each_severity(tmp_path: Path) -> None:
    images = make_pictures(7, 32, 32)
    np.save(tmp_path / "images.npy", images)
    labels = np.array([3, 1, 4, 1, 5, 9, 2], np.uint8)
    paths = corrupt_array(
        tmp_path / "images.npy",
        tmp_path / "out",
        labels=labels,
        corruptions=["fog", "pixelate"],
        severities=[4, 2],
        seed=6,
    )
    assert paths == [tmp_path / "out" / "fog.npy", tmp_path / "out" / "pixelate.npy"]
    for path in paths:
        blocks = np.load(path)
        assert blocks.dtype == np.uint8
        assert blocks.shape == (14, 32, 32, 3)
        assert np.array_equal(blocks[:7], corrupt(images, path.stem, 2, seed=6))
        assert np.array_equal(blocks[7:], corrupt(images, path.stem, 4, seed=6))
    assert np.load(tmp_path / "out" / "labels.npy").tolist() == [3, 1, 4, 1, 5, 9, 2] * 2
    assert sorted(contents(tmp_path / "out")) == ["corrupt.json", "fog.npy", "labels.npy", "pixelate.npy"]


def test_workers_write_the_same_array(tmp_path: Path) -> None:
    images = make_pictures(300, 32, 32)
    for workers in (1, 2):
        corrupt_array(images, tmp_path / str(workers), corruptions=["snow", "contrast"], workers=workers)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


def test_array_progress_counts_every_image(tmp_path: Path) -> None:
    options: dict[str, Any] = {"corruptions": ["fog", "contrast"], "severities": [1, 5]}
    for _ in range(2):
        seen = Seen()
        corrupt_array(make_pictures(200, 32, 32), tmp_path, progress=seen, **options)
        assert seen.stages == [("corrupting images", 800)]
        assert sum(seen.steps[0]) == 800
        assert min(seen.steps[0]) > 0
    assert seen.steps == [[400, 400]]


ARRAY_KILL = """
import os, signal, sys
import numpy as np
from trust_tta.data.corrupt_dataset import corrupt_array
from trust_tta.progress import Progress
class Killer(Progress):
    done = 0
    def advance(self, n=1):
        self.done += n
        if self.done > 900:
            os.kill(os.getpid(), signal.SIGKILL)
corrupt_array(sys.argv[1], sys.argv[2], corruptions=["contrast", "fog", "pixelate"], severities=[1, 5],
              progress=Killer())
"""


def test_killed_array_goes_on_where_it_was(tmp_path: Path) -> None:
    source = tmp_path / "images.npy"
    np.save(source, make_pictures(300, 32, 32))
    killed = subprocess.run([sys.executable, "-c", ARRAY_KILL, str(source), str(tmp_path / "out")], check=False)
    assert killed.returncode == -signal.SIGKILL
    left = sorted(contents(tmp_path / "out"))
    assert "contrast.npy" in left
    assert "fog.npy" not in left
    assert any(name.endswith(".tmp") for name in left)
    finished = (tmp_path / "out" / "contrast.npy").stat().st_mtime_ns
    for out in ("out", "undisturbed"):
        corrupt_array(source, tmp_path / out, corruptions=["contrast", "fog", "pixelate"], severities=[1, 5])
    assert (tmp_path / "out" / "contrast.npy").stat().st_mtime_ns == finished
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")


def test_damaged_array_is_made_again(tmp_path: Path) -> None:
    images = make_pictures(5, 20, 24)
    (path,) = corrupt_array(images, tmp_path, corruptions=["fog"])
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    corrupt_array(images, tmp_path, corruptions=["fog"])
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "was made with seed 0, not 1"),
        ({"severities": [4]}, r"was made with severities \(5,\), not \(4,\)"),
        ({"table": "imagenet"}, "was made with table 'cifar', not 'imagenet'"),
        ({"source": make_pictures(3, 20, 24, seed=9)}, "was made with source"),
        ({"labels": np.array([1, 2, 0])}, "labels.npy holds other labels"),
    ],
    ids=["seed", "severities", "table", "source", "labels"],
)
def test_another_make_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {"source": make_pictures(3, 20, 24), "corruptions": ["contrast"], "labels": np.arange(3)}
    corrupt_array(out_dir=tmp_path, **options)
    before = contents(tmp_path)
    with pytest.raises(DataError, match=message) as caught:
        corrupt_array(out_dir=tmp_path, **{**options, **change})
    assert "\n" not in str(caught.value)
    assert contents(tmp_path) == before


def test_files_of_unknown_origin_are_not_touched(tmp_path: Path) -> None:
    np.save(tmp_path / "fog.npy", np.zeros(3))
    with pytest.raises(DataError, match=r"fog\.npy is there without a corrupt\.json"):
        corrupt_array(make_pictures(2, 8, 8), tmp_path)
    assert list(contents(tmp_path)) == ["fog.npy"]


def test_broken_record_is_refused(tmp_path: Path) -> None:
    for text in ("{", "[]"):
        (tmp_path / "corrupt.json").write_text(text)
        with pytest.raises(DataError, match=r"corrupt\.json.* delete"):
            corrupt_array(make_pictures(2, 8, 8), tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": np.zeros(4, np.int64)}, r"labels are int64 \(4,\); give 2 integers"),
        ({"labels": np.zeros(2)}, "labels are float64"),
        ({"source": "missing.npy"}, r"missing\.npy is missing"),
        ({"source": np.zeros((0, 8, 8, 3), np.uint8)}, "no images"),
        ({"source": np.zeros((2, 8, 8), np.uint8)}, r"\(n, h, w, 3\)"),
    ],
    ids=["label count", "float labels", "missing", "empty", "grey"],
)
def test_wrong_arrays_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        corrupt_array(**{"source": make_pictures(2, 8, 8), "out_dir": tmp_path, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"corruptions": []}, "at least one"),
        ({"corruptions": "fog"}, "give a list"),
        ({"corruptions": ["fog", "rain"]}, "'rain'"),
        ({"severities": [1, 6]}, "severity 6"),
        ({"workers": 0}, "workers 0"),
        ({"seed": -3}, "seed -3"),
        ({"table": "tiny"}, "'tiny'"),
    ],
    ids=["none", "string", "unknown", "severity", "workers", "seed", "table"],
)
def test_wrong_options_leave_nothing_behind(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    source = save_images(tmp_path / "in", {"cat/a.png": (20, 20)})
    with pytest.raises(ConfigError, match=message):
        corrupt_array(make_pictures(2, 8, 8), tmp_path / "out", **options)
    with pytest.raises(ConfigError, match=message):
        corrupt_folder(source, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_folder_keeps_classes_and_names(tmp_path: Path) -> None:
    source = save_images(tmp_path / "in", SIZES)
    (source / "cat" / ".hidden.png").write_bytes(b"no image")
    (source / "notes.txt").write_text("not an image")
    folders = corrupt_folder(
        source, tmp_path / "out", corruptions=["contrast", "frost"], severities=[5, 1], size=32, seed=2
    )
    assert folders == [tmp_path / "out" / c / s for c in ("contrast", "frost") for s in ("1", "5")]
    expected = {f"{c}/{s}/{name}" for c in ("contrast", "frost") for s in (1, 5) for name in SIZES}
    assert set(contents(tmp_path / "out")) == expected | {"corrupt.json"}
    for index, name in enumerate(sorted(SIZES)):
        clean = cut_image(read_image(source / name), 32)[None]
        for corruption in ("contrast", "frost"):
            saved = read_image(tmp_path / "out" / corruption / "5" / name)
            made = corrupt(clean, corruption, 5, seed=2, first_index=index)[0]
            if name.endswith("JPEG"):
                assert np.abs(saved.astype(np.int64) - made).mean() < 8
            else:
                assert np.array_equal(saved, made)


def test_whole_images_keep_their_size(tmp_path: Path) -> None:
    source = save_images(tmp_path / "in", SIZES)
    corrupt_folder(source, tmp_path / "out", corruptions=["fog"], size=None)
    for name, (height, width) in SIZES.items():
        assert read_image(tmp_path / "out" / "fog" / "5" / name).shape == (height, width, 3)


def test_every_image_that_the_reader_counts_is_corrupted(tmp_path: Path) -> None:
    source = save_images(tmp_path / "in", {f"cat/{suffix[1:]}{suffix}": (20, 24) for suffix in SUFFIXES})
    save_images(tmp_path / "elsewhere", {"a.png": (20, 20)})
    (source / "dog").symlink_to(tmp_path / "elsewhere")
    (source / "cat" / "back").symlink_to(source)
    clean = open_dataset("folder", source)
    assert len(clean) == len(SUFFIXES) + 1
    corrupt_folder(source, tmp_path / "out", corruptions=["contrast"], size=None)
    made = open_dataset("folder", tmp_path / "out" / "contrast" / "5")
    assert made.labels.tolist() == clean.labels.tolist()
    names = sorted(str(path.relative_to(source)) for path in source.glob("*/*.*"))
    for index, name in enumerate(names):
        if not name.endswith(("jpg", "jpeg")):
            expected = corrupt(read_image(source / name)[None], "contrast", 5, first_index=index)[0]
            target = name + ".png" * name.endswith("gif")
            assert np.array_equal(read_image(tmp_path / "out" / "contrast" / "5" / target), expected), name


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    source = save_images(tmp_path / "in", {"cat/a.gif": (20, 20), "cat/a.gif.png": (20, 20)})
    with pytest.raises(
        DataError, match=r"cat/a\.gif, to be written as cat/a\.gif\.png, which is there too; rename one"
    ):
        corrupt_folder(source, tmp_path / "out", corruptions=["contrast"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("height", "width"), [(100, 160), (160, 100), (57, 57), (20, 90)])
def test_crop_is_the_middle_of_the_scaled_image(tmp_path: Path, height: int, width: int) -> None:
    across = np.linspace(0, 255, width).astype(np.uint8)
    Image.fromarray(np.broadcast_to(across[:, None], (height, width, 3))).save(tmp_path / "a.png")
    cut = cut_image(read_image(tmp_path / "a.png"), 56).astype(np.float64)
    assert cut.shape == (56, 56, 3)
    assert cut.mean() == pytest.approx(127.5, abs=2.5)
    scaled_width = 64 * width / min(height, width)
    assert cut[28, -1, 0] - cut[28, 0, 0] == pytest.approx(255 * 55 / scaled_width, abs=4)


def test_workers_write_the_same_folder(tmp_path: Path) -> None:
    source = save_images(tmp_path / "in", SIZES)
    for workers in (1, 2):
        corrupt_folder(source, tmp_path / str(workers), corruptions=["frost", "fog"], size=32, workers=workers)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


FOLDER_KILL = """
import os, signal, sys
from trust_tta.data.corrupt_dataset import corrupt_folder
from trust_tta.progress import Progress
class Killer(Progress):
    done = 0
    def advance(self, n=1):
        self.done += n
        if self.done > 9:
            os.kill(os.getpid(), signal.SIGKILL)
corrupt_folder(sys.argv[1], sys.argv[2], corruptions=["contrast", "fog"], severities=[1, 5], size=32,
               progress=Killer())
"""


def test_killed_folder_goes_on_where_it_was(tmp_path: Path) -> None:
    source = save_images(tmp_path / "in", SIZES)
    out = tmp_path / "out"
    killed = subprocess.run([sys.executable, "-c", FOLDER_KILL, str(source), str(out)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(contents(out)) == 1 + 10
    finished = (out / "contrast" / "5" / "cat" / "a.png").stat().st_mtime_ns
    for name in ("out", "undisturbed"):
        corrupt_folder(source, tmp_path / name, corruptions=["contrast", "fog"], severities=[1, 5], size=32)
    assert (out / "contrast" / "5" / "cat" / "a.png").stat().st_mtime_ns == finished
    assert contents(out) == contents(tmp_path / "undisturbed")
    corrupt_folder(source, out, corruptions=["pixelate"], severities=[3], size=32)
    assert (out / "pixelate" / "3" / "dog" / "deep" / "c.png").exists()


def test_changed_folder_is_refused(tmp_path: Path) -> None:
    source = save_images(tmp_path / "in", SIZES)
    corrupt_folder(source, tmp_path / "out", corruptions=["contrast"], size=32)
    with pytest.raises(DataError, match="was made with size 32, not 48"):
        corrupt_folder(source, tmp_path / "out", corruptions=["contrast"], size=48)
    save_images(source, {"cat/new.png": (30, 30)})
    with pytest.raises(DataError, match="was made with source"):
        corrupt_folder(source, tmp_path / "out", corruptions=["contrast"], size=32)
    record = json.loads((tmp_path / "out" / "corrupt.json").read_text())
    assert record["images"] == 4


@pytest.mark.parametrize("workers", [1, 2])
def test_unreadable_image_is_named(tmp_path: Path, workers: int) -> None:
    source = save_images(tmp_path / "in", {"cat/a.png": (40, 40)})
    (source / "cat" / "b.jpg").write_bytes(b"\xff\xd8 cut short")
    with pytest.raises(DataError, match=r"b\.jpg cannot be read") as caught:
        corrupt_folder(source, tmp_path / "out", corruptions=["contrast"], workers=workers)
    assert "\n" not in str(caught.value)


def test_wrong_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no images"):
        find_images(tmp_path / "empty")
    with pytest.raises(DataError, match="is not a folder"):
        corrupt_folder(tmp_path / "nowhere", tmp_path / "out")
    source = save_images(tmp_path / "in", {"cat/a.png": (20, 20)})
    with pytest.raises(ConfigError, match="lies inside the input"):
        corrupt_folder(source, source / "out")
    with pytest.raises(ConfigError, match="size 0"):
        corrupt_folder(source, tmp_path / "out", size=0)


def test_folders_that_link_to_each_other_are_read_once(tmp_path: Path) -> None:
    """Ten folders, each with links to the nine others, have millions of paths."""
    save_images(tmp_path / "in", {f"class{k}/a.png": (20, 20) for k in range(10)})
    for one in range(10):
        for other in range(10):
            if one != other:
                (tmp_path / "in" / f"class{one}" / f"to{other}").symlink_to(tmp_path / "in" / f"class{other}")
    assert find_images(tmp_path / "in") == [tmp_path / "in" / f"class{k}" / "a.png" for k in range(10)]


def test_a_strip_is_refused_before_it_is_scaled() -> None:
    with pytest.raises(DataError, match="is too large"):
        cut_image(np.zeros((1, 400_000, 3), np.uint8), 224)
