"""`trust-tta analyse`: what the paper shows besides accuracies, as records that `trust-tta report` draws."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from trust_tta.cli.arguments import add_option_argument, add_run_arguments, read_experiments, use_passive_threads
from trust_tta.cli.output import ProgressDisplay, say, try_folder
from trust_tta.cli.rank import print_ranking, rank, with_limit
from trust_tta.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from trust_tta.bench.config import RunConfig
    from trust_tta.bench.experiment import Experiment
    from trust_tta.data.streams import Domain
    from trust_tta.results.order_records import OrderRecord

KINDS = ("surface", "norms", "memory", "orders")
EXAMPLES = """\
  trust-tta analyse surface configs/paper/table1.toml --small --out runs/analyses
  trust-tta analyse surface configs/paper/table1.toml --small --option trust.mode=replicate --out runs/analyses
  trust-tta analyse norms configs/paper/table1.toml --dataset cifar10-c --domains fog --out runs/analyses
  trust-tta analyse orders configs/paper/table2.toml --out runs/analyses      a row for each data set
  trust-tta report runs/table1-small.sqlite --analyses runs/analyses          draws them"""

POINTS, SMALL_POINTS = 11, 7  # of a loss surface in each direction
ORDERS = 6


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("kind", choices=KINDS, help="surface, norms and memory look at the first domain, orders at all")
    add_run_arguments(parser)
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the records, KIND-DOMAIN.json")
    add_option_argument(parser, method="trust")
    text = f"points of a surface in each direction (default {POINTS}, with --small {SMALL_POINTS})"
    parser.add_argument("--points", type=int, metavar="N", help=text)


def run(arguments: Namespace) -> None:
    use_passive_threads()
    try_folder("--out", arguments.out)
    points = surface_points(small=arguments.small) if arguments.points is None else arguments.points
    if points < 2:
        raise ConfigError(f"--points {arguments.points} make no surface; give 2 or more")
    changed = {} if arguments.config else {"methods": ["trust"]}
    parts = read_experiments(arguments, method_options=arguments.option, **changed)
    analyse(arguments.kind, parts, Path(arguments.out), points=points, every=arguments.domains is not None)


def surface_points(*, small: bool) -> int:
    """The default resolution of a loss surface in each direction."""
    return SMALL_POINTS if small else POINTS


def analyse(
    kind: str, parts: Sequence[RunConfig], out: Path, *, points: int = POINTS, every: bool = False
) -> list[Path]:
    """Write and print the records of one kind, for `every` domain or for the first one."""
    from trust_tta.results.order_records import write_record

    written = []
    for config in parts:
        found = _orders(config, several=len(parts) > 1) if kind == "orders" else _look(kind, config, points, every)
        for name, record in found:
            dataset = f"{config.data.dataset}-" if len(parts) > 1 and kind != "orders" else ""
            written.append(out / f"{kind}-{dataset}{name}.json")
            write_record(record, written[-1])
    say(f"{len(written)} records are in {out}")
    return written


def _orders(config: RunConfig, *, several: bool) -> Iterator[tuple[str, OrderRecord]]:
    """A record for each domain or, if there are several data sets, one for each of them."""
    ranking = rank(config)
    print_ranking(ranking, ORDERS)
    if several:
        yield ranking.dataset, ranking.mean_record(ORDERS, title=ranking.dataset)
    else:
        yield from ranking.domain_records(ORDERS).items()


def _look(kind: str, config: RunConfig, points: int, every: bool) -> Iterator[tuple[str, OrderRecord]]:
    from trust_tta.bench import order_analysis
    from trust_tta.bench.experiment import Experiment

    experiment = Experiment(with_limit(config))
    for domain in experiment.domains if every else experiment.domains[:1]:
        if kind == "surface":
            yield domain.name, _surface(experiment, domain, points)
        elif kind == "norms":
            for which, norms in order_analysis.weight_norms(experiment, domain).items():
                means = zip(norms.names, norms.mean, norms.deviation, strict=True)
                say(f"norms over orders: {norms.title}\n  {'tensor':<44} mean norm  deviation")
                for name, mean, deviation in means:
                    say(f"  {name:<44} {mean:9.4f}  {deviation:9.2e}")
                yield f"{which}-{domain.name}", norms
        else:
            for images in (1, None):  # as the paper measures it, and a whole batch
                memory = order_analysis.memory_by_k(experiment, domain, images=images)
                say(f"peak memory: {memory.title}\n  forward alone  {memory.baseline / 2**20:9.1f} MiB")
                for k, peak in zip(memory.k, memory.peak, strict=True):
                    say(f"  K = {k:<10} {peak / 2**20:9.1f} MiB  {peak / memory.peak[0]:5.2f} x one order")
                yield (f"{domain.name}-one-image" if images else domain.name), memory


def _surface(experiment: Experiment, domain: Domain, points: int) -> OrderRecord:
    from trust_tta.bench.order_analysis import loss_surface

    with ProgressDisplay() as progress:
        record = loss_surface(experiment, domain, points=points, progress=progress)
    say(f"loss on a plane: {record.title}\n  {'network':<8}        x        y     loss")
    for point in (*record.adapted, record.mean):
        say(f"  {point.name:<8} {point.x:8.4f} {point.y:8.4f} {point.loss:8.4f}")
    lowest = min(value for line in record.loss for value in line)
    say(f"  the lowest of {points} x {points} points is {lowest:.4f}")
    return record
