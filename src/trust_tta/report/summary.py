"""A group in sentences: the best method, its margin and cost, the comparison at equal cost, and what is missing."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trust_tta.report.model import Group, Variant
from trust_tta.report.significance import EqualCostPair, difference, equal_time, equal_updates, leaders, ranking
from trust_tta.report.text import counted, domain_name, joined, safe_line, short_number
from trust_tta.results import Aggregate, format_percent

MIN_COST_RATIO = 1.5  # a tie names its cheapest method if the best one costs at least this many times as much


def summarize(group: Group) -> list[str]:
    """Sentences about one group."""
    if not group.cells:
        return [f"Nothing has finished on {group.title} yet.", *_gaps(group)]
    if not group.means():
        return [f"On {group.title} no method has finished every domain yet, so there is no ranking.", *_gaps(group)]
    best = leaders(group)
    return [
        _lead(group, best),
        *_margin(group, best),
        *_domains_lost(group, best),
        *_trust(group, best),
        _cost(group),
        *at_equal_cost(group),
        *_gaps(group),
    ]


def _lead(group: Group, best: Sequence[Variant]) -> str:
    """The best method with its interval, or the methods that tie."""
    first, reached = best[0], group.means()
    over = "on the only domain" if len(group.domains) == 1 else f"averaged over {len(group.domains)} domains"
    on = f"On {safe_line(group.dataset)} ({group.title.removeprefix(f'{safe_line(group.dataset)}, ')})"
    if len(best) == 1:
        entry, verb = group.mean(first.label), "leads with" if len(reached) > 1 else "reaches"
        return f"{on}, {first.name} {verb} {format_percent(entry.mean)} % {group.measure} {over} {_interval(entry)}."
    low, high = (format_percent(f(reached[v.label] for v in best)) for f in (min, max))
    span = f"{high} %" if low == high else f"{low} to {high} %"
    unresolved = [d for d in (difference(group, first, other) for other in best[1:]) if not d.equal_as_shown]
    why = ""
    if unresolved:
        seeds = counted(max(d.seeds.n for d in unresolved), "seed")
        tested = " and a paired test over images" if all(d.images is not None for d in unresolved) else ""
        why = f" (no significant difference: {seeds}{tested})"
    return f"{on}, a tie: {_names(best)} reach {span} {group.measure} {over}{why}{_cheapest(group, best)}."


def _cheapest(group: Group, best: Sequence[Variant]) -> str:
    """ "; bn costs 1/17 of trust": by time if it is known, else by passes."""
    found = {cost.variant.label: cost for cost in group.costs}
    costs = [found[variant.label] for variant in best]
    timed = all(cost.milliseconds for cost in costs)
    spent = {cost.variant.label: (cost.milliseconds or 0.0) if timed else cost.passes for cost in costs}
    least = min(best, key=lambda variant: spent[variant.label])
    times = spent[best[0].label] / spent[least.label] if spent[least.label] else 1.0
    if times < MIN_COST_RATIO:
        return ""
    part = f"1/{times:.0f}" if times >= 2.5 else format_percent(1 / times) + " %"
    return f"; {least.name} costs {part} of {best[0].name}"


def _names(variants: Sequence[Variant]) -> str:
    """Names, the first four of many."""
    names = [variant.name for variant in variants]
    return joined(names) if len(names) <= 5 else joined([*names[:4], f"{len(names) - 4} more"])


def _interval(entry: Aggregate) -> str:
    if entry.half_width is None or entry.mean is None:
        return "(one seed, so no interval)" if entry.n == 1 else "(seeds differ between domains, so no interval)"
    low, high = entry.mean - entry.half_width, entry.mean + entry.half_width
    return f"(95 % interval over {entry.n} seeds: {format_percent(low)} to {format_percent(high)})"


def _margin(group: Group, best: Sequence[Variant]) -> list[str]:
    """The distance to the next method, to bn and to source."""
    reached, first = group.means(), best[0]
    tied = {variant.label for variant in best}
    others = [variant for variant in ranking(group) if variant.label not in tied]
    if not others:
        return []
    second, found = others[0], difference(group, first, others[0])
    sure = f", ± {format_percent(found.seeds.half_width)} paired by seed" if found.seeds.half_width is not None else ""
    if found.images is not None:
        sure += f"; {first.name} alone is right on {counted(found.images.first_only, 'image')}, "
        sure += f"{second.name} alone on {found.images.second_only}, p = {found.images.p:.2g}"
    place = "the second" if len(best) == 1 else "the next"
    parts = [f"{format_percent(found.gain)} points above {second.name} ({place}{sure})"]
    for method in ("bn", "source"):
        variant = group.variant(method)
        if variant is not None and variant.label in reached and variant.label not in {*tied, second.label}:
            parts.append(f"{format_percent(reached[first.label] - reached[variant.label])} above {variant.name}")
    return [f"{'That' if len(best) == 1 else first.name} is {joined(parts)}."]


def _domains_lost(group: Group, best: Sequence[Variant]) -> list[str]:
    """On how many domains the best method is best, and which methods beat it on the others."""
    first, total = best[0], len(group.domains)
    if total < 2 or len(group.means()) < 2:
        return []
    lost = []
    for domain in group.domains:
        found = {v: mean for v in group.variants if (mean := group.entry(v.label, domain).mean) is not None}
        top = max(found, key=lambda variant: found[variant])
        gap = found[top] - found[first]
        if gap > 0 and format_percent(found[top]) != format_percent(found[first]):
            lost.append((gap, f"{top.name} on {domain_name(domain)} (by {format_percent(gap)})"))
    name = "it" if len(best) == 1 else first.name
    if not lost:
        return [f"No other method beats {name} on any of the {total} domains."]
    named = [text for _, text in sorted(lost, key=lambda pair: -pair[0])[:3]]
    named += [f"others on {len(lost) - 3} more"] if len(lost) > 3 else []
    subject = "It" if len(best) == 1 else name
    return [f"{subject} is best on {total - len(lost)} of {total} domains; it is beaten by {joined(named)}."]


def _trust(group: Group, best: Sequence[Variant]) -> list[str]:
    """Sentences on TRUST: its distance from the best method, and its gain over trust_naive."""
    reached, naive = group.means(), group.variant("trust_naive")
    trusts = [variant for variant in ranking(group) if variant.method == "trust"]
    if not trusts:
        return []
    trust, sentences = trusts[0], []
    if trust not in best:
        behind = format_percent(difference(group, best[0], trust).gain)
        sentences.append(f"TRUST does not win here: {trust.name} is {behind} points behind {best[0].name}.")
    if naive is not None and naive.label in reached and best[0].label != naive.label:
        found = difference(group, trust, naive)
        points = format_percent(abs(found.gain))
        change = f"gains {points} points over" if found.gain >= 0 else f"is {points} points below"
        change = "equals" if found.equal_as_shown else change
        doubt = " (a tie)" if found.tie and not found.equal_as_shown else ""
        sentences.append(f"{trust.name} {change} {naive.name}{doubt}, which adapts in the default order only.")
    return sentences


def _cost(group: Group) -> str:
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


def at_equal_cost(group: Group) -> list[str]:
    """TRUST against the best other method that makes as many updates, and against the best one within its time."""
    updates, time = equal_updates(group), equal_time(group)
    sentences = []
    if updates:
        last = updates[-1]
        sentences.append(f"At equal updates ({short_number(last.trust.updates)} per batch) {_verdict(last)}.")
    if len(updates) > 1:
        kinds: dict[str, list[str]] = {"ahead": [], "behind": [], "equal": []}
        for pair in updates:
            word = "equal" if pair.difference.equal_as_shown else "ahead" if pair.difference.gain > 0 else "behind"
            kinds[word].append(short_number(pair.trust.updates))
        parts = [f"{word} at {joined(numbers)}" for word, numbers in kinds.items() if numbers]
        sentences.append(f"By updates per batch, TRUST is {', '.join(parts)}.")
    if time:
        best = max(time, key=lambda pair: pair.trust.accuracy)
        spent = f"{short_number(best.trust.milliseconds or 0.0)} ms per image"
        sentences.append(f"Within TRUST's time budget ({spent}), {_verdict(best)}.")
    return sentences


def missing_comparison(group: Group) -> list[str]:
    """Suggested run if no other method makes as many updates as TRUST."""
    most = max((c.updates for c in group.costs if c.variant.method == "trust"), default=0.0)
    if equal_updates(group) or most == 0 or all(c.variant.method == "trust" for c in group.costs):
        return []
    return [
        f"No other method makes as many updates per batch as TRUST ({short_number(most)}), so there is no comparison "
        f"at equal updates; run trust_naive with steps = {most:.0f} for one."
    ]


def _verdict(pair: EqualCostPair) -> str:
    """ "trust is ahead with 80.0 %, trust_naive has 79.0 %"."""
    found = pair.difference
    costs = (pair.trust, pair.other) if found.equal_as_shown or found.gain >= 0 else (pair.other, pair.trust)
    first, second = (cost.variant.name for cost in costs)
    scores = [f"{format_percent(cost.accuracy)} %" for cost in costs]
    if found.equal_as_shown:
        return f"{first} and {second} both have {scores[0]}"
    if found.tie:
        return f"{first} has {scores[0]}, {second} {scores[1]}: a tie"
    return f"{first} is ahead with {scores[0]}, {second} has {scores[1]}"


def _gaps(group: Group) -> list[str]:
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
