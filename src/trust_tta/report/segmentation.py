"""Segmentation results: IoU per class, and images with their true and predicted masks."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image

from trust_tta.report.chart import finite_mean
from trust_tta.report.model import Report, ResultGroup, Variant
from trust_tta.report.tables import Column, DataTable, Row, TableCell
from trust_tta.report.text import domain_name, safe_line
from trust_tta.results import Cell, format_percent
from trust_tta.results.display import MISSING
from trust_tta.results.record import MaskSample

MAX_PICTURES = 4  # per domain


@dataclass(frozen=True)
class MaskImage:
    """An image if it was kept, and the sample of each method with its true and predicted masks (PNG)."""

    image: bytes | None
    samples: tuple[tuple[Variant, MaskSample], ...]


@dataclass(frozen=True)
class MaskGallery:
    """Images of one domain by their index."""

    name: str
    images: dict[int, MaskImage]


def class_table(group: ResultGroup, report: Report) -> DataTable | None:
    """IoU of each class over all domains and seeds, mean Dice score and pixel accuracy."""
    if not group.is_segmentation:
        return None
    counts = {v: _pixel_counts(group.cells_of(v.label)) for v in group.variants}
    classes = max(map(len, counts.values()))
    names = [safe_line(name) for name in report.class_names.get(group.dataset, ())]
    names = names or [f"class {i}" for i in range(classes)]
    rows = []
    for variant, per_class in counts.items():
        runs = group.cells_of(variant.label)
        dice = finite_mean(c.result.mean_dice for c in runs if c.result.mean_dice is not None)
        accuracy = finite_mean(c.result.pixel_accuracy for c in runs if c.result.pixel_accuracy is not None)
        ious = [both / (predicted + labeled - both) if predicted + labeled else math.nan
                for both, predicted, labeled in per_class]  # fmt: skip
        cells = [
            TableCell(format_percent(x), x) if math.isfinite(x) else TableCell(MISSING, role="gap")
            for x in (dice, accuracy, *ious)
        ]
        rows.append(Row(variant.name, tuple(cells), variant, tuple(runs)))
    columns = (Column("method"), Column("mean Dice"), Column("pixel accuracy"), *(Column(n) for n in names[:classes]))
    caption = "IoU of each class in percent, over all pixels of all domains and seeds"
    return DataTable(f"classes {group.title}", caption, columns, tuple(rows))


def mask_galleries(group: ResultGroup, report: Report) -> list[MaskGallery]:
    """The first kept images of each domain, of the first seed that has any."""
    found = []
    for domain in group.domains:
        kept = [(v, c) for v in group.variants for c in group.at.get((v.label, domain), []) if c.result.masks]
        if not kept:
            continue
        _, first = min(kept, key=lambda pair: pair[1].key.seed)
        masks = [(v, m) for v, c in kept if c.key.fingerprint == first.key.fingerprint for m in c.result.masks]
        images = {}
        for index in [sample.index for sample in first.result.masks[:MAX_PICTURES]]:
            image = report.pictures.get((first.key.fingerprint, index))
            images[index] = MaskImage(image, tuple((v, m) for v, m in masks if m.index == index))
        found.append(MaskGallery(domain_name(domain), images))
    return found


def legend(group: ResultGroup, report: Report) -> list[tuple[str, str]]:
    """The CSS color and name of each class."""
    mask = next((cell.result.masks[0].truth for cell in group.cells if cell.result.masks), None)
    colors = (Image.open(io.BytesIO(mask)).getpalette() or []) if mask is not None else []
    names = report.class_names.get(group.dataset, ())
    return [
        (f"rgb({', '.join(str(c) for c in colors[3 * i : 3 * i + 3])})", safe_line(name))
        for i, name in enumerate(names)
        if len(colors) >= 3 * i + 3
    ]


def _pixel_counts(cells: Sequence[Cell]) -> list[list[int]]:
    """Pixels per class over all runs: correct, predicted, labeled."""
    tables = [cell.result.pixels for cell in cells if cell.result.pixels is not None]
    return [[sum(column) for column in zip(*rows, strict=True)] for rows in zip(*tables, strict=False)]
