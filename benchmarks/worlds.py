"""The worlds benchmark: every method in worlds x streams. A world is a network and its images.

    python -m benchmarks.worlds run --networks FOLDER --data FOLDER    resumable; results in runs/worlds.sqlite
    python -m benchmarks.worlds page --readme README.md               writes docs/results/worlds.md, .csv and the README
    python -m benchmarks.worlds page --keep docs/results/worlds.csv   the same, with earlier rows of what is not new

A small run: `run --images 384 --seeds 1 --worlds shipped_nano,resnet56 --streams online,mixed --methods source,bn,tide
--corruptions fog,contrast --networks FOLDER`. A world whose network or images are missing is reported and left out.

Images are corrupted as they are read. CIFAR-10: the 2,000 test images in the package. Below the folder of --data:
`cifar100/test_images.npy` (n, 32, 32, 3) and `test_labels.npy`; `imagenet/val_images.npy` (n, 224, 224, 3) and
`val_labels.npy`; PACS and CamVid as `trust-tta data check` wants them. In the folder of --networks: the files that
WORLDS names. `benchmarks/world_networks.py` says where public ones come from, `recipes/` how the others are trained.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from trust_tta.atomic import write_whole
from trust_tta.bench.config import RunConfig
from trust_tta.bench.parsing import parse_config
from trust_tta.bench.processes import run_in_processes
from trust_tta.cli.cells import run_parts
from trust_tta.data.corruptions.table import CORRUPTIONS
from trust_tta.errors import ConfigError
from trust_tta.methods import list_methods
from trust_tta.results import Cell, ResultStore
from trust_tta.results.export import flat_row

PAGE = Path(__file__).parents[1] / "docs" / "results" / "worlds.md"
REPEATED = ("source", "bn", "tide", "shot", "roid")  # methods that run with every seed; the others with the first
NEED_ORDERS = ("trust_naive", "trust", "ensemble", "repetition", "augmentation")
SEGMENTATION_METHODS = ("source", "bn", "tent", "eta", "sar", "shot", "trust_naive", "trust", "tide")
THREE = ("gaussian_noise", "glass_blur", "jpeg_compression")
BEGIN, END = "<!-- worlds -->", "<!-- /worlds -->"  # of the README
SAME_ACCURACY = 0.002  # of one network on the same images, on two devices
SEPARATOR = " / "  # between world and stream in the name of an experiment


@dataclass(frozen=True)
class World:
    """A network and its images; `model` and `data` are tables of a configuration, {networks} and {data} the folders."""

    title: str
    model: Mapping[str, Any]
    data: Mapping[str, str]
    batch_size: int = 128
    limit: int = 1000  # images of each domain
    segmentation: bool = False
    scans: bool = True  # False: no scan orders, so that TRUST and its ablations do not apply
    corrupted: bool = True  # False: the domains are those of the data set, and none of the streams of corruptions apply


@dataclass(frozen=True)
class Stream:
    """A setting of `bench`: `batch_size` None takes the world's, `scale` multiplies its limit."""

    title: str
    setting: str
    batch_size: int | None = None
    scale: float = 1.0
    corruptions: Sequence[str] = CORRUPTIONS  # where none are chosen
    max_corruptions: int | None = None
    clean: str = ""  # "only", or "between" the first and the last corruption

    def domains(self, chosen: Sequence[str]) -> list[str]:
        """The domains of the stream, given the chosen corruptions; all of its own if none are."""
        corruptions = (chosen or self.corruptions)[: self.max_corruptions]
        if self.clean == "only":
            return ["clean"]
        return [corruptions[0], "clean", *corruptions[-1:]] if self.clean else list(corruptions)


