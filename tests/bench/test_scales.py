"""The parts of a configuration and its small scale: what each is, and every mistake in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.bench.tiny import read_config
from trust_tta.bench.config import RunConfig
from trust_tta.bench.parsing import read_parts
from trust_tta.errors import ConfigError

BOTH = """
store = "runs/mine.sqlite"
device = "cpu"
methods = ["source", "tent", "trust"]
[model]
name = "vmamba_tiny_s1l8_bn"
checkpoint = "net.pth"
preprocessing = "squash224"
[data]
dataset = "imagenet-r"
class_mask = false
[stream]
setting = "standard"
seeds = [0, 1]
[small]
keep_samples = 3
methods = ["tent", { name = "trust", k = 2 }]
[small.model]
checkpoint = "vmamba_nano_cifar10"
[small.data]
dataset = "sample"
domains = ["fog", "clean"]
limit = 32
"""
PARTS = """
experiment = "table"
methods = ["bn"]
[stream]
batch_size = 64
[[parts]]
model = { checkpoint = "a.pth" }
data = { dataset = "CIFAR10_C" }
[[parts]]
model = { checkpoint = "b.pth", name = "vmamba_nano" }
data = { dataset = "pacs", domains = ["photo"] }
stream = { batch_size = 32 }
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


def small(folder: Path, text: str, changes: dict[str, Any] | None = None) -> RunConfig:
    return read_config(write(folder, text), changes, small=True)


def test_sections_of_the_small_scale_replace_those_of_the_file(tmp_path: Path) -> None:
    full, little = read_config(write(tmp_path, BOTH)), small(tmp_path, BOTH)
    assert (full.experiment, full.store) == ("mine", "runs/mine.sqlite")
    assert (little.experiment, little.store) == ("mine-small", "runs/mine-small.sqlite")
    assert (little.model.checkpoint, little.model.name, little.model.preprocessing) == (
        "vmamba_nano_cifar10",
        None,
        None,
    )
    assert (little.data.dataset, little.data.domains, little.data.class_mask) == ("sample", ("fog", "clean"), True)
    assert [(m.name, dict(m.options)) for m in little.methods] == [("tent", {}), ("trust", {"k": 2})]
    assert (little.keep_samples, full.keep_samples) == (3, 0)
    assert little.device == "cpu"
    assert little.stream == full.stream


def test_a_small_scale_may_have_a_name_and_store_of_its_own(tmp_path: Path) -> None:
    named = BOTH.replace("keep_samples = 3", 'experiment = "tiny"')
    assert (small(tmp_path, named).experiment, small(tmp_path, named).store) == ("tiny", "runs/tiny.sqlite")
    stored = BOTH.replace("keep_samples = 3", 'store = "elsewhere.sqlite"')
    assert (small(tmp_path, stored).experiment, small(tmp_path, stored).store) == ("mine-small", "elsewhere.sqlite")


def test_flags_change_the_scale_that_is_run(tmp_path: Path) -> None:
    little = small(tmp_path, BOTH, {"data": {"limit": 5}, "method_options": [("trust", "k", 3)]})
    assert (little.data.limit, little.data.domains) == (5, ("fog", "clean"))
    assert dict(little.methods[1].options) == {"k": 3}


def test_mistakes_of_both_scales_are_reported_together(tmp_path: Path) -> None:
    text = BOTH.replace("limit = 32", "limit = 0\nlimits = 3").replace('"fog"', '"rain"').replace("[0, 1]", "[0, 0]")
    with pytest.raises(ConfigError) as caught:
        read_config(write(tmp_path, text))
    message = str(caught.value)
    assert "has 4 mistakes: stream.seeds: [0, 0] has a value twice" in message
    assert "small: data.limit is 0; give a value >= 1" in message
    assert "small: data.domains: 'rain' is not a corruption" in message
    assert "small: data.limits: there is no such option; did you mean 'limit'?" in message
    assert message.count("stream.seeds") == 1


