"""A group in sentences made from its numbers: who leads, by how much, where not, at what cost, and what is missing."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trust_tta.report import budget
from trust_tta.report.budget import Duel
from trust_tta.report.groups import Group
from trust_tta.report.palette import display_name, domain_name
from trust_tta.report.series import Cost, costs, means, row_cells
from trust_tta.results import Aggregate, Table, format_percent


def summarise(group: Group) -> list[str]:
    """Sentences for one group; the winner is whoever it is."""
    if not group.cells:
        return [f"Nothing has finished on {group.title} yet.", *_gaps(group)]
    reached = means(group)
    if not reached:
        return [_one_by_one(group), *_gaps(group)]
    table = group.table()
    return [
        _lead(group, table, reached),
        *_margin(group, reached),
        *_where(group, table, reached),
        *_trust(group, reached),
        *_cost(group, reached),
        *at_equal_cost(group),
        *_gaps(group),
    ]


def seed_means(group: Group, label: str) -> dict[int, float]:
    """The mean over domains of each seed that has them all."""
    seeds: dict[int, dict[str, float]] = {}
    for cell in row_cells(group, label):
        if math.isfinite(cell.result.accuracy):
            seeds.setdefault(cell.key.seed, {})[cell.key.domain] = cell.result.accuracy
    return {s: math.fsum(v.values()) / len(v) for s, v in sorted(seeds.items()) if len(v) == len(group.domains)}


def paired_difference(group: Group, first: str, second: str) -> tuple[float, float | None]:
    """Mean over shared seeds of `first` less `second`, and the half-width of its 95 % t-interval (None below two)."""
    a, b = seed_means(group, first), seed_means(group, second)
    differences = [a[seed] - b[seed] for seed in a.keys() & b.keys()]
    if len(differences) < 2:
        reached = means(group)
        return reached[first] - reached[second], None
    from scipy import special

    n = len(differences)
    mean = math.fsum(differences) / n
    deviation = math.sqrt(math.fsum((d - mean) ** 2 for d in differences) / (n - 1))
    return mean, float(special.stdtrit(n - 1, 0.975)) * deviation / math.sqrt(n)


def _lead(group: Group, table: Table, reached: dict[str, float]) -> str:
    leader = max(reached, key=lambda label: reached[label])
    entry = table.means[table.rows.index(leader)]
    over = "on its only domain" if len(group.domains) == 1 else f"averaged over {len(group.domains)} domains"
    score = f"{format_percent(entry.mean)} % accuracy"
    first = _level_with(leader, reached)
    on = f"On {group.dataset} ({group.title.removeprefix(f'{group.dataset}, ')})"
    if len(first) > 1:
        where = over.replace("its", "the")
        return f"{on}, {_some(first)} share the lead with {score} {where}."
    verb = "leads with" if len(reached) > 1 else "reaches"
    return f"{on}, {display_name(leader)} {verb} {score} {over} {_interval(entry)}."


def _level_with(leader: str, reached: dict[str, float]) -> list[str]:
    """Those whose mean is the leader's, as shown."""
    return [label for label in reached if format_percent(reached[label]) == format_percent(reached[leader])]


def _some(labels: Sequence[str]) -> str:
    """Names, the first four of many."""
    names = [display_name(label) for label in labels]
    return _join(names) if len(names) <= 5 else _join([*names[:4], f"{len(names) - 4} more"])


def _interval(entry: Aggregate) -> str:
    if entry.half_width is None or entry.mean is None:
        return "(one seed, so no interval)" if entry.n == 1 else "(seeds differ between domains, so no interval)"
    low, high = entry.mean - entry.half_width, entry.mean + entry.half_width
    return f"(95 % interval over {entry.n} seeds: {format_percent(low)} to {format_percent(high)})"


