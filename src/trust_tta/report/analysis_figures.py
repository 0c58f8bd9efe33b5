"""Paper figures of the analyses: entropy heat map, loss surface, norms of adapted weights, memory by K."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from trust_tta.report.analyses import aligned, lowest
from trust_tta.report.palette import STYLES
from trust_tta.results.order_records import EntropyByOrder, LossSurface, MemoryByK, OrderRecord, WeightNorms

Axes: TypeAlias = Any  # of matplotlib
Draw: TypeAlias = Callable[[Axes], None]


def figures(records: Sequence[OrderRecord]) -> Iterator[tuple[str, tuple[float, float], Draw]]:
    """Name, size in inches and drawing of each figure; maps of the same orders share one."""
    maps = [r for r in records if isinstance(r, EntropyByOrder)]
    if maps:
        columns = len(aligned(maps)[0])
        yield "entropy_by_order", (0.42 * columns + 1.4, 0.4 * len(maps) + 1.0), _entropy(maps)
    for record in records:
        if isinstance(record, LossSurface):
            yield "loss_surface", (3.8, 3.2), _surface(record)
        elif isinstance(record, WeightNorms):
            yield "weight_norms", (5.5, 0.16 * len(record.names) + 1.0), _norms(record)
        elif isinstance(record, MemoryByK):
            yield "memory_by_k", (3.4, 2.6), _memory(record)


def _entropy(maps: Sequence[EntropyByOrder]) -> Draw:
    def draw(axes: Axes) -> None:
        columns, rows = aligned(maps)
        shades = []
        for i, (record, numbers) in enumerate(zip(maps, rows, strict=True)):
            known = [v for v in numbers if math.isfinite(v)] or [0.0]
            low, spread = min(known), (max(known) - min(known)) or 1.0
            shades.append([(v - low) / spread for v in numbers])
            best = lowest(numbers, record.k)
            for j, v in enumerate(numbers):
                colour, weight = "white" if shades[i][j] < 0.45 else "black", "bold" if j in best else None
                axes.text(j, i, f"{v:.2f}", ha="center", va="center", fontsize=6, weight=weight, color=colour)
        axes.imshow(shades, cmap="Blues_r", aspect="auto", vmin=-0.1, vmax=1.3)
        axes.set_xticks(range(len(columns)), columns, rotation=60, fontsize=7)
        axes.set_yticks(range(len(maps)), [record.title for record in maps])
        axes.grid(visible=False)

    return draw


def _surface(record: LossSurface) -> Draw:
    def draw(axes: Axes) -> None:
        filled = axes.contourf(record.x, record.y, record.loss, 16, cmap="Blues_r")
        axes.figure.colorbar(filled, ax=axes, label="loss")
        colour = STYLES["trust_naive"].light
        x, y = [p.x for p in record.adapted], [p.y for p in record.adapted]
        axes.plot(x, y, "^", color=colour, markeredgecolor="white", markersize=9, linestyle="none", label="adapted")
        mean, tone = record.mean, STYLES["trust"].light
        axes.plot(
            mean.x, mean.y, "X", color=tone, markeredgecolor="white", markersize=9, linestyle="none", label="mean"
        )
        axes.set_title(record.title, fontsize=8)
        axes.legend()
        axes.grid(visible=False)

    return draw


def _norms(record: WeightNorms) -> Draw:
    def draw(axes: Axes) -> None:
        places = range(len(record.names))
        axes.barh(places, record.mean, xerr=record.deviation, color=STYLES["trust"].light, error_kw={"lw": 0.6})
        axes.set_yticks(places, record.names, fontsize=6)
        axes.invert_yaxis()
        axes.set_xlabel("mean L2 norm over orders, and deviation")
        axes.set_title(record.title, fontsize=8)

    return draw


def _memory(record: MemoryByK) -> Draw:
    def draw(axes: Axes) -> None:
        base = record.baseline or 1
        axes.plot(record.k, [p / base for p in record.peak], marker="*", markersize=8, color=STYLES["trust"].light)
        axes.set_xlabel("number of orders")
        axes.set_ylabel("relative peak memory")
        axes.set_title(record.title, fontsize=8)

    return draw
