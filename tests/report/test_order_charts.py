from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from trust_tta.errors import DataError
from trust_tta.report.order_charts import aligned, heat_map, loss_surface, lowest, memory_by_k, weight_norms
from trust_tta.report.sections import order_sections
from trust_tta.results import to_json
from trust_tta.results.order_records import (
    EntropyByOrder,
    LossSurface,
    MemoryByK,
    OrderRecord,
    SurfacePoint,
    WeightNorms,
    read_records,
)

SVG = "{http://www.w3.org/2000/svg}"
ENTROPY = EntropyByOrder(title="pacs", orders=("abcd", "badc", "dbca"), entropy=(0.6, 0.75, 0.7), k=2)
SURFACE = LossSurface(
    title="noise",
    x=(0.0, 0.5, 1.0),
    y=(0.0, 1.0),
    loss=((1.0, 0.5, 1.0), (0.7, float("nan"), 0.9)),
    adapted=(SurfacePoint(name="abcd", x=0.0, y=0.0),),
    mean=SurfacePoint(name="mean", x=0.5, y=0.5),
)
NORMS = WeightNorms(title="norms", names=("a.weight", "b<i>"), mean=(1.0, 2.5), deviation=(0.01, 0.02))
MEMORY = MemoryByK(title="memory", k=(1, 2), peak=(2100, 2310), baseline=2100)
ALL: list[OrderRecord] = [ENTROPY, SURFACE, NORMS, MEMORY]


@pytest.mark.parametrize("record", ALL, ids=lambda record: type(record).__name__)
def test_records_go_through_files(record: OrderRecord, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(to_json(record))
    (read,) = read_records([path])
    assert to_json(read) == to_json(record)
    assert [to_json(r) for r in read_records([tmp_path])] == [to_json(record)]


@pytest.mark.parametrize(
    ("text", "why"),
    [("{", "is not JSON"), ('{"kind": "Planet"}', "kind 'Planet'"), ("[1]", "kind None")],
    ids=["no json", "unknown kind", "a list"],
)
def test_other_files_are_refused(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(DataError, match=why):
        read_records([path])


def test_lengths_must_agree() -> None:
    with pytest.raises(DataError, match="lengths"):
        EntropyByOrder(title="t", orders=("abcd",), entropy=(1.0, 2.0))
    with pytest.raises(DataError, match="2 by 3"):
        LossSurface(title="t", x=(0.0, 1.0, 2.0), y=(0.0, 1.0), loss=((1.0,),), adapted=(), mean=SURFACE.mean)


def test_records_in_other_orders_are_aligned() -> None:
    other = EntropyByOrder(title="b", orders=("dbca", "cdab", "abcd"), entropy=(1.0, 2.0, 3.0))
    orders, rows = aligned([ENTROPY, other])
    assert orders == ("abcd", "badc", "cdab", "dbca")
    assert rows[0][0::3] == (0.6, 0.7)
    assert rows[1][0::3] == (3.0, 1.0)
    assert math.isnan(rows[0][2])
    assert lowest(rows[0], 2) == {0, 3}
    ElementTree.fromstring(heat_map("t", [ENTROPY, other]))


def test_charts_are_drawings_and_the_lowest_are_framed() -> None:
    drawn = heat_map("t", [ENTROPY])
    assert drawn.count("framed") == 2
    for text in (drawn, loss_surface(SURFACE), weight_norms(NORMS), memory_by_k(MEMORY)):
        ElementTree.fromstring(text)
    (section,) = order_sections(ALL)
    assert (len(section.wide), len(section.drawings)) == (1, 3)
    assert not any("<i>" in drawing.svg for drawing in section.drawings)
    assert order_sections([]) == []


@pytest.mark.parametrize("x", [(0.0, 0.5, 1.0), (0.0, 1.0, 3.0), (2.0,)], ids=["even", "uneven", "one column"])
def test_cells_of_the_surface_lie_about_their_grid_values(x: tuple[float, ...]) -> None:
    record = replace(SURFACE, x=x, loss=((0.5,) * len(x), (0.7,) * len(x)))
    drawn = ElementTree.fromstring(loss_surface(record))
    boxes = [{k: float(box.attrib[k]) for k in ("x", "y", "width", "height")} for box in drawn.iter(f"{SVG}rect")]
    across, up = _ticks(drawn)
    assert len(boxes) == 2 * len(x)
    for i, value in enumerate(record.y):
        for j, wanted in enumerate(x):
            box = boxes[i * len(x) + j]
            assert box["x"] < across(wanted) < box["x"] + box["width"]
            assert box["y"] < up(value) < box["y"] + box["height"]
            assert box["y"] + box["height"] / 2 == pytest.approx(up(value), abs=0.02)
            if len(x) < 3 or x[1] == 0.5:
                assert box["x"] + box["width"] / 2 == pytest.approx(across(wanted), abs=0.02)
    row = boxes[: len(x)]
    for one, other in pairwise(row):
        assert one["x"] + one["width"] == pytest.approx(other["x"], abs=0.02)
    assert (row[0]["x"], row[-1]["x"] + row[-1]["width"]) == pytest.approx((46, 548), abs=0.02)


def _ticks(drawn: ElementTree.Element) -> tuple[Callable[[float], float], Callable[[float], float]]:
    """Where the axes say that a number is, from the places of their ticks."""
    texts = [text for text in drawn.iter(f"{SVG}text") if text.get("class") == "tick"]
    across = [(float(t.text or ""), float(t.attrib["x"])) for t in texts if t.get("text-anchor") == "middle"]
    up = [(float(t.text or ""), float(t.attrib["y"]) - 4) for t in texts if t.get("text-anchor") == "end"]

    def line(ticks: list[tuple[float, float]]) -> Callable[[float], float]:
        (a, start), (b, end) = ticks[0], ticks[-1]
        return lambda value: start + (value - a) / (b - a) * (end - start)

    return line(across), line(up)
