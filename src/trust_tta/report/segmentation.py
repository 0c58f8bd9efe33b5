"""Segmentation on the page: the IoU of each class, and pictures with their true and predicted labels."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from trust_tta.report.chart import finite_mean
from trust_tta.report.model import Group, Report, Variant
from trust_tta.report.tables import Column, DataTable, Row, TableCell
from trust_tta.report.text import domain_name, safe_line
from trust_tta.results import Cell, format_percent
from trust_tta.results.display import MISSING

MOST_PICTURES = 4  # of a domain
_PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Labeled:
    """The labels that one method predicted for a picture, before the update (if there are any) and after it."""

    variant: Variant
    before: bytes | None
    after: bytes


@dataclass(frozen=True)
class Picture:
    index: int
    image: bytes | None
    truth: bytes
    labeled: tuple[Labeled, ...]


@dataclass(frozen=True)
class Album:
    """Pictures of one domain."""

    name: str
    pictures: tuple[Picture, ...]


def class_table(group: Group, report: Report) -> DataTable | None:
    """The IoU of each class over all domains and seeds, with the mean Dice score and the accuracy of pixels."""
    if not group.is_segmentation:
        return None
    counted = {v: _counts(group.cells_of(v.label)) for v in group.variants}
    most = max(len(rows) for rows in counted.values())
    names = [safe_line(name) for name in report.class_names.get(group.dataset, ())] or [
        f"class {i}" for i in range(most)
    ]
    lines = []
    for variant, rows in counted.items():
        cells = group.cells_of(variant.label)
        found = ([c.result.mean_dice for c in cells], [c.result.pixel_accuracy for c in cells])
        scores = [finite_mean(value for value in values if value is not None) for values in found]
        ious = [row[0] / (row[1] + row[2] - row[0]) if row[1] + row[2] else math.nan for row in rows]
        entries = [_entry(value) for value in (*scores, *ious)]
        lines.append(Row(variant.name, tuple(entries), variant, tuple(cells)))
    columns = (Column("method"), Column("mean Dice"), Column("pixels right"), *(Column(n) for n in names[:most]))
    caption = "IoU of each class in percent, of the pixels of all domains and seeds together"
    return DataTable(f"classes {group.title}", caption, columns, tuple(lines))


def albums(group: Group, report: Report) -> list[Album]:
    """The first pictures that were kept of each domain, of the first seed."""
    found = []
    for domain in group.domains:
        cells = _kept(group, domain)
        first = next(iter(cells.values()), None)
        if first is None:
            continue
        shown = []
        for sample in first.result.masks[:MOST_PICTURES]:
            kept = [(v, m) for v, cell in cells.items() for m in cell.result.masks if m.index == sample.index]
            image = report.pictures.get((first.key.fingerprint, sample.index))
            shown.append(
                Picture(sample.index, image, sample.truth, tuple(Labeled(v, m.before, m.after) for v, m in kept))
            )
        found.append(Album(domain_name(domain), tuple(shown)))
    return found


def legend(group: Group, report: Report) -> list[tuple[str, str]]:
    """The color of each class, as CSS writes it, and its name."""
    colors = next((png_palette(cell.result.masks[0].truth) for cell in group.cells if cell.result.masks), b"")
    names = report.class_names.get(group.dataset, ())
    return [
        (f"rgb({', '.join(str(c) for c in colors[3 * i : 3 * i + 3])})", safe_line(name))
        for i, name in enumerate(names)
        if len(colors) >= 3 * i + 3
    ]


def png_palette(png: bytes) -> bytes:
    """The colors in the palette of a PNG, three bytes each; none where it has none."""
    place = len(_PNG)
    while png.startswith(_PNG) and place + 8 <= len(png):
        length, kind = struct.unpack_from(">I4s", png, place)
        if kind == b"PLTE":
            return png[place + 8 : place + 8 + length]
        place += 12 + length
    return b""


def _kept(group: Group, domain: str) -> dict[Variant, Cell]:
    """A cell of each line that kept labels, all of the same stream: that of the first seed that has any."""
    found = [
        (cell.key.seed, variant, cell)
        for variant in group.variants
        for cell in group.at.get((variant.label, domain), [])
        if cell.result.masks
    ]
    first = min(found, key=lambda item: item[0], default=None)
    return {v: c for _, v, c in found if first is not None and c.key.fingerprint == first[2].key.fingerprint}


def _counts(cells: Sequence[Cell]) -> list[list[int]]:
    """Pixels of each class over all cells: right, predicted, labeled."""
    total: list[list[int]] = []
    for cell in cells:
        for i, row in enumerate(cell.result.pixels or ()):
            if i == len(total):
                total.append([0, 0, 0])
            total[i] = [a + b for a, b in zip(total[i], row, strict=True)]
    return total


def _entry(value: float) -> TableCell:
    return TableCell(format_percent(value), value) if math.isfinite(value) else TableCell(MISSING, role="gap")
