"""The worlds benchmark: every method in worlds x streams. A world is a network and its images.

    python -m benchmarks.worlds config    writes configs/results/worlds.toml from the tables below
    trust-tta bench configs/results/worlds.toml --device cuda --processes 12
    python -m benchmarks.worlds page      writes docs/results/worlds.md from runs/worlds.sqlite

`--worlds layernorm_nano,resnet56` limits either to some worlds. Images are arrays below `data`: CIFAR-10 as
`trust-tta data get cifar10` leaves it, CIFAR-100 and ImageNet's validation images as `data/worlds/NAME/test_images.npy`
(n, h, w, 3) and `test_labels.npy`; they are corrupted as they are read. `benchmarks/world_networks.py` says where the
public networks come from, `recipes/` how the others are trained.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trust_tta.atomic import write_whole
from trust_tta.methods import list_methods
from trust_tta.results import Cell, ResultStore

ROOT = Path(__file__).parents[1]
CONFIG, PAGE = ROOT / "configs" / "results" / "worlds.toml", ROOT / "docs" / "results" / "worlds.md"
STORE = "runs/worlds.sqlite"
REPEATED = ("source", "bn", "tide", "shot", "roid")  # methods with a second seed
NEED_ORDERS = ("trust_naive", "trust", "ensemble", "repetition", "augmentation")
SEGMENTATION_METHODS = ("source", "bn", "tent", "eta", "sar", "shot", "trust_naive", "trust", "tide")
THREE = ("gaussian_noise", "glass_blur", "jpeg_compression")
SEPARATOR = " / "  # between world and stream in the name of an experiment


@dataclass(frozen=True)
class World:
    """A network and its images; `model` and `data` are TOML tables."""

    title: str
    model: str
    data: str
    batch_size: int = 128
    limit: int = 1000  # images of each domain
    segmentation: bool = False
    scans: bool = True  # False: no scan orders, so that TRUST and its ablations do not apply
    corrupted: bool = True  # False: the domains are those of the data set, and none of the streams of corruptions apply


@dataclass(frozen=True)
class Stream:
    """A setting of `bench`: `size` None takes the world's batch size, `share` scales its limit."""

    title: str
    setting: str
    size: int | None = None
    domains: tuple[str, ...] = ()
    share: float = 1.0


def _array(folder: str) -> str:
    return f'dataset = "array", images = "{folder}/test_images.npy", labels = "{folder}/test_labels.npy"'