def _margin(group: Group, reached: dict[str, float]) -> list[str]:
    """The distance to the second, to the source and to batch statistics."""
    leader, *others = sorted(reached, key=lambda label: -reached[label])
    level = _level_with(leader, reached)
    others = [label for label in others if label not in level]
    if not others:
        return []
    difference, half = paired_difference(group, leader, others[0])
    verdict = ""
    if half is not None:
        doubt = ", so these seeds do not tell the two apart" if abs(difference) <= half else ""
        verdict = f", ± {format_percent(half)} seed by seed{doubt}"
    place = "the second" if len(level) == 1 else "the next"
    parts = [f"{format_percent(difference)} points above {display_name(others[0])} ({place}{verdict})"]
    for method in ("bn", "source"):
        row = group.row(method)
        if row is not None and row.label in reached and row.label not in (*level, others[0]):
            parts.append(f"{format_percent(reached[leader] - reached[row.label])} above {display_name(row.label)}")
    return [f"That is {_join(parts)}."]


def _where(group: Group, table: Table, reached: dict[str, float]) -> list[str]:
    """On how many domains the leader is best, and who beats it where."""
    if len(group.domains) < 2 or len(reached) < 2:
        return []
    leader = max(reached, key=lambda label: reached[label])
    beaten = []
    for j, domain in enumerate(table.columns):
        column = {r: table.cells[i][j].mean for i, r in enumerate(table.rows)}
        found = {r: v for r, v in column.items() if v is not None}
        best = max(found, key=lambda label: found[label])
        gap = found[best] - found[leader]
        if gap > 0 and format_percent(found[best]) != format_percent(found[leader]):
            beaten.append((gap, f"{display_name(best)} on {domain_name(domain)} (by {format_percent(gap)})"))
    total = len(table.columns)
    who = "it" if len(_level_with(leader, reached)) == 1 else display_name(leader)
    if not beaten:
        return [f"No other method beats {who} on any of the {total} domains."]
    named = [text for _, text in sorted(beaten, key=lambda pair: -pair[0])[:3]]
    verb = "is" if len(beaten) == 1 else "are"
    more = f", and on {len(beaten) - 3} more" if len(beaten) > 3 else ""
    where = f"{total - len(beaten)} of {total} domains"
    return [f"{who[0].upper() + who[1:]} is best on {where}; ahead of it {verb} {_join(named)}{more}."]


def _trust(group: Group, reached: dict[str, float]) -> list[str]:
    """Says plainly when TRUST does not win, and whether its orders gain on the naive version."""
    row, naive = group.row("trust"), group.row("trust_naive")
    trusts = [r.label for r in group.rows if r.method == "trust" and r.label in reached]
    if not trusts or row is None:
        return []
    best = max(trusts, key=lambda label: reached[label])
    leader = max(reached, key=lambda label: reached[label])
    sentences = []
    if best not in _level_with(leader, reached):
        behind = format_percent(reached[leader] - reached[best])
        sentences.append(
            f"TRUST does not win here: {display_name(best)} is {behind} points behind {display_name(leader)}."
        )
    if naive is not None and naive.label in reached and leader != naive.label:
        gain = reached[best] - reached[naive.label]
        points = format_percent(abs(gain))
        change = f"{'gains' if gain >= 0 else 'loses'} {points} points on" if points != "0.0" else "is level with"
        adapts = "which adapts in the default order alone"
        sentences.append(f"{display_name(best)} {change} {display_name(naive.label)}, {adapts}.")
    return sentences


def _cost(group: Group, reached: dict[str, float]) -> list[str]:
    found = {cost.row.label: cost for cost in costs(group)}
    leader = found[max(reached, key=lambda label: reached[label])]
    work = f"{_count(leader.updates, 'update')} and {_count(leader.passes, 'pass')}"
    text = f"{display_name(leader.row.label)} makes {work} a batch"
    if leader.milliseconds is not None:
        text += f", {_short(leader.milliseconds)} ms an image"
        for method in ("tent", "bn", "source"):
            row = group.row(method)
            other = found.get(row.label) if row is not None else None
            if other is not None and other is not leader and other.milliseconds:
                text += f", {_short(leader.milliseconds / other.milliseconds)} times {display_name(other.row.label)}"
                break
    return [f"{text}."]


