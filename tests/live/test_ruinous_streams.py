"""The script that measures the guard: how long each method runs, and what its record and tables say."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.ruinous_streams import (
    Book,
    Run,
    count_batches,
    gather_material,
    main,
    parse,
    read_plan,
    time_table,
)

RUN = Run("tent", "noise", "none", 2000, source=92.0, fresh=92.2, after=40.0, stream_accuracy=None, seconds=10.0)


def test_some_methods_and_benign_streams_have_fewer_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["", "out", "--batches", "2000,trust=400", "--benign-batches", "500"])
    arguments = parse()
    asked = [("tent", "noise"), ("trust", "noise"), ("tent", "fog"), ("trust", "fog")]
    assert [count_batches(arguments, *pair) for pair in asked] == [2000, 400, 500, 400]


def test_records_are_merged_into_one_with_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guarded = replace(RUN, guard="calibrated")
    fog = replace(RUN, stream="fog", stream_accuracy=80.0, late_seconds=5.0)
    Book(tmp_path / "a", {}).add([RUN, replace(guarded, after=91.8), fog])
    Book(tmp_path / "b", {}).add([replace(guarded, stream="mixed", after=91.0)])
    cost = replace(fog, guard="calibrated", stream_accuracy=79.9, seconds=10.4, late_seconds=5.1)
    Book(tmp_path / "c", {}).add([cost])
    files = [str(tmp_path / f"{name}.json") for name in "abc"]
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "all"), "--merge", *files])
    main()
    assert len(json.loads((tmp_path / "all.json").read_text())["runs"]) == 5
    lines = (tmp_path / "all.md").read_text().splitlines()
    assert "| tent | 2000 | 92.0 | 92.2 | 40.0 / 91.8 | - / **91.0** |" in lines  # bold: over half a point is lost
    assert "| tent | fog | 2000 | 80.0 | 79.9 | -0.10 | +4.0 % | +2.0 % |  |" in lines


def test_the_page_gets_its_tables_from_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marks = ("after", "lasting", "benign", "time")
    page = tmp_path / "page.md"
    page.write_text("".join(f"before {m}\n\n<!-- {m} -->\nold\n<!-- /{m} -->\n" for m in marks))
    fog = replace(RUN, stream="fog", stream_accuracy=80.0, late_seconds=9.68)
    both = [fog, replace(fog, guard="calibrated", stream_accuracy=79.9, seconds=10.4, late_seconds=10.0)]
    Book(tmp_path / "a", {}).add([RUN, replace(RUN, guard="calibrated", after=91.6), *both])
    arguments = ["", str(tmp_path / "all"), "--merge", str(tmp_path / "a.json"), "--page", str(page)]
    for _ in range(2):  # the second time finds its own tables
        monkeypatch.setattr(sys, "argv", [*arguments, "--times", str(tmp_path / "a.json")])
        main()
    lines = page.read_text().splitlines()
    assert "old" not in lines
    assert sum(line.startswith("before") for line in lines) == len(marks)
    assert "With the guard 1 of 1 end within 0.5 points of the source, the worst 0.4 below; without it 0 of 1" in str(
        lines
    )
    assert "| tent | 1 | 2000 | 80.0 | 79.9 | -0.10 | -0.10 (fog) |" in lines
    assert "| tent | fog | 2000 | - | 5.00 | 5.17 | +3.3 % | +0.08 s | +4.0 % |" in lines


def test_a_longer_run_of_a_stream_takes_the_place_of_a_shorter_one(tmp_path: Path) -> None:
    book = Book(tmp_path / "a", {})
    book.add([RUN, replace(RUN, batches=300, after=50.0), replace(RUN, guard="calibrated", batches=700)])
    (first, second) = json.loads((tmp_path / "a.json").read_text())["runs"]
    assert (first["batches"], second["after"], second["batches"]) == (700, 40.0, 2000)
    assert "| tent | 2000 / 700 |" in (tmp_path / "a.md").read_text()


def test_a_plan_is_run_in_its_order() -> None:
    text = "# first\ntent,tide; one class,fog 3; none,calibrated; 20\n\nshot; noise; calibrated; 2000\n"
    both = ("none", "calibrated")
    pairs = [("tent", "one class"), ("tide", "one class"), ("tent", "fog 3"), ("tide", "fog 3")]
    assert read_plan(text) == [(*pair, both, 20) for pair in pairs] + [("shot", "noise", ("calibrated",), 2000)]


@pytest.mark.parametrize("stream", ["noise", "constant", "one class", "mixed", "flips", "nan", "fog 3"])
def test_a_batch_is_the_same_each_time_and_has_the_labels_of_its_images(stream: str) -> None:
    material = gather_material()
    images, labels = material.batch(stream, 3, 8)
    assert images.shape == (8, 32, 32, 3)
    assert (material.batch(stream, 3, 8)[0] == images).all()
    assert (labels is None) == (stream in ("noise", "constant", "mixed"))
    if stream == "one class":
        assert set(labels.tolist()) == {3}  # type: ignore[union-attr]


def test_the_batches_after_the_first_64_are_timed_in_parts() -> None:
    run = replace(RUN, batches=0, seconds=0.0, late_seconds=0.0, blocks=[])
    for i in range(200):
        run.add(float(i))
    assert (run.batches, run.seconds, run.late_seconds) == (200, sum(range(200)), sum(range(64, 200)))
    assert run.blocks == [sum(range(64, 128)), sum(range(128, 192)), sum(range(192, 200))]


def test_the_change_in_time_is_the_median_over_parts() -> None:
    """One part in which something else was running does not count."""
    alone = replace(RUN, stream="fog", guard="none", batches=256, seconds=4.0, late_seconds=3.0, blocks=[1.0, 1.0, 1.0])
    guarded = replace(alone, guard="calibrated", seconds=6.07, late_seconds=5.07, blocks=[1.03, 3.0, 1.04])
    assert "| +4.0 % |" in time_table([alone, guarded])