CIFAR10 = {"dataset": "sample"}
CIFAR100, IMAGENET = (
    {"dataset": "array", "images": f"{{data}}/{name}_images.npy", "labels": f"{{data}}/{name}_labels.npy"}
    for name in ("cifar100/test", "imagenet/val")
)
NANO100 = {"name": "vmamba_nano", "num_classes": 100, "preprocessing": "cifar32"}
NETWORKS = "benchmarks.world_networks:"
WORLDS = {
    "shipped_nano": World("VMamba nano, BatchNorm, CIFAR-10 (shipped)", {"checkpoint": "vmamba_nano_cifar10"}, CIFAR10),
    "layernorm_nano": World(
        "VMamba nano, LayerNorm, CIFAR-10", {"checkpoint": "{networks}/vmamba_nano_ln_cifar10.safetensors"}, CIFAR10
    ),
    "cifar100_batchnorm": World(
        "VMamba nano, BatchNorm, CIFAR-100", {**NANO100, "checkpoint": "{networks}/nano100.safetensors"}, CIFAR100
    ),
    "cifar100_layernorm": World(
        "VMamba nano, LayerNorm, CIFAR-100",
        {**NANO100, "checkpoint": "{networks}/ln100.safetensors", "overrides": {"norm": "layer"}},
        CIFAR100,
    ),
    "resnet56": World(
        "ResNet-56, CIFAR-10",
        {"name": f"{NETWORKS}resnet56", "overrides": {"file": "{networks}/resnet56_cifar10.th"}},
        CIFAR10,
        scans=False,
    ),
    "efficientnet_lite0": World(
        "EfficientNet-lite0, ImageNet", {"name": f"{NETWORKS}efficientnet_lite0"}, IMAGENET, batch_size=64, scans=False
    ),
    "resnet50": World(
        "ResNet-50, ImageNet",
        {"name": f"{NETWORKS}resnet50", "overrides": {"folder": "{networks}/ResNet50"}},
        IMAGENET,
        batch_size=64,
        limit=500,
        scans=False,
    ),
    "mambavision": World(
        "MambaVision, CIFAR-10 at 64 pixels", {"checkpoint": "{networks}/mambavision_cifar10.safetensors"}, CIFAR10
    ),
    "efficientvmamba": World(
        "EfficientVMamba, CIFAR-10", {"checkpoint": "{networks}/efficientvmamba_cifar10.safetensors"}, CIFAR10
    ),
    "groupmamba": World("GroupMamba, CIFAR-10", {"checkpoint": "{networks}/groupmamba_cifar10.safetensors"}, CIFAR10),
    "pacs": World(
        "VMamba nano, PACS",
        {"checkpoint": "{networks}/pacs_{domain}.safetensors"},
        {"dataset": "pacs", "root": "{data}"},
        corrupted=False,
    ),
    "camvid": World(
        "UPerNet, CamVid",
        {"checkpoint": "upernet_vmamba_nano_camvid"},
        {"dataset": "camvid", "root": "{data}"},
        batch_size=8,
        limit=233,
        segmentation=True,
    ),
}
STREAMS = {
    "online": Stream("reset at each corruption", "online"),
    "row": Stream("in a row, never reset", "continual"),
    "mixed": Stream("all corruptions mixed", "mixed"),
    "runs": Stream("runs of one class", "online+correlated"),
    "batch16": Stream("batches of 16", "online", batch_size=16, corruptions=THREE, max_corruptions=3),
    "batch1": Stream("single images", "online", batch_size=1, scale=0.25, corruptions=THREE, max_corruptions=3),
    "clean": Stream("clean", "online", scale=2.0, clean="only"),
    "interlude": Stream(
        "clean between two corruptions", "continual", corruptions=("gaussian_noise", "fog"), clean="between"
    ),
}


def streams_of(world: World) -> list[str]:
    """The streams that apply to a world."""
    if not world.corrupted:
        return ["online"]
    if world.segmentation:  # images have no single class, and few of them fill no batch of 128
        return ["online", "row", "mixed", "batch1"]
    return list(STREAMS)


def methods_of(world: World) -> list[str]:
    """The methods that apply to a world."""
    if world.segmentation:
        return list(SEGMENTATION_METHODS)
    return [name for name in list_methods() if world.scans or name not in NEED_ORDERS]