def at_equal_cost(group: Group) -> list[str]:
    """Who is ahead when TRUST and the best other method make as many updates, and when the other takes no more time."""
    found = costs(group)
    updates, time = budget.equal_updates(found), budget.equal_time(found)
    sentences = []
    if updates:
        last = updates[-1]
        sentences.append(f"At equal updates ({_short(last.trust.updates)} a batch) {_verdict(group, last)}.")
    if len(updates) > 1:
        ahead = [_short(d.trust.updates) for d in updates if d.gain > 0 and not d.level]
        behind = [_short(d.trust.updates) for d in updates if d.gain < 0 and not d.level]
        level = [_short(d.trust.updates) for d in updates if d.level]
        parts = [f"{word} at {_join(n)}" for word, n in (("ahead", ahead), ("behind", behind), ("level", level)) if n]
        sentences.append(f"Of the numbers of updates a batch that both have, TRUST is {', '.join(parts)}.")
    if time:
        best = max(time, key=lambda duel: duel.trust.accuracy)
        spent = f"{_short(best.trust.milliseconds or 0.0)} ms an image"
        sentences.append(f"In no more time than {_named(best.trust)} takes ({spent}), {_verdict(group, best)}.")
    return sentences


def not_compared(group: Group) -> list[str]:
    """What to run where TRUST has no counterpart that makes as many updates."""
    found = costs(group)
    most = max((c.updates for c in found if c.row.method == "trust"), default=0.0)
    if budget.equal_updates(found) or most == 0 or all(c.row.method == "trust" for c in found):
        return []
    return [
        f"No other method makes as many updates a batch as TRUST ({_short(most)}), so none is compared with it at "
        f"equal updates; trust_naive with steps = {most:.0f} would be."
    ]


def _verdict(group: Group, duel: Duel) -> str:
    """ "TRUST is ahead with 80.0 %, TRUST naive has 79.0 %"."""
    first, second = (duel.trust, duel.other) if duel.gain >= 0 else (duel.other, duel.trust)
    if duel.level:
        return f"{_named(duel.trust)} and {_named(duel.other)} are level at {format_percent(duel.trust.accuracy)} %"
    half = paired_difference(group, first.row.label, second.row.label)[1]
    doubt = ", though these seeds do not tell the two apart" if half is not None and abs(duel.gain) <= half else ""
    scores = [f"{format_percent(c.accuracy)} %" for c in (first, second)]
    return f"{_named(first)} is ahead with {scores[0]}, {_named(second)} has {scores[1]}{doubt}"


def _named(cost: Cost) -> str:
    return display_name(cost.row.label)


def _gaps(group: Group) -> list[str]:
    parts = []
    if group.failures:
        parts.append(f"{len(group.failures)} {'cell' if len(group.failures) == 1 else 'cells'} failed")
    if group.absent:
        parts.append(f"{len(group.absent)} {'is' if len(group.absent) == 1 else 'are'} still to be run")
    broken = sum(cell.result.broken > 0 or not math.isfinite(cell.result.accuracy) for cell in group.cells)
    if broken:
        parts.append(f"{broken} hold predictions that are not finite")
    incomplete = [display_name(row.label) for row in group.rows if row.label not in means(group)]
    if incomplete and len(incomplete) < len(group.rows):
        few = _join(incomplete[:4]) + (f" and {len(incomplete) - 4} more" if len(incomplete) > 4 else "")
        parts.append(f"without every domain, and so without a mean: {few}")
    return [f"Mind the gaps: {'; '.join(parts)}."] if parts else []


def _one_by_one(group: Group) -> str:
    return (
        f"On {group.title} no method has finished every domain, so none is said to lead; the table shows what there is."
    )


def _count(number: float, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{_short(number)} {noun if _short(number) == '1' else plural}"


def _short(number: float) -> str:
    return f"{number:.0f}" if number >= 100 or abs(number - round(number)) < 0.005 else f"{number:.3g}"


def _join(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
