"""`trust-tta corrupt`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from trust_tta.cli.main import main
from trust_tta.data.corruptions.apply import corrupt
from trust_tta.data.sample import load_sample


def test_an_array_becomes_a_corrupted_data_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images, labels = load_sample()
    np.save(tmp_path / "test_images.npy", images[:6])
    np.save(tmp_path / "test_labels.npy", labels[:6])
    out = tmp_path / "c"
    options = ["--corruptions", "fog,contrast", "--severities", "2,5", "--seed", "3", "--workers", "1"]
    assert main(["corrupt", str(tmp_path / "test_images.npy"), str(out), *options]) == 0
    assert capsys.readouterr().out.splitlines() == [str(out / "fog.npy"), str(out / "contrast.npy")]
    expected = np.concatenate([corrupt(images[:6], "fog", 2, 3), corrupt(images[:6], "fog", 5, 3)])
    np.testing.assert_array_equal(np.load(out / "fog.npy"), expected)
    np.testing.assert_array_equal(np.load(out / "labels.npy"), np.tile(labels[:6], 2))


def test_missing_labels_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "x.npy", load_sample()[0][:2])
    arguments = [
        "corrupt",
        str(tmp_path / "x.npy"),
        str(tmp_path / "out"),
        "--corruptions",
        "contrast",
        "--workers",
        "1",
    ]
    assert main(arguments) == 0
    assert "labels.npy was not written; use --labels" in capsys.readouterr().err
    assert not (tmp_path / "out" / "labels.npy").exists()


def test_a_folder_becomes_folders(tmp_path: Path) -> None:
    source = tmp_path / "photos" / "cat"
    source.mkdir(parents=True)
    picture = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    Image.fromarray(picture).save(source / "a.png")
    arguments = ["--corruptions", "contrast", "--workers", "1", "--size", "none", "--table", "cifar"]
    assert main(["corrupt", str(tmp_path / "photos"), str(tmp_path / "out"), *arguments]) == 0
    with Image.open(tmp_path / "out" / "contrast" / "5" / "cat" / "a.png") as made:
        np.testing.assert_array_equal(np.asarray(made), corrupt(picture[None], "contrast", 5, 0, table="cifar")[0])


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--corruptions", "fogg"], "unknown corruption 'fogg'; did you mean 'fog'?"),
        (["--severities", "6"], "severity 6 does not exist"),
        (["--workers", "0"], "workers 0 is not possible"),
        (["--labels", "nothing.npy"], "nothing.npy is missing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], part: str) -> None:
    np.save(tmp_path / "x.npy", np.zeros((2, 8, 8, 3), dtype=np.uint8))
    assert main(["corrupt", str(tmp_path / "x.npy"), str(tmp_path / "out"), *arguments]) == 2
    assert part in capsys.readouterr().err


def test_an_input_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["corrupt", str(tmp_path / "x.npy"), str(tmp_path / "out")]) == 2
    assert "x.npy is missing; put it there" in capsys.readouterr().err


def test_a_size_is_a_number_or_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["corrupt", "x", "y", "--size", "big"])
    assert caught.value.code == 2
    assert "'big' is not a number of pixels" in capsys.readouterr().err
