"""Sample images and segmentation masks of a group."""

from __future__ import annotations

import io
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Literal

from PIL import Image

from trust_tta.report.model import Report, ResultGroup, Variant
from trust_tta.report.text import domain_name, safe_line

MAX_IMAGES = 8  # per domain


@dataclass(frozen=True)
class Gallery:
    """Sample images of one domain by index: the picture if it was kept, and the prediction or masks of each method."""

    name: str
    where: str
    pictures: dict[int, bytes | None]
    samples: dict[int, list[tuple[Variant, Any]]]  # SamplePrediction or MaskSample


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
    mask = next((cell.result.masks[0].truth for cell in group.cells if cell.result.masks), None)
    colors = (Image.open(io.BytesIO(mask)).getpalette() or []) if mask is not None else []
    names = report.class_names.get(group.dataset, ())
    return [
        (f"rgb({', '.join(str(c) for c in colors[3 * i : 3 * i + 3])})", safe_line(name))
        for i, name in enumerate(names)
        if len(colors) >= 3 * i + 3
    ]