def experiments(arguments: argparse.Namespace, name: str) -> list[RunConfig]:
    """The experiments of one world: each stream with all methods and the first seed, then with the other seeds."""
    world = WORLDS[name]
    fill = partial(fill_folders, networks=arguments.networks, data=arguments.data)
    methods = [method for method in methods_of(world) if method in (arguments.methods or methods_of(world))]
    found = []
    for key in streams_of(world):
        stream = STREAMS[key]
        if key not in arguments.streams:
            continue
        domains = {"domains": stream.domains(arguments.corruptions)} if world.corrupted else {}
        limit = max(1, round(min(arguments.images or world.limit, world.limit) * stream.scale))
        for seeds, chosen in (
            ([0], methods),
            (list(range(1, arguments.seeds)), [method for method in REPEATED if method in methods]),
        ):
            if seeds and chosen:
                table = {
                    "experiment": f"{name}{SEPARATOR}{key}",
                    "model": fill(world.model),
                    "data": {**fill(world.data), **domains, "limit": limit},
                    "stream": {
                        "setting": stream.setting,
                        "batch_size": stream.batch_size or world.batch_size,
                        "seeds": seeds,
                    },
                    "methods": chosen,
                    "device": arguments.device,
                    "store": str(arguments.store),
                }
                found.append(parse_config(table, name=name, origin=f"the world {name}"))
    return found


def fill_folders(table: Any, *, networks: Path, data: Path) -> Any:
    """A table with the folders in its strings."""
    if isinstance(table, Mapping):
        return {key: fill_folders(value, networks=networks, data=data) for key, value in table.items()}
    if isinstance(table, str):
        return table.replace("{networks}", str(networks)).replace("{data}", str(data))
    return table


def run(arguments: argparse.Namespace) -> list[str]:
    """Run what is not finished; returns a line for each problem."""
    configs: list[RunConfig] = []
    problems: list[str] = []
    for name in arguments.worlds:
        try:
            configs += experiments(arguments, name)
        except ConfigError as error:  # a package that a network needs is not installed
            problems.append(f"{name} was not run: {error}")
    engine = partial(run_in_processes, processes=arguments.processes) if arguments.processes > 1 else None
    return problems + (run_parts(configs, retry=arguments.retry_failed, engine=engine)[1] if configs else [])


Accuracies = Mapping[str, float]  # by method
Place = tuple[str, str]  # world and stream


class Row(NamedTuple):
    """One cell in the CSV file."""

    experiment: str
    method: str
    domain: str
    seed: int
    batch_size: int
    samples: int
    accuracy: float

    @property
    def place(self) -> Place:
        world, _, stream = self.experiment.partition(SEPARATOR)
        return world, stream


def rows_of(cells: Sequence[Cell]) -> list[Row]:
    """The rows of cells; those of one place must be of the same images, by their fingerprints."""
    images: dict[tuple[str, str, int], set[str]] = defaultdict(set)
    rows = []
    for cell in cells:
        flat = flat_row(cell)
        rows.append(Row(*(flat[name] for name in Row._fields)))
        images[cell.key.experiment, cell.key.domain, cell.key.seed].add(cell.key.fingerprint)
    if several := [experiment for (experiment, *_), prints in images.items() if len(prints) > 1]:
        raise ConfigError(f"{several[0]} was run on different images; give each run a --store of its own")
    return rows


def read_rows(file: Path) -> list[Row]:
    """The rows of a CSV file that `page` wrote."""
    with file.open(encoding="utf-8", newline="") as lines:
        rows = [Row(**row) for row in csv.DictReader(lines)]  # type: ignore[arg-type]
    return [
        r._replace(seed=int(r.seed), batch_size=int(r.batch_size), samples=int(r.samples), accuracy=float(r.accuracy))
        for r in rows
    ]


def kept_rows(earlier: Sequence[Row], rows: Sequence[Row]) -> list[Row]:
    """Those `earlier` rows that `rows` do not replace; all of a place go where the source's accuracy is another now."""
    before, now = (accuracies([row for row in each if row.method == "source"]) for each in (earlier, rows))
    others = {p for p in now if p in before and abs(now[p]["source"] - before[p]["source"]) > SAME_ACCURACY}
    replaced = {(row.experiment, row.method) for row in rows}
    return [row for row in earlier if row.place not in others and (row.experiment, row.method) not in replaced]


