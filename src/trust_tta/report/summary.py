"""A group in sentences made from its numbers: who leads, by how much, where not, at what cost, and what is missing."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trust_tta.report.model import Group, Variant
from trust_tta.report.significance import Difference, Duel, difference, equal_time, equal_updates, leaders, ranking
from trust_tta.report.text import counted, domain_name, joined, safe_line, short_number
from trust_tta.results import Aggregate, format_percent

CHEAPER = 1.5  # a tie mentions its cheapest line if the leader costs this many times as much


def summarize(group: Group) -> list[str]:
    """Sentences for one group; the winner is whoever it is."""
    if not group.cells:
        return [f"Nothing has finished on {group.title} yet.", *_gaps(group)]
    if not group.means():
        said = "no method has finished every domain, so none is said to lead; the table shows what there is"
        return [f"On {group.title} {said}.", *_gaps(group)]
    first = leaders(group)
    return [
        _lead(group, first),
        *_margin(group, first),
        *_where(group, first),
        *_trust(group, first),
        *_cost(group),
        *at_equal_cost(group),
        *_gaps(group),
    ]


def _lead(group: Group, first: Sequence[Variant]) -> str:
    """Who leads, or that several are level; then what the cheapest of these costs."""
    best, reached = first[0], group.means()
    over = "on the only domain" if len(group.domains) == 1 else f"averaged over {len(group.domains)} domains"
    on = f"On {safe_line(group.dataset)} ({group.title.removeprefix(f'{safe_line(group.dataset)}, ')})"
    what = "mean IoU" if group.is_segmentation else "accuracy"
    if len(first) == 1:
        entry, verb = group.mean(best.label), "leads with" if len(reached) > 1 else "reaches"
        return f"{on}, {best.name} {verb} {format_percent(entry.mean)} % {what} {over} {_interval(entry)}."
    low, high = (format_percent(f(reached[v.label] for v in first)) for f in (min, max))
    span = f"{high} %" if low == high else f"{low} to {high} %"
    untold = [d for d in (difference(group, best, other) for other in first[1:]) if not d.level]
    why = f", which {_evidence(untold)} not tell apart" if untold else ""
    return f"{on}, a tie: {_some(first)} reach {span} {what} {over}{why}{_cheapest(group, first)}."


def _evidence(untold: Sequence[Difference]) -> str:
    seeds = max(d.seeds.n for d in untold)
    if all(d.images is not None for d in untold):
        return f"{counted(seeds, 'seed')} and a paired test over images do"
    return "one seed does" if seeds == 1 else f"{seeds} seeds do"


def _cheapest(group: Group, first: Sequence[Variant]) -> str:
    """ "; bn costs 1/17 of trust": by time where it is known, else by passes."""
    found = {cost.variant.label: cost for cost in group.costs}
    costs = [found[variant.label] for variant in first]
    timed = all(cost.milliseconds for cost in costs)
    spent = {cost.variant.label: (cost.milliseconds or 0.0) if timed else cost.passes for cost in costs}
    least = min(first, key=lambda variant: spent[variant.label])
    times = spent[first[0].label] / spent[least.label] if spent[least.label] else 1.0
    if times < CHEAPER:
        return ""
    part = f"1/{times:.0f}" if times >= 2.5 else format_percent(1 / times) + " %"
    return f"; {least.name} costs {part} of {first[0].name}"


def _some(variants: Sequence[Variant]) -> str:
    """Names, the first four of many."""
    names = [variant.name for variant in variants]
    return joined(names) if len(names) <= 5 else joined([*names[:4], f"{len(names) - 4} more"])


def _interval(entry: Aggregate) -> str:
    if entry.half_width is None or entry.mean is None:
        return "(one seed, so no interval)" if entry.n == 1 else "(seeds differ between domains, so no interval)"
    low, high = entry.mean - entry.half_width, entry.mean + entry.half_width
    return f"(95 % interval over {entry.n} seeds: {format_percent(low)} to {format_percent(high)})"


def _margin(group: Group, first: Sequence[Variant]) -> list[str]:
    """The distance to the next, to the source and to batch statistics."""
    reached, best = group.means(), first[0]
    level = {variant.label for variant in first}
    others = [variant for variant in ranking(group) if variant.label not in level]
    if not others:
        return []
    found = difference(group, best, others[0])
    sure = f", ± {format_percent(found.seeds.half_width)} seed by seed" if found.seeds.half_width is not None else ""
    if found.images is not None:
        sure += f"; {found.images.first_only} images only {best.name} has right, "
        sure += f"{found.images.second_only} only the other, p = {found.images.p:.2g}"
    place = "the second" if len(first) == 1 else "the next"
    parts = [f"{format_percent(found.gain)} points above {others[0].name} ({place}{sure})"]
    for method in ("bn", "source"):
        variant = group.variant(method)
        if variant is not None and variant.label in reached and variant.label not in {*level, others[0].label}:
            parts.append(f"{format_percent(reached[best.label] - reached[variant.label])} above {variant.name}")
    return [f"{'That' if len(first) == 1 else best.name} is {joined(parts)}."]


def _where(group: Group, first: Sequence[Variant]) -> list[str]:
    """On how many domains the leader is best, and who beats it where."""
    best, total = first[0], len(group.domains)
    if total < 2 or len(group.means()) < 2:
        return []
    beaten = []
    for domain in group.domains:
        found = {v: mean for v in group.variants if (mean := group.entry(v.label, domain).mean) is not None}
        top = max(found, key=lambda variant: found[variant])
        gap = found[top] - found[best]
        if gap > 0 and format_percent(found[top]) != format_percent(found[best]):
            beaten.append((gap, f"{top.name} on {domain_name(domain)} (by {format_percent(gap)})"))
    who = "it" if len(first) == 1 else best.name
    if not beaten:
        return [f"No other method beats {who} on any of the {total} domains."]
    named = [text for _, text in sorted(beaten, key=lambda pair: -pair[0])[:3]]
    verb = "is" if len(beaten) == 1 else "are"
    more = f", and on {len(beaten) - 3} more" if len(beaten) > 3 else ""
    start = "It" if who == "it" else who
    return [f"{start} is best on {total - len(beaten)} of {total} domains; ahead of it {verb} {joined(named)}{more}."]


def _trust(group: Group, first: Sequence[Variant]) -> list[str]:
    """Say plainly when TRUST does not win, and whether its orders gain over the naive version."""
    reached, naive = group.means(), group.variant("trust_naive")
    trusts = [variant for variant in ranking(group) if variant.method == "trust"]
    if not trusts:
        return []
    best, sentences = trusts[0], []
    if best not in first:
        behind = format_percent(difference(group, first[0], best).gain)
        sentences.append(f"TRUST does not win here: {best.name} is {behind} points behind {first[0].name}.")
    if naive is not None and naive.label in reached and first[0].label != naive.label:
        found = difference(group, best, naive)
        points = format_percent(abs(found.gain))
        change = f"{'gains' if found.gain >= 0 else 'loses'} {points} points on" if not found.level else "is level with"
        doubt = " (a tie)" if found.tie and not found.level else ""
        sentences.append(f"{best.name} {change} {naive.name}{doubt}, which adapts in the default order alone.")
    return sentences


def _cost(group: Group) -> list[str]:
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
    return [f"{text}."]


def at_equal_cost(group: Group) -> list[str]:
    """Who is ahead when TRUST and the best other method make as many updates, and when the other takes no more time."""
    updates, time = equal_updates(group), equal_time(group)
    sentences = []
    if updates:
        last = updates[-1]
        sentences.append(f"At equal updates ({short_number(last.trust.updates)} per batch) {_verdict(last)}.")
    if len(updates) > 1:
        kinds: dict[str, list[str]] = {"ahead": [], "behind": [], "level": []}
        for duel in updates:
            word = "level" if duel.difference.level else "ahead" if duel.difference.gain > 0 else "behind"
            kinds[word].append(short_number(duel.trust.updates))
        parts = [f"{word} at {joined(numbers)}" for word, numbers in kinds.items() if numbers]
        sentences.append(f"Of the numbers of updates per batch that both have, TRUST is {', '.join(parts)}.")
    if time:
        best = max(time, key=lambda duel: duel.trust.accuracy)
        spent = f"{short_number(best.trust.milliseconds or 0.0)} ms per image"
        sentences.append(f"In no more time than {best.trust.variant.name} takes ({spent}), {_verdict(best)}.")
    return sentences


def not_compared(group: Group) -> list[str]:
    """What to run where TRUST has no counterpart that makes as many updates."""
    most = max((c.updates for c in group.costs if c.variant.method == "trust"), default=0.0)
    if equal_updates(group) or most == 0 or all(c.variant.method == "trust" for c in group.costs):
        return []
    return [
        f"No other method makes as many updates per batch as TRUST ({short_number(most)}), so none is compared with it "
        f"at equal updates; trust_naive with steps = {most:.0f} would be."
    ]


def _verdict(duel: Duel) -> str:
    """ "trust is ahead with 80.0 %, trust_naive has 79.0 %"."""
    found = duel.difference
    costs = (duel.trust, duel.other) if found.level or found.gain >= 0 else (duel.other, duel.trust)
    first, second = (cost.variant.name for cost in costs)
    scores = [f"{format_percent(cost.accuracy)} %" for cost in costs]
    if found.level:
        return f"{first} and {second} are level at {scores[0]}"
    if found.tie:
        return f"{first} has {scores[0]}, {second} {scores[1]}: a tie"
    return f"{first} is ahead with {scores[0]}, {second} has {scores[1]}"


def _gaps(group: Group) -> list[str]:
    parts = []
    if group.failures:
        parts.append(f"{counted(len(group.failures), 'cell')} failed")
    if group.absent:
        parts.append(f"{len(group.absent)} {'is' if len(group.absent) == 1 else 'are'} still to be run")
    broken = sum(cell.result.broken > 0 or not math.isfinite(cell.result.accuracy) for cell in group.cells)
    if broken:
        parts.append(f"{broken} hold predictions that are not finite")
    reached = group.means()
    incomplete = [variant for variant in group.variants if variant.label not in reached]
    if incomplete and len(incomplete) < len(group.variants):
        parts.append(f"without every domain, and so without a mean: {_some(incomplete)}")
    return [f"Mind the gaps: {'; '.join(parts)}."] if parts else []
