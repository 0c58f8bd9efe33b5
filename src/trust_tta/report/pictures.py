"""Sample images of a group with what each method made of them, before and after its update."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import TypeAlias

from trust_tta.report import markup, series
from trust_tta.report.charts import Look, legend_marker
from trust_tta.report.groups import Contents, Group
from trust_tta.report.palette import display_name, domain_name
from trust_tta.results import Cell, SamplePrediction

Album: TypeAlias = dict[bytes, int]  # each picture once, with its place: groups often show the same ones

MOST_IMAGES = 8  # of a domain
_KINDS = ((b"\x89PNG", "image/png"), (b"\xff\xd8", "image/jpeg"), (b"RIFF", "image/webp"))
_NOTE = (
    "The true class, and for each method its confidence before → its prediction and confidence after the update (the "
    "prediction before is named where it was another); ✓ and ✗ judge the one after. One seed; at most 64 pixels."
)


def samples(group: Group, contents: Contents, album: Album) -> str:
    """The first images that were kept of each domain, of the first seed; their pictures are put into the album."""
    names, panes = [], []
    class_names = contents.class_names.get(group.dataset, ())
    for domain in group.domains:
        cells = _kept(group, domain)
        indices = sorted({p.index for cell in cells.values() for p in cell.result.predictions})[:MOST_IMAGES]
        if indices:
            first = next(iter(cells.values())).key
            images = {index: contents.pictures.get((first.fingerprint, index)) for index in indices}
            where = domain_name(domain) + (f", severity {first.severity}" if first.severity is not None else "")
            names.append(domain_name(domain))
            panes.append(_gallery(series.looks(group), cells, images, where, class_names, album))
    return markup.section("Sample images", markup.dropdown("domain", names, panes) if panes else "", note=_NOTE)


def _kept(group: Group, domain: str) -> dict[str, Cell]:
    """A cell of each row that kept predictions, all of the same stream: that of the first seed that has any."""
    found = [
        (cell.key.seed, row.label, cell)
        for row in group.rows
        for cell in group.at.get((row.label, domain), [])
        if cell.result.predictions
    ]
    first = min(found, key=lambda item: item[0], default=None)
    same = [item for item in found if first is not None and item[2].key.fingerprint == first[2].key.fingerprint]
    return {label: cell for _, label, cell in same}


def _gallery(
    look: Mapping[str, Look],
    cells: Mapping[str, Cell],
    images: Mapping[int, bytes | None],
    where: str,
    class_names: Sequence[str],
    album: Album,
) -> str:
    blank = '<div class="blank">no picture kept</div>' if any(images.values()) else ""
    cards = []
    for index, content in images.items():
        fates = {k: p for k, cell in cells.items() for p in cell.result.predictions if p.index == index}
        picture = blank
        if content:
            place = album.setdefault(content, len(album))
            picture = f'<img data-p="{place}" alt="{escape(f"image {index}, {where}")}">'
        truth = _class(next(iter(fates.values())).label, class_names)
        name = f"<p><b>{escape(truth)}</b><small>{escape(where)}</small><small>image {index}</small></p>"
        items = "".join(_fate(look[label], p, class_names) for label, p in fates.items())
        cards.append(f'<article class="sample"><div class="face">{picture}{name}</div><ul>{items}</ul></article>')
    return f'<div class="samples">{"".join(cards)}</div>'


def _fate(look: Look, p: SamplePrediction, class_names: Sequence[str]) -> str:
    """One method's line: "cat 41% → dog 91%", the class before only where it was another."""
    after, before = f"{_class(p.after, class_names)} {_percent(p.confidence)}", ""
    if p.before is not None and p.before != p.after:
        before = f"{_class(p.before, class_names)} {_percent(p.confidence_before)}".strip() + " →"
    elif p.confidence_before is not None and _percent(p.confidence_before) != _percent(p.confidence):
        before = f"{_percent(p.confidence_before)} →"
    right = p.after == p.label
    mark = "✓" if right else "✗"
    name = f"<span>{escape(display_name(look.label))}</span>"
    return (
        f'<li data-s="{look.index}" class="{"right" if right else "wrong"}">{legend_marker(look)}'
        f"{name} <i>{escape(before)}</i> <b>{escape(after.strip())} {mark}</b></li>"
    )


def addresses(album: Album) -> list[str]:
    """The pictures as data addresses, each where the album has it."""
    return [f"data:{_kind(content)};base64,{base64.b64encode(content).decode('ascii')}" for content in album]


def _kind(content: bytes) -> str:
    return next((kind for magic, kind in _KINDS if content.startswith(magic)), "image/png")


def _percent(confidence: float | None) -> str:
    return f"{confidence:.0%}" if confidence is not None and math.isfinite(confidence) else ""


def _class(label: int, class_names: Sequence[str]) -> str:
    if label < 0:
        return "no number"
    return class_names[label] if label < len(class_names) else f"class {label}"
