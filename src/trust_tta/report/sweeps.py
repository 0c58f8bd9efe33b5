"""Mean accuracy over the values of an option, and over batch sizes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trust_tta.errors import ConfigError
from trust_tta.orders import PAPER_ORDERS, ScanOrder
from trust_tta.report.chart import Point, Series
from trust_tta.report.model import ResultGroup, Variant


@dataclass(frozen=True)
class Sweep:
    """The mean accuracy of one method at the values of one option; all other options are the same."""

    method: str
    option: str
    values: tuple[Any, ...]
    variants: tuple[Variant, ...]  # at each value
    series: Series  # over the values, or over their indices if they are not numbers

    @property
    def numeric(self) -> bool:
        return all(_is_number(value) for value in self.values)


@dataclass(frozen=True)
class BatchSizes:
    """Mean accuracy by batch size of groups that differ only in it."""

    title: str
    dataset: str
    domains: int  # averaged in each point
    series: tuple[Series, ...]


def option_sweeps(group: ResultGroup) -> list[Sweep]:
    """For each method, each option that alone distinguishes some of its variants."""
    reached = group.means()
    found: dict[tuple[str, str, str], list[tuple[Any, Variant]]] = defaultdict(list)
    options = {cell.key.options: effective_options(cell.key.option_values) for cell in group.cells}
    for variant in group.variants:
        values = options.get(variant.options)
        if variant.label not in reached or values is None:
            continue
        for name, chosen in values.items():
            rest = str(sorted((n, str(v)) for n, v in values.items() if n != name))
            members = found[variant.method, name, rest]
            if chosen not in [value for value, _ in members]:
                members.append((chosen, variant))
    sweeps = []
    for (method, option, _), members in found.items():
        if len(members) > 1:
            members.sort(key=lambda pair: (0, float(pair[0]), "") if _is_number(pair[0]) else (1, 0.0, str(pair[0])))
            numeric = all(_is_number(value) for value, _ in members)
            points = [mean_point(group, variant, x if numeric else i) for i, (x, variant) in enumerate(members)]
            series = Series(Variant(0, method, method), tuple(points))
            chosen_values, variants = zip(*members, strict=True)
            sweeps.append(Sweep(method, option, chosen_values, variants, series))
    return sweeps


def batch_sizes(groups: Sequence[ResultGroup]) -> list[BatchSizes]:
    """Mean accuracy by batch size, for groups that differ in nothing else."""
    families: dict[str, list[ResultGroup]] = defaultdict(list)
    for group in groups:
        families[group.heading.replace(f", batch {group.batch_size}", "")].append(group)
    found = []
    for title, members in families.items():
        points: dict[str, list[Point]] = defaultdict(list)
        variants: dict[str, Variant] = {}
        for group in sorted(members, key=lambda group: group.batch_size):
            for variant in group.variants:
                if group.mean(variant.label).mean is not None:
                    variants[variant.label] = variant
                    points[variant.label].append(mean_point(group, variant, group.batch_size))
        series = [Series(variants[label], tuple(line)) for label, line in points.items() if len(line) > 1]
        if series:
            found.append(BatchSizes(title, members[0].dataset, len(members[0].domains), tuple(series)))
    return found


def mean_point(group: ResultGroup, variant: Variant, x: float) -> Point:
    """The mean accuracy of a variant over all domains, at `x`."""
    entry = group.mean(variant.label)
    return Point(float(x), math.nan if entry.mean is None else entry.mean, entry.half_width)


def effective_options(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Options with explicit `orders` replaced by their number `k` where they continue the paper's list.

    The paper's six orders and two more are k = 8, its first two are k = 2; any other list stays.
    """
    listed = values.get("orders")
    if not isinstance(listed, list):
        return values
    try:
        orders = [ScanOrder(order) for order in listed]
    except ConfigError:  # a store may come from another program
        return values
    continues = orders[: len(PAPER_ORDERS)] == list(PAPER_ORDERS[: len(orders)])
    return {**values, "k": len(orders), "orders": None if continues else [str(order) for order in orders]}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