def accuracies(rows: Sequence[Row]) -> dict[Place, Accuracies]:
    """Mean accuracy over domains and seeds by place and method; methods that miss a domain are left out.

    All methods of a place must have seen as many images.
    """
    by_place: dict[Place, dict[str, dict[int, dict[str, float]]]] = defaultdict(lambda: defaultdict(dict))
    images: dict[tuple[Place, str], set[int]] = defaultdict(set)
    for row in rows:
        by_place[row.place][row.method].setdefault(row.seed, {})[row.domain] = row.accuracy
        images[row.place, row.domain].add(row.samples)
    if several := [place for (place, _), samples in images.items() if len(samples) > 1]:
        raise ConfigError(f"{', '.join(several[0])} was run on different images; give each run a --store of its own")
    found: dict[Place, Accuracies] = {}
    for place, methods in by_place.items():
        domains = max(len(values) for seeds in methods.values() for values in seeds.values())
        whole = {m: [v for v in seeds.values() if len(v) == domains] for m, seeds in methods.items()}
        found[place] = {
            m: statistics.mean(statistics.mean(v.values()) for v in runs) for m, runs in whole.items() if runs
        }
    return {place: found[place] for place in sorted(found, key=_position)}


def _position(place: Place) -> tuple[int, int]:
    return list(WORLDS).index(place[0]), list(STREAMS).index(place[1])


def page_text(found: Mapping[Place, Accuracies], *, measured: str) -> str:
    """The page: least gains of every method, the gains of tide, and a table of methods by streams for each world.

    `measured`: what the numbers were measured on, one sentence.
    """
    sections = [
        "# Worlds",
        "*Written by `python -m benchmarks.worlds page`.* Accuracy in percent (mean IoU for CamVid), every method"
        " with its defaults, severity 5, means over the domains; corruptions are made by `trust-tta corrupt`, whose"
        f" frost is drawn, not photographed. {measured}",
    ]
    gains = {place: values for place, values in found.items() if "source" in values and len(values) > 1}
    if gains:
        sections += ["## Gains over source, anywhere", _least_gains(gains)]
    tide = {place: _gains_of_tide(values) for place, values in gains.items() if "tide" in values and len(values) > 2}
    if tide:
        least = min(tide, key=lambda place: tide[place][0])
        behind = min(tide, key=lambda place: tide[place][1])
        rows = [f"| {w}, {s} | {100 * a:+.1f} | {100 * b:+.1f} ({n}) |" for (w, s), (a, b, n) in tide.items()]
        sections += [
            "## tide",
            f"Least gain of `tide` over `source`: {100 * tide[least][0]:+.1f} ({', '.join(least)}); over the best"
            f" other method: {100 * tide[behind][1]:+.1f} ({', '.join(behind)}, {tide[behind][2]}).\n\n"
            "| world, stream | tide over source | tide over the best other |\n| --- | --- | --- |\n" + "\n".join(rows),
        ]
    for name, world in WORLDS.items():
        columns = [key for key in streams_of(world) if (name, key) in found]
        if columns:
            sections += [f"## {world.title}", _table([found[name, key] for key in columns], columns)]
    return "\n\n".join(sections) + "\n"