CIFAR10, CIFAR100, IMAGENET = _array("data/cifar10"), _array("data/worlds/cifar100"), _array("data/worlds/imagenet")
WORLDS = {
    "shipped_nano": World("VMamba nano, BatchNorm, CIFAR-10 (shipped)", 'checkpoint = "vmamba_nano_cifar10"', CIFAR10),
    "layernorm_nano": World(
        "VMamba nano, LayerNorm, CIFAR-10", 'checkpoint = "data/worlds/vmamba_nano_ln_cifar10.safetensors"', CIFAR10
    ),
    "cifar100_batchnorm": World(
        "VMamba nano, BatchNorm, CIFAR-100", 'checkpoint = "runs/nano_cifar100/model.safetensors"', CIFAR100
    ),
    "cifar100_layernorm": World(
        "VMamba nano, LayerNorm, CIFAR-100", 'checkpoint = "runs/nano_ln_cifar100/model.safetensors"', CIFAR100
    ),
    "resnet56": World(
        "ResNet-56, CIFAR-10", 'name = "benchmarks.world_networks:resnet56"', CIFAR10, scans=False
    ),
    "efficientnet_lite0": World(
        "EfficientNet-lite0, ImageNet", 'name = "benchmarks.world_networks:efficientnet_lite0"', IMAGENET,
        batch_size=64, scans=False,
    ),
    "resnet50": World(
        "ResNet-50, ImageNet", 'name = "benchmarks.world_networks:resnet50"', IMAGENET,
        batch_size=64, limit=500, scans=False,
    ),
    "groupmamba": World("GroupMamba, CIFAR-10", 'checkpoint = "runs/groupmamba_cifar10/model.safetensors"', CIFAR10),
    "pacs": World(
        "VMamba nano, PACS", 'checkpoint = "runs/pacs_{domain}/model.safetensors"', 'dataset = "pacs"', corrupted=False
    ),
    "camvid": World(
        "UPerNet, CamVid", 'checkpoint = "upernet_vmamba_nano_camvid"', 'dataset = "camvid"', batch_size=8, limit=233,
        segmentation=True,
    ),
}  # fmt: skip
STREAMS = {
    "online": Stream("reset at each corruption", "online"),
    "row": Stream("in a row, never reset", "continual"),
    "mixed": Stream("all corruptions mixed", "mixed"),
    "runs": Stream("runs of one class", "online+correlated"),
    "batch16": Stream("batches of 16", "online", size=16, domains=THREE),
    "batch1": Stream("single images", "online", size=1, domains=THREE, share=0.25),
    "clean": Stream("clean", "online", domains=("clean",), share=2.0),
    "interlude": Stream("clean between two corruptions", "continual", domains=("gaussian_noise", "clean", "fog")),
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


def config_text(worlds: Sequence[str]) -> str:
    """The TOML file of the benchmark."""
    lines = [
        "# Written by `python -m benchmarks.worlds config`: methods with their defaults in worlds x streams.",
        "# The module says where networks and images come from.",
        f'store = "{STORE}"',
    ]
    for name in worlds:
        world = WORLDS[name]
        lines += ["", f"# {world.title}"]
        for key in streams_of(world):
            stream = STREAMS[key]
            domains = f", domains = {list(stream.domains)}".replace("'", '"') if stream.domains else ""
            size, limit = stream.size or world.batch_size, round(world.limit * stream.share)
            methods = methods_of(world)
            for seed, chosen in ((0, methods), (1, [name for name in REPEATED if name in methods])):
                lines += [
                    "[[parts]]",
                    f'experiment = "{name}{SEPARATOR}{key}"',
                    f"model = {{ {world.model} }}",
                    f"data = {{ {world.data}{domains}, limit = {limit} }}",
                    f'stream = {{ setting = "{stream.setting}", batch_size = {size}, seeds = [{seed}] }}',
                    f"methods = {chosen}".replace("'", '"'),
                ]
    return "\n".join(lines) + "\n"


Accuracies = Mapping[str, float]  # by method


def accuracies(cells: Sequence[Cell]) -> dict[tuple[str, str], Accuracies]:
    """Mean accuracy over domains and seeds by (world, stream) and method; methods that miss a domain are left out."""
    by_place: dict[tuple[str, str], dict[str, dict[int, dict[str, float]]]] = defaultdict(lambda: defaultdict(dict))
    for cell in cells:
        world, _, stream = cell.key.experiment.partition(SEPARATOR)
        by_place[world, stream][cell.key.method].setdefault(cell.key.seed, {})[cell.key.domain] = cell.result.accuracy
    found: dict[tuple[str, str], Accuracies] = {}
    for place, methods in by_place.items():
        domains = max(len(values) for seeds in methods.values() for values in seeds.values())
        whole = {m: [v for v in seeds.values() if len(v) == domains] for m, seeds in methods.items()}
        found[place] = {
            m: statistics.mean(statistics.mean(v.values()) for v in runs) for m, runs in whole.items() if runs
        }
    return found


def page_text(found: Mapping[tuple[str, str], Accuracies]) -> str:
    """The page: a summary of tide's gains, then a table of methods by streams for each world."""
    gains = {place: _gains(values) for place, values in found.items() if {"source", "tide"} <= values.keys()}
    sections = [
        "# Worlds",
        "*Written by `python -m benchmarks.worlds page`.* Accuracy in percent (mean IoU for CamVid), every method"
        " with its defaults, severity 5; corruptions are made by `trust-tta corrupt`, whose frost is drawn, not"
        " photographed. Means over the domains; `source`, `bn`, `tide`, `shot` and `roid` over two seeds.",
    ]
    if gains:
        least = min(gains, key=lambda place: gains[place][0])
        behind = min(gains, key=lambda place: gains[place][1])
        rows = [f"| {w}, {s} | {100 * a:+.1f} | {100 * b:+.1f} ({n}) |" for (w, s), (a, b, n) in gains.items()]
        sections.append(
            f"Least gain of `tide` over `source`: {100 * gains[least][0]:+.1f} ({', '.join(least)}); over the best"
            f" other method: {100 * gains[behind][1]:+.1f} ({', '.join(behind)}, {gains[behind][2]}).\n\n"
            "| world, stream | tide over source | tide over the best other |\n| --- | --- | --- |\n" + "\n".join(rows)
        )
    for name, world in WORLDS.items():
        columns = [key for key in streams_of(world) if (name, key) in found]
        if columns:
            sections += [f"## {world.title}", _table([found[name, key] for key in columns], columns)]
    return "\n\n".join(sections) + "\n"


def _gains(values: Accuracies) -> tuple[float, float, str]:
    """The gain of tide over source and over the best other method, and that method."""
    best = max((method for method in values if method != "tide"), key=lambda method: values[method])
    return values["tide"] - values["source"], values["tide"] - values[best], best


def _table(columns: Sequence[Accuracies], names: Sequence[str]) -> str:
    methods = [method for method in list_methods() if any(method in column for column in columns)]
    best = [max(column.values()) for column in columns]
    lines = [f"| | {' | '.join(STREAMS[name].title for name in names)} |", "| --- |" + " --- |" * len(names)]
    for method in methods:
        cells = [_percent(column.get(method), top) for column, top in zip(columns, best, strict=True)]
        lines.append(f"| `{method}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _percent(value: float | None, best: float) -> str:
    if value is None:
        return "–"
    return f"**{100 * value:.1f}**" if value == best else f"{100 * value:.1f}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("config", "page"))
    parser.add_argument("--worlds", default=",".join(WORLDS), metavar="NAMES")
    parser.add_argument("--store", type=Path, default=ROOT / STORE, metavar="FILE")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"default: {CONFIG.name} or {PAGE.name}")
    arguments = parser.parse_args(argv)
    worlds = arguments.worlds.split(",")
    if unknown := sorted(set(worlds) - WORLDS.keys()):
        parser.error(f"no world {unknown[0]!r}; choose among {', '.join(WORLDS)}")
    if arguments.what == "config":
        write_whole(arguments.out or CONFIG, config_text(worlds))
        return
    with ResultStore(arguments.store, create=False) as store:
        cells = [cell for cell in store.results(history=False) if cell.key.experiment.partition(SEPARATOR)[0] in worlds]
    write_whole(arguments.out or PAGE, page_text(accuracies(cells)))


if __name__ == "__main__":
    main()
