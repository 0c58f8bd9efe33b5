"""Sample images of a group with what each method made of them, before and after its update."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from html import escape

from trust_tta.report import markup, series
from trust_tta.report.charts import legend_marker
from trust_tta.report.groups import Group
from trust_tta.report.palette import display_name, domain_name
from trust_tta.results import SamplePrediction

Images = Mapping[int | tuple[str, int], bytes]

MOST_IMAGES = 8  # of a domain
_KINDS = ((b"\x89PNG", "image/png"), (b"\xff\xd8", "image/jpeg"), (b"RIFF", "image/webp"), (b"GIF8", "image/gif"))


def samples(group: Group, images: Images, class_names: Sequence[str]) -> str:
    """The first images that were kept of each domain, of the first seed."""
    names, panes = [], []
    for domain in group.domains:
        kept = _kept(group, domain)
        indices = sorted({index for found in kept.values() for index in found})[:MOST_IMAGES]
        if indices:
            cards = [_card(group, domain, index, kept, images, class_names) for index in indices]
            names.append(domain_name(domain))
            panes.append(f'<div class="samples">{"".join(cards)}</div>')
    note = "Predictions before → after the update with the final confidence; ✓ and ✗ judge the final one."
    return markup.section("Sample images", markup.dropdown("domain", names, panes) if panes else "", note=note)


def _kept(group: Group, domain: str) -> dict[str, dict[int, SamplePrediction]]:
    """Predictions by row label and index."""
    found = {}
    for row in group.rows:
        cells = [cell for cell in group.at.get((row.label, domain), []) if cell.result.predictions]
        if cells:
            first = min(cells, key=lambda cell: cell.key.seed)
            found[row.label] = {p.index: p for p in first.result.predictions}
    return found


def _card(
    group: Group,
    domain: str,
    index: int,
    kept: Mapping[str, Mapping[int, SamplePrediction]],
    images: Images,
    class_names: Sequence[str],
) -> str:
    picture = images.get((domain, index)) or images.get(index)
    shown = '<div class="blank">no image kept</div>' if images else ""
    if picture:
        shown = _picture(picture, f"image {index}, {domain_name(domain)}")
    predictions = [(label, found[index]) for label, found in kept.items() if index in found]
    truth = _class(predictions[0][1].label, class_names)
    look = series.looks(group)
    items = []
    for label, p in predictions:
        before = f"{_class(p.before, class_names)} → " if p.before is not None and p.before != p.after else ""
        right = p.after == p.label
        items.append(
            f'<li data-s="{look[label].index}" class="{"right" if right else "wrong"}">{legend_marker(look[label])}'
            f"<span>{escape(display_name(label))}</span> <b>{'✓' if right else '✗'} "
            f"{escape(before + _class(p.after, class_names))}</b> {_percent(p.confidence)}</li>"
        )
    name = f"<p><b>{escape(truth)}</b> <small>#{index}</small></p>"
    return f'<article class="sample">{shown}{name}<ul>{"".join(items)}</ul></article>'


def _picture(content: bytes, alt: str) -> str:
    kind = next((kind for magic, kind in _KINDS if content.startswith(magic)), "image/png")
    return f'<img src="data:{kind};base64,{base64.b64encode(content).decode("ascii")}" alt="{escape(alt)}">'


def _percent(confidence: float) -> str:
    return f"{confidence:.0%}" if math.isfinite(confidence) else "–"


def _class(label: int | None, class_names: Sequence[str]) -> str:
    if label is None:
        return ""
    return class_names[label] if 0 <= label < len(class_names) else f"class {label}"