def readme_text(found: Mapping[Place, Accuracies], *, measured: str) -> str:
    """The README's block: the gains and losses of tide in a sentence, and a row for each world."""
    places = {place: v for place, v in found.items() if "source" in v and "tide" in v and len(v) > 2}
    gains = {place: _gains_of_tide(values) for place, values in places.items()}
    least, behind = (min(gains, key=lambda place, i=i: gains[place][i]) for i in (0, 1))  # type: ignore[misc]
    below, ahead = sum(gain[0] < 0 for gain in gains.values()), sum(gain[1] > 0 for gain in gains.values())
    worlds = list(dict.fromkeys(world for world, _ in places))
    columns = [name for name in STREAMS if any((world, name) in places for world in worlds)]
    mean = statistics.mean(gain[0] for gain in gains.values())
    lines = [
        f"`tide` with its defaults in {len(worlds)} worlds, a network and its images each, and {len(places)} streams:"
        f" {100 * mean:+.1f} points over the untouched network on average, below it in {below}, at the least"
        f" {100 * gains[least][0]:+.1f} ({_where(least)}). It is ahead of the best other method in {ahead} of"
        f" {len(places)}; at the least {100 * gains[behind][1]:+.1f}, against `{gains[behind][2]}` ({_where(behind)})."
        f" [Every method](docs/results/worlds.md). {measured}",
        "| accuracy: source, **tide**, best other | "
        + " | ".join(STREAMS[name].title for name in columns)
        + " |\n| --- |"
        + " --- |" * len(columns),
    ]
    for world in worlds:
        cells = []
        for name in columns:
            values = places.get((world, name), {})
            others = [value for method, value in values.items() if method not in ("source", "tide")]
            shown = [
                f"{100 * v:.1f}" for v in (values.get("source"), values.get("tide"), max(others, default=None)) if v
            ]
            cells.append(f"{shown[0]}, **{shown[1]}**, {shown[2]}" if len(shown) == 3 else "–")
        lines[-1] += f"\n| {WORLDS[world].title} | {' | '.join(cells)} |"
    return "\n\n".join(lines)


def _where(place: Place) -> str:
    return f"{WORLDS[place[0]].title}, {STREAMS[place[1]].title}"


def _least_gains(found: Mapping[Place, Accuracies]) -> str:
    """A row for each method: mean gain over source, least gain and its place, and in how many places it lost."""
    lines = ["| | mean gain | least gain | below source |", "| --- | --- | --- | --- |"]
    for method in list_methods():
        gains = {place: v[method] - v["source"] for place, v in found.items() if method in v and method != "source"}
        if gains:
            least = min(gains, key=lambda place: gains[place])
            lost = f"{sum(gain < 0 for gain in gains.values())} of {len(gains)}"
            mean = f"{100 * statistics.mean(gains.values()):+.1f}"
            lines.append(f"| `{method}` | {mean} | {100 * gains[least]:+.1f} ({', '.join(least)}) | {lost} |")
    return "\n".join(lines)


def _gains_of_tide(values: Accuracies) -> tuple[float, float, str]:
    """The gain of tide over source and over the best other method, and that method."""
    best = max((method for method in values if method != "tide"), key=lambda method: values[method])
    return values["tide"] - values["source"], values["tide"] - values[best], best


def _table(columns: Sequence[Accuracies], names: Sequence[str]) -> str:
    """Methods by streams: the accuracy, and the gain over source in parentheses; the best in bold."""
    methods = [method for method in list_methods() if any(method in column for column in columns)]
    lines = [f"| | {' | '.join(STREAMS[name].title for name in names)} |", "| --- |" + " --- |" * len(names)]
    for method in methods:
        lines.append(f"| `{method}` | {' | '.join(_cell(column, method) for column in columns)} |")
    return "\n".join(lines)


