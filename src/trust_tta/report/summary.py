"""The summary of a group in sentences: the best method, its margin and cost, and missing runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trust_tta.report.model import ResultGroup, Variant
from trust_tta.report.significance import difference, leaders, ranking
from trust_tta.report.text import counted, joined, safe_line, short_number
from trust_tta.results import format_percent


def summarize(group: ResultGroup) -> list[str]:
    if not group.cells:
        return [f"Nothing has finished on {group.title} yet.", *_gaps(group)]
    if not group.means():
        return [f"On {group.title} no method has finished every domain yet, so there is no ranking.", *_gaps(group)]
    best = leaders(group)
    sentences = [_lead(group, best), *_margin(group, best)]
    trust = next((variant for variant in ranking(group) if variant.method == "trust"), None)
    if trust is not None and trust not in best:
        behind = format_percent(difference(group, best[0], trust).gain)
        sentences.append(f"TRUST does not win here: {trust.name} is {behind} points behind {best[0].name}.")
    return [*sentences, _cost(group), *_gaps(group)]


def _lead(group: ResultGroup, best: Sequence[Variant]) -> str:
    """The best method with its interval, or the methods that tie."""
    first, reached = best[0], group.means()
    over = "on the only domain" if len(group.domains) == 1 else f"averaged over {len(group.domains)} domains"
    on = f"On {safe_line(group.dataset)} ({group.title.removeprefix(f'{safe_line(group.dataset)}, ')})"
    if len(best) == 1:
        entry, verb = group.mean(first.label), "leads with" if len(reached) > 1 else "reaches"
        interval = "(one seed, so no interval)" if entry.n == 1 else "(seeds differ between domains, so no interval)"
        if entry.half_width is not None and entry.mean is not None:
            low, high = (format_percent(entry.mean + sign * entry.half_width) for sign in (-1, 1))
            interval = f"(95 % interval over {entry.n} seeds: {low} to {high})"
        return f"{on}, {first.name} {verb} {format_percent(entry.mean)} % {group.measure} {over} {interval}."
    low, high = (format_percent(f(reached[v.label] for v in best)) for f in (min, max))
    span = f"{high} %" if low == high else f"{low} to {high} %"
    unresolved = [d for d in (difference(group, first, other) for other in best[1:]) if not d.equal_as_shown]
    why = ""
    if unresolved:
        seeds = counted(max(d.seeds.n for d in unresolved), "seed")
        tested = " and a paired test over images" if all(d.images is not None for d in unresolved) else ""
        why = f" (no significant difference: {seeds}{tested})"
    return f"{on}, a tie: {_names(best)} reach {span} {group.measure} {over}{why}."


def _names(variants: Sequence[Variant]) -> str:
    """Names, the first four of many."""
    names = [variant.name for variant in variants]
    return joined(names) if len(names) <= 5 else joined([*names[:4], f"{len(names) - 4} more"])


def _margin(group: ResultGroup, best: Sequence[Variant]) -> list[str]:
    """The distance to the next method, to bn and to source."""
    reached, first = group.means(), best[0]
    tied = {variant.label for variant in best}
    others = [variant for variant in ranking(group) if variant.label not in tied]
    if not others:
        return []
    second, found = others[0], difference(group, first, others[0])
    evidence = (
        f", ± {format_percent(found.seeds.half_width)} paired by seed" if found.seeds.half_width is not None else ""
    )
    if found.images is not None:
        evidence += f"; {first.name} alone is right on {counted(found.images.first_only, 'image')}, "
        evidence += f"{second.name} alone on {found.images.second_only}, p = {found.images.p:.2g}"
    place = "the second" if len(best) == 1 else "the next"
    parts = [f"{format_percent(found.gain)} points above {second.name} ({place}{evidence})"]
    for method in ("bn", "source"):
        variant = group.variant(method)
        if variant is not None and variant.label in reached and variant.label not in {*tied, second.label}:
            parts.append(f"{format_percent(reached[first.label] - reached[variant.label])} above {variant.name}")
    return [f"{'That' if len(best) == 1 else first.name} is {joined(parts)}."]


def _cost(group: ResultGroup) -> str:
    """Updates, passes and time of the best method, and its time relative to Tent."""
    found = {cost.variant.label: cost for cost in group.costs}
    leader = found[ranking(group)[0].label]
    work = f"{counted(leader.updates, 'update')} and {counted(leader.passes, 'pass')}"
    text = f"{leader.variant.name} makes {work} per batch"
    if leader.milliseconds is not None:
        text += f", {short_number(leader.milliseconds)} ms per image"
        for method in ("tent", "bn", "source"):
            variant = group.variant(method)
            other = found.get(variant.label) if variant is not None else None
            if other is not None and other is not leader and other.milliseconds:
                text += f", {short_number(leader.milliseconds / other.milliseconds)} times {other.variant.name}"
                break
    return f"{text}."


def _gaps(group: ResultGroup) -> list[str]:
    """Failed and missing runs, NaN predictions, and methods without a mean."""
    parts = [f"{counted(len(group.failures), 'run')} failed"] if group.failures else []
    if group.pending:
        parts.append(f"{counted(len(group.pending), 'run')} {'is' if len(group.pending) == 1 else 'are'} missing")
    broken = sum(cell.result.broken > 0 or not math.isfinite(cell.result.accuracy) for cell in group.cells)
    if broken:
        parts.append(f"{counted(broken, 'run')} predicted NaN for some images")
    reached = group.means()
    incomplete = [variant for variant in group.variants if variant.label not in reached]
    if incomplete and len(incomplete) < len(group.variants):
        parts.append(f"no mean, because some domains are missing: {_names(incomplete)}")
    text = "; ".join(parts)
    return [f"{text[0].upper()}{text[1:]}."] if text else []
