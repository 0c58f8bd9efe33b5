"""Write docs/results/choose.md, which says which method to take: python -m benchmarks.choose_page

It reads worlds.csv, method_costs_h200.json and rates.csv in docs/results.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.pages import RESULTS, read_record, table
from benchmarks.results_tables import RIGHT, labels, passes_per_batch, read, wrap
from benchmarks.worlds import SEPARATOR, STREAMS, WORLDS

from trust_tta.atomic import write_whole
from trust_tta.methods import list_methods
from trust_tta.results import format_gain, format_percent

PAGE = RESULTS / "choose.md"
SOURCE = "source"
MIN_SHARE = 0.9  # of the pairs of world and stream that a method was run in, for it to be compared


@dataclass(frozen=True)
class Gains:
    """Points over the source by world and stream, of one method."""

    by_place: Mapping[tuple[str, str], float]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.by_place.values())

    @property
    def least(self) -> tuple[float, str]:
        """The smallest gain, and where."""
        world, stream = min(self.by_place, key=lambda place: self.by_place[place])
        return self.by_place[world, stream], f"{WORLDS[world].title}, {STREAMS[stream].title}"

    @property
    def losses(self) -> int:
        return sum(gain < 0 for gain in self.by_place.values())

    def over(self, *, world: str | None = None, stream: str | None = None) -> float | None:
        found = [g for place, g in self.by_place.items() if world in (None, place[0]) and stream in (None, place[1])]
        return statistics.fmean(found) if found else None


def main() -> None:
    write_whole(PAGE, page(RESULTS / "worlds.csv", RESULTS / "method_costs_h200.json"))


def page(worlds: Path, costs: Path) -> str:
    accuracies, measured = read_worlds(worlds)
    gains = gains_of(accuracies)
    passes, times = read_costs(costs)
    places = list(dict.fromkeys(place for values in gains.values() for place in values.by_place))
    streams = [name for name in STREAMS if name in {stream for _, stream in places}]
    networks = [name for name in WORLDS if name in {world for world, _ in places}]
    ranked = sorted(gains, key=lambda method: -gains[method].mean)
    by_stream = ((STREAMS[name].title, {m: gains[m].over(stream=name) for m in ranked}) for name in streams)
    by_world = ((WORLDS[name].title, {m: gains[m].over(world=name) for m in ranked}) for name in networks)
    summary = [_summary(gains[m], m, passes.get(m, "–"), times.get(m, "–")) for m in ranked]
    head = ["", "mean gain", "smallest gain", "where", "below the source in", "passes", "ms"]
    missing = [f"`{name}`" for name in list_methods() if name not in gains and name != SOURCE]
    sections = [
        "# Which method",
        wrap(
            "*Written by `python -m benchmarks.choose_page` from `worlds.csv` and `method_costs_h200.json`.* Measured: "
            f"{len(gains)} methods with their defaults and the untouched network (`source`), in {len(networks)} worlds "
            f"(a network and its images) and {len(streams)} kinds of stream, {measured}. [Worlds](worlds.md) has the "
            "accuracies. Other networks and images may rank the methods differently: `trust-tta bench` on your own "
            "is the [test that counts](../guides/tutorial_cnn.md#2-does-it-need-adaptation)."
        ),
        "## In short",
        "\n".join(f"- {line}" for line in advice(gains, passes)),
        wrap(
            "Gains are points of accuracy over `source`, means over the pairs of world and stream that a method was "
            f"run in, of {len(places)}. Passes per batch count a backward pass twice; ms: for a batch of 128 on "
            "VMamba-T at 224 pixels in bf16 on an H200 ([costs](tables/method_costs.md))."
        ),
        table(head, summary, align=RIGHT),
        "## By stream",
        table(["mean gain over the worlds", *_quoted(ranked)], _lines(by_stream, ranked), align=RIGHT),
        "## By network and images",
        table(["mean gain over the streams", *_quoted(ranked)], _lines(by_world, ranked), align=RIGHT),
        "## What these tables leave out",
        wrap(
            f"Not measured in nine of ten pairs: {', '.join(missing)}. [Methods](../reference/methods.md) says when "
            "they fail."
        ),
        wrap(other_rates()),
    ]
    return "\n\n".join(sections) + "\n"


def read_worlds(path: Path) -> tuple[dict[tuple[str, str], dict[str, float]], str]:
    """Accuracies by world and stream and by method, means over domains and seeds; and how many images and seeds."""
    cells: dict[tuple[str, str], dict[str, dict[int, list[float]]]] = {}
    samples, seeds = set(), set()
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            world, _, stream = row["experiment"].partition(SEPARATOR)
            runs = cells.setdefault((world, stream), {}).setdefault(row["method"], {})
            runs.setdefault(int(row["seed"]), []).append(float(row["accuracy"]))
            seeds.add(int(row["seed"]))
            if STREAMS[stream].setting != "mixed":  # there one cell holds the images of all corruptions
                samples.add(int(row["samples"]))
    found: dict[tuple[str, str], dict[str, float]] = {}
    for place, methods in cells.items():
        domains = max(len(values) for runs in methods.values() for values in runs.values())
        whole = {m: [statistics.fmean(v) for v in runs.values() if len(v) == domains] for m, runs in methods.items()}
        found[place] = {method: statistics.fmean(means) for method, means in whole.items() if means}
    counted = "one seed" if len(seeds) == 1 else f"up to {len(seeds)} seeds"
    return found, f"{min(samples)} to {max(samples)} images of each domain, corruptions of severity 5, {counted}"


def gains_of(accuracies: Mapping[tuple[str, str], Mapping[str, float]]) -> dict[str, Gains]:
    """By method, those that were run nearly wherever the source was."""
    places = {place: values for place, values in accuracies.items() if SOURCE in values}
    found = {
        name: Gains({place: values[name] - values[SOURCE] for place, values in places.items() if name in values})
        for name in list_methods()
        if name != SOURCE
    }
    return {name: gains for name, gains in found.items() if len(gains.by_place) >= MIN_SHARE * len(places)}


def read_costs(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Passes and milliseconds by method."""
    rows = read_record(path.resolve())["rows"]
    passes = {row["method"]: f"{row['forwards'] + 2 * row['backwards']:.3g}" for row in rows if "forwards" in row}
    return passes, {row["method"]: f"{row['ms']:.0f}" for row in rows if not row["failed"]}


