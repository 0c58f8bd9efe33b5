"""The parts of the page below a group's accuracy table: panels of charts, sections, sample images and masks.

To add a section: make its table or chart in `tables` or `charts`, and list it in `group_sections`.
"""

from __future__ import annotations

import io
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from PIL import Image

from trust_tta.report import charts, tables
from trust_tta.report.charts import Chart
from trust_tta.report.model import Report, ResultGroup, Variant
from trust_tta.report.tables import DataTable
from trust_tta.report.text import domain_name, joined, safe_line
from trust_tta.results.order_records import EntropyByOrder

MAX_IMAGES = 8  # per domain
NO_PROBABILITIES = ("roid", "cmf")  # methods whose confidence is not a probability
INTERVAL_NOTE = "± is the 95 % interval of the difference, paired by seed."
IMAGES_NOTE = (
    " The counts are images that only one of the two classifies correctly, averaged over seeds; p is that of McNemar's "
    "exact test. Below 0.05 the difference counts as significant."
)
CALIBRATION_NOTE = (
    "ECE is the expected calibration error of a run in 15 bins of confidence; shown is its mean over domains and "
    "seeds. The diagrams show accuracy by confidence over all runs; on the dashed line both agree."
)


@dataclass(frozen=True)
class Panel:
    """A titled place for one of several charts, chosen with buttons, or from a menu if there are many."""

    title: str
    legend: str
    charts: Sequence[Chart]
    menu: bool = False


@dataclass(frozen=True)
class Section:
    """A note, tables one below the other, small charts, and charts side by side."""

    title: str
    note: str = ""
    tables: Sequence[DataTable] = ()
    small: Sequence[Chart] = ()
    charts: Sequence[Chart] = ()
    free: bool = False  # independent of the pickers of methods and domains


@dataclass(frozen=True)
class Gallery:
    """Sample images of one domain by index: the picture if it was kept, and the prediction or masks of each method."""

    name: str
    where: str
    pictures: dict[int, bytes | None]
    samples: dict[int, list[tuple[Variant, Any]]]  # SamplePrediction or MaskSample


def panels(group: ResultGroup) -> list[Panel]:
    """The charts of every group; panels without data are left out."""
    found = [
        Panel("By domain", "what to show", charts.by_domain(group)),
        Panel("Accuracy against cost", "cost", charts.cost(group)),
        Panel("Along the stream", "domain", charts.along_stream(group), menu=True),
        Panel("Before and after the update", "", charts.before_after(group)),
    ]
    return [panel for panel in found if panel.charts]


def group_sections(group: ResultGroup) -> list[Section]:
    """The sections between a group's panels and its sample images; those without data are left out."""
    compared, calibration = tables.difference_table(group), tables.calibration_table(group)
    equal, costs = tables.equal_cost_table(group), tables.cost_table(group)
    significance, confidence = INTERVAL_NOTE, CALIBRATION_NOTE
    if compared is not None and any(column.title == "p" for column in compared.columns):
        significance += IMAGES_NOTE
    if names := [v.name for v in group.variants if v.method in NO_PROBABILITIES]:
        confidence += f" The confidence of {joined(names)} is not a probability: its logits are scaled by class priors."
    sections = [
        Section("Is the best significantly better?", significance, [compared] if compared else []),
        Section("At equal cost" if equal else "Cost", tables=[table for table in (equal, costs) if table]),
        Section("Stability and forgetting", charts=charts.stability(group)),
        Section("Calibration", confidence, [calibration] if calibration else [], small=charts.reliability(group)),
        Section("Options that were varied", charts=charts.ablations(group), free=True),
    ]
    return [section for section in sections if section.tables or section.small or section.charts]


def galleries(
    group: ResultGroup, report: Report, kept: Literal["predictions", "masks"] = "predictions", most: int = MAX_IMAGES
) -> list[Gallery]:
    """The first images of each domain whose predictions or masks were kept, in the stream of the first such seed."""
    found = []
    for domain in group.domains:
        cells = [(v, c) for v in group.variants for c in group.at.get((v.label, domain), []) if getattr(c.result, kept)]
        if not cells:
            continue
        first = min((cell.key for _, cell in cells), key=lambda key: key.seed)
        samples: dict[int, list[tuple[Variant, Any]]] = defaultdict(list)
        for variant, cell in cells:
            for sample in getattr(cell.result, kept) if cell.key.fingerprint == first.fingerprint else ():
                samples[sample.index].append((variant, sample))
        pictures = {i: report.pictures.get((first.fingerprint, i)) for i in sorted(samples)[:most]}
        where = domain_name(domain) + (f", severity {first.severity}" if first.severity is not None else "")
        found.append(Gallery(domain_name(domain), where, pictures, samples))
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


def order_sections(records: Sequence[EntropyByOrder]) -> list[Section]:
    """Rankings of scan orders."""
    return [Section("Scan orders", tables=[tables.entropy_table(records)], free=True)] if records else []


def defaults_note(group: ResultGroup) -> str:
    """The options of a method's plain row, if other rows of it vary them: "trust without options: k=6."."""
    said = []
    for variant in group.variants:
        others = [v for v in group.variants if v.method == variant.method and v is not variant]
        if variant.label == variant.method and others:
            values: dict[str, Any] = json.loads(variant.options)
            varied = [n for n in sorted(values) if any(json.loads(o.options).get(n) != values[n] for o in others)]
            said.append(f"{variant.name} without options: {', '.join(f'{n}={values[n]}' for n in varied)}.")
    return " ".join(said)
