"""Data sets of Hugging Face's `datasets`, real ones, written to disk by the library itself."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trust_tta.cli.main import main
from trust_tta.data import available_domains, open_dataset
from trust_tta.data.class_names import CIFAR10_CLASSES
from trust_tta.data.hub import from_datasets
from trust_tta.data.sample import load_sample
from trust_tta.errors import ConfigError, DataError

datasets: Any = pytest.importorskip("datasets", reason="needs the extra 'hub'")

COUNT = 24


@pytest.fixture(scope="module")
def rows() -> Any:
    from PIL import Image

    pixels, labels = load_sample()
    features = datasets.Features({
        "img": datasets.Image(),
        "label": datasets.ClassLabel(names=list(CIFAR10_CLASSES)),
        "place": datasets.Value("string"),
    })  # fmt: skip
    content = {
        "img": [Image.fromarray(p) for p in pixels[:COUNT]],
        "label": labels[:COUNT].tolist(),
        "place": ["here" if i % 3 else "there" for i in range(COUNT)],
    }
    return datasets.Dataset.from_dict(content, features=features)


@pytest.fixture(scope="module")
def folder(rows: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hf")
    datasets.DatasetDict(test=rows, train=rows.select(range(4))).save_to_disk(str(root / "cifar"))
    rows.save_to_disk(str(root / "one"))
    rows.to_parquet(str(root / "parquet" / "test.parquet"))
    return root


def test_images_and_labels_are_those_that_were_written(folder: Path) -> None:
    found = open_dataset("hf:cifar", folder, options={"image": "img"})
    pixels, labels = load_sample()
    assert (len(found), found.class_names) == (COUNT, CIFAR10_CLASSES)
    assert found.labels.tolist() == labels[:COUNT].tolist()
    assert np.array_equal(found.image(7), pixels[7])
    assert found.fingerprint == open_dataset(f"hf:{folder / 'one'}", "anywhere", options={"image": "img"}).fingerprint


def test_a_column_names_the_domains(folder: Path) -> None:
    options = {"image": "img", "domain": "place"}
    assert available_domains("hf:cifar", folder, options=options) == ("there", "here")
    assert len(open_dataset("hf:cifar", folder, domain="there", options=options)) == COUNT // 3


def test_splits_and_parquet_files(folder: Path) -> None:
    assert len(open_dataset("hf:cifar", folder, options={"image": "img", "split": "train"})) == 4
    read = open_dataset("hf:parquet", folder, options={"image": "img"})
    assert (len(read), read.class_names) == (COUNT, CIFAR10_CLASSES)


def test_from_python(rows: Any) -> None:
    found = from_datasets(rows, image="img", name="mine", domain="fog")
    assert (found.name, found.domain, len(found)) == ("mine", "fog", COUNT)
    plain = datasets.Dataset.from_dict({"image": rows["img"][:4], "label": ["b", "a", "b", "c"]})
    named = from_datasets(plain)
    assert (named.labels.tolist(), named.class_names) == ([1, 0, 1, 2], ("a", "b", "c"))


def test_mistakes_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # else it tries for half a minute
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="the data have no column 'image'; did you mean 'img'"):
        open_dataset("hf:cifar", folder)
    with pytest.raises(ConfigError, match="'cifar' has no split 'tests'; did you mean 'test'"):
        open_dataset("hf:cifar", folder, options={"image": "img", "split": "tests"})
    with pytest.raises(DataError, match="the data set 'hf:me/nothing' cannot be loaded"):
        open_dataset("hf:me/nothing", folder)


def test_bench_reads_them(folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "hf.toml"
    config.write_text(
        'methods = ["source", "tide"]\n[model]\ncheckpoint = "vmamba_nano_cifar10"\n[stream]\nbatch_size = 8\n'
        '[data]\ndataset = "hf:cifar"\noptions = {image = "img", domain = "place"}\n'
    )
    flags = ["--root", str(folder), "--store", str(tmp_path / "s.sqlite"), "--export", str(tmp_path / "out.csv")]
    assert main(["bench", str(config), *flags, "--device", "cpu"]) == 0
    rows = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    assert {(row["method"], row["domain"]) for row in rows} == {
        (method, domain) for method in ("source", "tide") for domain in ("here", "there")
    }
    options = ["--data-option", "image=img", "--domains", "all", "--limit", "8"]
    second = ["--store", str(tmp_path / "t.sqlite"), "--methods", "source", "--checkpoint", "vmamba_nano_cifar10"]
    assert main(["bench", "--dataset", "hf:one", "--root", str(folder), *options, *second, "--device", "cpu"]) == 0