def _summary(gains: Gains, method: str, passes: str, ms: str) -> list[str]:
    least, where = gains.least
    lost = f"{gains.losses} of {len(gains.by_place)}"
    return [f"`{method}`", format_gain(gains.mean), format_gain(least), where, lost, passes, ms]


def _quoted(names: Iterable[str]) -> list[str]:
    return [f"`{name}`" for name in names]


def _lines(rows: Iterable[tuple[str, Mapping[str, float | None]]], methods: Iterable[str]) -> list[list[str]]:
    """A line for each title; the largest gain in bold."""
    lines = []
    for title, values in rows:
        most = max(value for value in values.values() if value is not None)
        shown = [(format_gain(v) if v is not None else "–", v == most) for v in (values[m] for m in methods)]
        lines.append([title, *(f"**{text}**" if best else text for text, best in shown)])
    return lines


def advice(gains: Mapping[str, Gains], passes: Mapping[str, str]) -> list[str]:
    """Recommendations that follow from the numbers."""
    first, second = sorted(gains, key=lambda method: -gains[method].mean)[:2]
    places = len(gains[first].by_place)
    ahead = sum(
        gain > max(0.0, *(other.by_place.get(place, 0.0) for name, other in gains.items() if name != first))
        for place, gain in gains[first].by_place.items()
    )
    one_pass = [method for method in gains if passes.get(method) == "1"]
    lines = [
        f"**You do not know what will come:** `{first}`, {format_gain(gains[first].mean)} on average "
        f"(`{second}`: {format_gain(gains[second].mean)}), ahead of the other methods in {ahead} of {places}, below "
        f"the source in {gains[first].losses} (at worst {format_gain(gains[first].least[0])}).",
    ]
    if one_pass:
        shown = (f"`{m}` {format_gain(gains[m].mean)} (at worst {format_gain(gains[m].least[0])})" for m in one_pass)
        lines.append(f"**You can afford one forward pass and no update:** {', '.join(shown)}.")
    single = {method: value.over(stream="batch1") for method, value in gains.items()}
    if losing := [name for name, value in single.items() if value is not None and value < 0]:
        lines.append(
            f"**Your images come one at a time:** {', '.join(_quoted(losing))} lose to the source there, because they "
            'normalize with the statistics of the batch; `statistics="stream"` replaces these.'
        )
    return lines


def other_rates() -> str:
    """The best baseline at a learning rate of its own, on other images."""
    rows = [row for row in read("rates") if row.stream == ("cifar10-c", "online", 128)]
    own = {label: [row for row in rows if row.label == label] for label in labels(rows)}
    means = {label: statistics.fmean(row.accuracy for row in found) for label, found in own.items()}
    best = max(means, key=lambda label: means[label])
    return (
        "The tables above hold for default learning rates. [Other rates](tables/fair.md) were tried on the shipped "
        "network with 1,000 images of each corruption, reset at each: the best is "
        f"`{best}`, {format_percent(means[best])} % at {passes_per_batch(own[best])} passes per batch; the source has "
        f"{format_percent(means[SOURCE])} %, `bn` {format_percent(means['bn'])} %. `tide` was not run on these images."
    )


if __name__ == "__main__":
    main()