def _cell(column: Accuracies, method: str) -> str:
    if method not in column:
        return "–"
    value = f"{100 * column[method]:.1f}"
    shown = f"**{value}**" if column[method] == max(column.values()) else value
    return (
        shown
        if method == "source" or "source" not in column
        else (f"{shown} ({100 * (column[method] - column['source']):+.1f})")
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs, page = commands.add_parser("run"), commands.add_parser("page")
    for command in (runs, page):
        command.add_argument("--worlds", default=",".join(WORLDS), metavar="A,B", help="default: all")
    runs.add_argument("--store", type=Path, default=Path("runs/worlds.sqlite"), metavar="FILE")
    runs.add_argument("--networks", type=Path, default=Path("networks"), metavar="FOLDER")
    runs.add_argument("--data", type=Path, default=Path("data"), metavar="FOLDER")
    runs.add_argument("--streams", default=",".join(STREAMS), metavar="A,B", help="default: all that apply")
    runs.add_argument("--methods", default="", metavar="A,B", help="default: all that apply")
    runs.add_argument("--corruptions", default="", metavar="A,B", help="default: the 15 of each stream")
    runs.add_argument(
        "--images", type=int, metavar="N", help="at most N of each domain (default: 1000, of some worlds less)"
    )
    runs.add_argument(
        "--seeds", type=int, default=2, metavar="N", help=f"of {', '.join(REPEATED)} (default 2); 1 of the others"
    )
    runs.add_argument("--device", default="auto")
    runs.add_argument("--processes", type=int, default=1, metavar="N")
    runs.add_argument("--retry-failed", action="store_true")
    page.add_argument("--store", type=Path, nargs="+", default=[Path("runs/worlds.sqlite")], metavar="FILE")
    page.add_argument("--keep", type=Path, metavar="FILE", help="an earlier CSV file: rows of what is in no store")
    page.add_argument("--out", type=Path, default=PAGE, metavar="FILE")
    page.add_argument("--remark", default="", metavar="TEXT", help="a sentence after what was measured")
    page.add_argument("--readme", type=Path, metavar="FILE", help="also fill the block of worlds in this file")
    arguments = parser.parse_args(argv)
    known = {"worlds": list(WORLDS), "streams": list(STREAMS), "methods": list_methods()}
    for name in ("worlds", "streams", "methods", "corruptions"):
        if hasattr(arguments, name):
            chosen = [part for part in getattr(arguments, name).split(",") if part]
            if unknown := [part for part in chosen if part not in known.get(name, chosen)]:
                parser.error(f"--{name}: there is no {unknown[0]!r}; choose among {', '.join(known[name])}")
            setattr(arguments, name, chosen)
    if arguments.command == "run":
        problems = run(arguments)
        print("\n".join(problems))
        return int(bool(problems))
    cells: list[Cell] = []
    for file in arguments.store:
        with ResultStore(file, create=False) as store:
            cells += store.results(history=False)
    rows = rows_of(cells)
    rows += kept_rows(read_rows(arguments.keep), rows) if arguments.keep else []
    rows = sorted(row for row in rows if row.place[0] in arguments.worlds)
    found, measured = accuracies(rows), f"{_measured(rows, cells)} {arguments.remark}".strip()
    write_whole(arguments.out, page_text(found, measured=measured))
    lines = [Row._fields, *(map(str, row) for row in rows)]
    write_whole(arguments.out.with_suffix(".csv"), "".join(",".join(line) + "\n" for line in lines))
    if arguments.readme is not None:
        before, _, rest = arguments.readme.read_text(encoding="utf-8").partition(BEGIN)
        written = f"{before}{BEGIN}\n{readme_text(found, measured=measured)}\n{END}{rest.partition(END)[2]}"
        write_whole(arguments.readme, written)
    return 0


def _measured(rows: Sequence[Row], cells: Sequence[Cell]) -> str:
    """Images per domain and seeds of the rows, devices and date of the cells that were run last, one sentence."""
    samples = sorted({row.samples for row in rows if row.place[1] != "mixed"})
    seeds = sorted({row.seed for row in rows})
    version = sorted({cell.provenance.trust_tta for cell in cells})
    last = max((cell.provenance.finished for cell in cells), default="")[:10]
    images = f"{samples[0]} to {samples[-1]}" if len(samples) > 1 else f"{samples[0]}" if samples else "no"
    repeated = f"; {', '.join(f'`{name}`' for name in REPEATED)} over {len(seeds)} seeds" if len(seeds) > 1 else ""
    kinds = sorted({row.domain for row in rows} - {"clean"})
    domains = f" ({', '.join(kinds)})" if len(kinds) < len(CORRUPTIONS) else ""
    devices = " and ".join(sorted({cell.provenance.device for cell in cells}))
    return f"{images} images of each domain{domains}{repeated}; on {devices}; trust-tta {', '.join(version)}, {last}."


if __name__ == "__main__":
    raise SystemExit(main())