def test_a_file_without_a_small_scale(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no section \[small\]"):
        small(tmp_path, PARTS)
    with pytest.raises(ConfigError, match=r"the command line has no section \[small\]"):
        read_config(None, {}, small=True)


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("small = 3", "small: 3 is not a table"),
        ('parts = ["x"]', "parts: ['x'] is not a list of tables"),
        ("parts = []", "parts: [] is not a list of tables"),
        ("parts = [{ other = 1 }]", "parts[1]: other: there is no such option"),
        ("parts = [{ data = 1 }]", "parts[1]: data is 1; give a table"),
    ],
    ids=["small is a number", "parts are texts", "no parts", "a strange field", "data is a number"],
)
def test_other_shapes_are_refused(tmp_path: Path, line: str, part: str) -> None:
    path = write(tmp_path, f"{line}\n{BOTH.split('[small]')[0]}")
    with pytest.raises(ConfigError) as caught:
        read_parts(path)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ('["source", "tent", "trust"]', '["source", 3]', "methods.1: 3 is not a name or a table with a name"),
        ('["source", "tent", "trust"]', "7", "methods.0: 7 is not a name or a table with a name"),
    ],
    ids=["one of several", "the only one"],
)
def test_a_method_that_is_a_number_is_reported_with_the_flags(tmp_path: Path, old: str, new: str, part: str) -> None:
    changes = {"methods": ["source"], "method_options": [("source", "x", 1)]}
    with pytest.raises(ConfigError) as caught:
        read_parts(write(tmp_path, BOTH.replace(old, new)), changes)
    assert part in str(caught.value)


@pytest.mark.parametrize("lines", ['stream = 5\nsetting = "online"', 'setting = "online"\nstream = 5'], ids=repr)
def test_a_section_that_is_a_number_is_reported(tmp_path: Path, lines: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_parts(write(tmp_path, f"{lines}\n{BOTH.split('[stream]')[0]}"))
    assert "stream is 5; give a table" in str(caught.value)


def test_parts_share_the_file_and_replace_its_sections(tmp_path: Path) -> None:
    one, other = read_parts(write(tmp_path, PARTS))
    assert (one.experiment, one.store) == (other.experiment, other.store) == ("table", "runs/table.sqlite")
    assert (one.data.dataset, one.model.checkpoint, one.stream.batch_size) == ("cifar10-c", "a.pth", (64,))
    assert (other.data.domains, other.model.name, other.stream.batch_size) == (("photo",), "vmamba_nano", (32,))
    assert one.methods == other.methods


def test_a_data_set_selects_its_part_and_other_flags_change_all_parts(tmp_path: Path) -> None:
    path = write(tmp_path, PARTS)
    (picked,) = read_parts(path, {"data": {"dataset": "PACS", "root": "here"}})
    assert (picked.data.dataset, picked.data.root, picked.data.domains) == ("pacs", "here", ("photo",))
    assert read_config(path, {"data": {"dataset": "pacs"}}).data.domains == ("photo",)
    assert {part.data.limit for part in read_parts(path, {"data": {"limit": 7}})} == {7}
    with pytest.raises(ConfigError, match="no part uses the data set 'imagenet-c'; the parts use CIFAR10_C, pacs"):
        read_parts(path, {"data": {"dataset": "imagenet-c"}})


def test_mistakes_name_their_part_and_shared_ones_are_reported_once(tmp_path: Path) -> None:
    text = PARTS.replace('["bn"]', '["bn", "tents"]').replace('"b.pth"', "5").replace("= 32", "= 0")
    with pytest.raises(ConfigError) as caught:
        read_parts(write(tmp_path, text))
    message = str(caught.value)
    assert message.count("unknown method 'tents'") == 1
    assert "parts[2]: model.checkpoint is 5; give a string" in message
    assert "parts[2]: stream.batch_size.0 is 0; give a value >= 1" in message
