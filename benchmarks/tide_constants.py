"""Accuracy lost by halving and by doubling each constant of tide, in several worlds.

    python -m benchmarks.tide_constants run --networks FOLDER --data FOLDER    resumable; runs/tide_constants.sqlite
    python -m benchmarks.tide_constants page                     writes docs/results/tables/tide_constants.md from it

The stream: two corruptions in a row, never reset, then clean images. The corruptions are not those on which the
constants were chosen (speckle noise, gaussian blur, spatter, saturate). Folders and files: `benchmarks/worlds.py`.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from unittest.mock import patch

from benchmarks.worlds import SEPARATOR, WORLDS, fill_folders

from trust_tta.atomic import write_whole
from trust_tta.bench.config import RunConfig
from trust_tta.bench.parsing import parse_config
from trust_tta.cli.cells import run_parts
from trust_tta.methods.tide.constants import TIDE
from trust_tta.methods.tide.method import TideOptions
from trust_tta.results import Cell, ResultStore

PAGE = Path(__file__).parents[1] / "docs" / "results" / "tables" / "tide_constants.md"
STORE = Path("runs/tide_constants.sqlite")
IN_WORLDS = ("shipped_nano", "layernorm_nano", "resnet56", "cifar100_batchnorm")
DOMAINS = ("gaussian_noise", "fog", "clean")
OPTIONS = ("lr", "source_decay")
FACTORS = (0.5, 2.0)
LEFT_OUT = (
    "The one halving or doubling that would be chosen on the other worlds, and what it brings to the one left out."
)


def changes() -> list[tuple[str, str, float]]:
    """Label, constant and factor of each change; the first changes nothing."""
    names = (*OPTIONS, *(field.name for field in fields(TIDE)))
    return [("as it is", "lr", 1.0)] + [(f"{name} x {factor:g}", name, factor) for name in names for factor in FACTORS]


@contextmanager
def changed(name: str, factor: float) -> Iterator[None]:
    """Inside, a constant of tide is `factor` times as large, in all modules that use it."""
    if name in OPTIONS:
        yield
        return
    value = getattr(TIDE, name)
    other = replace(TIDE, **{name: type(value)(value * factor)})
    with ExitStack() as stack:
        for module in [module for module in sys.modules.values() if getattr(module, "TIDE", None) is TIDE]:
            stack.enter_context(patch.object(module, "TIDE", other))
        yield


def experiment(arguments: argparse.Namespace, world: str, label: str, name: str, factor: float) -> RunConfig:
    """The stream of a world, for tide with one constant changed."""
    found = WORLDS[world]
    options = {name: TideOptions.model_fields[name].default * factor} if name in OPTIONS and factor != 1 else {}
    folders = {"networks": arguments.networks, "data": arguments.data}
    table = {
        "experiment": f"{world}{SEPARATOR}{label}",
        "model": fill_folders(found.model, **folders),
        "data": {**fill_folders(found.data, **folders), "domains": list(DOMAINS), "limit": arguments.images},
        "stream": {"setting": "continual", "batch_size": 64, "seeds": [0]},
        "methods": [{"name": "tide", **options}],
        "device": arguments.device,
        "store": str(arguments.store),
    }
    return parse_config(table, name=world, origin=f"the world {world}")


def page_text(cells: Sequence[Cell], remark: str = "") -> str:
    """A table of changes by worlds: differences of the mean accuracy over the domains, in points."""
    found: dict[tuple[str, str], list[float]] = {}
    for cell in cells:
        world, _, label = cell.key.experiment.partition(SEPARATOR)
        found.setdefault((label, world), []).append(100 * cell.result.accuracy)
    means = {place: statistics.mean(values) for place, values in found.items() if len(values) == len(DOMAINS)}
    worlds = [world for world in IN_WORLDS if ("as it is", world) in means]
    base = {world: means["as it is", world] for world in worlds}
    images = max((cell.result.samples for cell in cells), default=1)
    error = 100 * statistics.mean(math.sqrt(b / 100 * (1 - b / 100) / (images * len(DOMAINS))) for b in base.values())
    lines = [
        "# The constants of tide",
        f"*Written by `python -m benchmarks.tide_constants page`.* Accuracy of `tide` in a row of {', '.join(DOMAINS)},"
        f" {images} images each, batches of 64, one seed; and how it changes, in points, when a constant is halved or"
        f" doubled. The standard error of an accuracy is {error:.1f} points; that of a difference is smaller, as the"
        f" images are the same. {remark}".rstrip(),
        f"| | {' | '.join(WORLDS[world].title for world in worlds)} |\n|{' --- |' * (len(worlds) + 1)}\n"
        f"| as it is | {' | '.join(f'{base[world]:.1f}' for world in worlds)} |",
    ]
    for label, *_ in changes()[1:]:
        row = [f"{means[label, world] - base[world]:+.1f}" if (label, world) in means else "–" for world in worlds]
        lines[-1] += f"\n| `{label}` | {' | '.join(row)} |"
    if len(worlds) > 1:
        gains = {place: value - base[place[1]] for place, value in means.items() if place[1] in base}
        lines += ["## Leave one world out", LEFT_OUT, left_out(gains, worlds)]
    return "\n\n".join(lines) + "\n"


def left_out(gains: Mapping[tuple[str, str], float], worlds: Sequence[str]) -> str:
    """A row for each world: the change, by label, that gains most on average in the others, and its gain here."""
    lines = [
        "| world left out | best change in the others | mean gain there | gain here |",
        "| --- | --- | --- | --- |",
    ]
    labels = [label for label, *_ in changes() if all((label, world) in gains for world in worlds)]
    for world in worlds:
        there = {label: statistics.mean(gains[label, other] for other in worlds if other != world) for label in labels}
        best = max(labels, key=lambda label: there[label])
        lines.append(f"| {WORLDS[world].title} | `{best}` | {there[best]:+.1f} | {gains[best, world]:+.1f} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs, page = commands.add_parser("run"), commands.add_parser("page")
    for command in (runs, page):
        command.add_argument("--store", type=Path, default=STORE, metavar="FILE")
    runs.add_argument("--networks", type=Path, default=Path("networks"), metavar="FOLDER")
    runs.add_argument("--data", type=Path, default=Path("data"), metavar="FOLDER")
    runs.add_argument("--worlds", default=",".join(IN_WORLDS), metavar="A,B")
    runs.add_argument("--images", type=int, default=512, metavar="N", help="of each domain (default 512)")
    runs.add_argument("--device", default="auto")
    page.add_argument("--out", type=Path, default=PAGE, metavar="FILE")
    page.add_argument("--remark", default="", metavar="TEXT", help="a sentence after what was measured")
    arguments = parser.parse_args(argv)
    if arguments.command == "run":
        problems: list[str] = []
        for label, name, factor in changes():
            with changed(name, factor):
                parts = [experiment(arguments, world, label, name, factor) for world in arguments.worlds.split(",")]
                problems += run_parts(parts)[1]
        print("\n".join(problems))
        return int(bool(problems))
    with ResultStore(arguments.store, create=False) as store:
        write_whole(arguments.out, page_text(store.results(history=False), arguments.remark))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
