"""The parts of the page below a group's accuracy table: panels of charts, sections, sample images, paper tables.

To add a section: make its table or chart in `tables` or `charts`, and list it in `group_sections`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trust_tta.report import charts, tables
from trust_tta.report.chart import Chart
from trust_tta.report.model import Report, ResultGroup, Variant
from trust_tta.report.paper import compare
from trust_tta.report.tables import DataTable
from trust_tta.report.text import domain_name, joined
from trust_tta.results import SamplePrediction
from trust_tta.results.order_records import EntropyByOrder

MAX_IMAGES = 8  # per domain
NO_PROBABILITIES = ("roid", "cmf")  # methods whose confidence is not a probability


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

    @property
    def has_content(self) -> bool:
        return bool(self.tables or self.small or self.charts)


@dataclass(frozen=True)
class Gallery:
    """Sample images of one domain by index: their pictures if kept, and each method's prediction."""

    name: str
    where: str
    pictures: dict[int, bytes | None]
    predictions: dict[int, list[tuple[Variant, SamplePrediction]]]


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
    sections = [
        Section("Is the best significantly better?", _significance_note(compared), _present(compared)),
        Section("At equal cost" if equal else "Cost", tables=_present(equal, costs)),
        Section("Stability and forgetting", charts=charts.stability(group)),
        Section("Calibration", _calibration_note(group), _present(calibration), small=charts.reliability(group)),
        Section("Options that were varied", charts=charts.ablations(group), free=True),
    ]
    return [section for section in sections if section.has_content]


def _present(*found: DataTable | None) -> list[DataTable]:
    return [table for table in found if table is not None]


def _significance_note(compared: DataTable | None) -> str:
    note = "± is the 95 % interval of the difference, paired by seed."
    if compared is not None and any(column.title == "p" for column in compared.columns):
        note += (
            " The counts are images that only one of the two classifies correctly, averaged over seeds; p is that of "
            "McNemar's exact test. Below 0.05 the difference counts as significant."
        )
    return note


def _calibration_note(group: ResultGroup) -> str:
    note = (
        "ECE is the expected calibration error of a run in 15 bins of confidence; shown is its mean over domains and "
        "seeds. The diagrams show accuracy by confidence over all runs; on the dashed line both agree."
    )
    if names := [v.name for v in group.variants if v.method in NO_PROBABILITIES]:
        note += f" The confidence of {joined(names)} is not a probability: its logits are scaled by class priors."
    return note


def galleries(group: ResultGroup, report: Report) -> list[Gallery]:
    """The first kept images of each domain, of the first seed that has any."""
    found = []
    for domain in group.domains:
        cells = [(v, cell) for v in group.variants for cell in group.at.get((v.label, domain), [])]
        kept = [(v, cell) for v, cell in cells if cell.result.predictions]
        if kept:
            first = min((cell.key for _, cell in kept), key=lambda key: key.seed)
            predictions: dict[int, list[tuple[Variant, SamplePrediction]]] = defaultdict(list)
            for variant, cell in kept:
                for prediction in cell.result.predictions if cell.key.fingerprint == first.fingerprint else ():
                    predictions[prediction.index].append((variant, prediction))
            pictures = {i: report.pictures.get((first.fingerprint, i)) for i in sorted(predictions)[:MAX_IMAGES]}
            where = domain_name(domain) + (f", severity {first.severity}" if first.severity is not None else "")
            found.append(Gallery(domain_name(domain), where, pictures, predictions))
    return found


def paper_tables(group: ResultGroup) -> list[tuple[DataTable, DataTable | None]]:
    """The published tables that this group can be compared with: means, and domain by domain."""
    return [
        (
            tables.paper_table(group, found),
            tables.paper_domains_table(group, found) if found.table.columns == "domain" else None,
        )
        for found in compare(group)
    ]


def across_sections(groups: Sequence[ResultGroup]) -> list[Section]:
    """Comparisons between groups."""
    found = Section("Batch size", charts=charts.by_batch_size(groups), free=True)
    return [found] if found.has_content else []


def order_sections(records: Sequence[EntropyByOrder]) -> list[Section]:
    """Rankings of scan orders."""
    return [Section("Scan orders", charts=[charts.entropy_map(records)], free=True)] if records else []


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
