"""`trust-tta rank`: the 24 scan orders by the entropy of the predictions they give."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from trust_tta.cli.arguments import add_run_arguments, read_experiments, use_passive_threads
from trust_tta.cli.output import ProgressDisplay, say, try_file, try_folder
from trust_tta.errors import ConfigError

if TYPE_CHECKING:
    from trust_tta.bench.config import RunConfig
    from trust_tta.bench.order_analysis import Ranking

EXAMPLES = """\
  trust-tta rank configs/demo.toml --domains fog,snow --limit 128
  trust-tta rank --checkpoint net.pth --model vmamba_nano --dataset cifar10-c --root data --json ranking.json
  trust-tta rank configs/paper/table1.toml --small --json runs/orders    a record for each domain, for a heat map
  trust-tta rank configs/cifar10c_online.toml --k 4     then: bench --option 'trust.orders=["abcd", ...]'"""

DEFAULT_LIMIT = 256  # images per domain by default: every batch is passed 24 times
_BAR = 30  # characters
_FINE, _PLAIN = "░▒▓█", ".:+#"  # from low to high


def add_arguments(parser: ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument("--k", type=int, default=6, metavar="N", help="how many orders to choose (default 6)")
    parser.add_argument(
        "--json",
        metavar="PATH",
        help="write records for `trust-tta report`: FILE.json the mean, a folder one per domain",
    )


def run(arguments: Namespace) -> None:
    use_passive_threads()
    if not 1 <= arguments.k <= 24:
        raise ConfigError(f"--k {arguments.k}: there are 24 orders, give 1 to 24")
    if arguments.json:
        (try_file if arguments.json.endswith(".json") else try_folder)("--json", arguments.json)
    (config, *others) = read_experiments(arguments, methods=["source"])
    if others:
        names = ", ".join(part.data.dataset for part in (config, *others))
        raise ConfigError(f"{arguments.config} has {len(others) + 1} parts ({names}); choose one with --dataset")
    ranking = rank(config)
    print_ranking(ranking, arguments.k)
    if not arguments.json:
        return
    from trust_tta.results.order_records import write_record

    path = Path(arguments.json)
    if path.suffix == ".json":
        write_record(ranking.mean_record(arguments.k, title=ranking.title), path)
    else:
        for domain, record in ranking.domain_records(arguments.k).items():
            write_record(record, path / f"orders-{domain}.json")
    say(f"the ranking is in {path}")


def rank(config: RunConfig) -> Ranking:
    """Rank the orders on the experiment's data, with progress."""
    from trust_tta.bench.order_analysis import rank_domains

    with ProgressDisplay() as progress:
        return rank_domains(with_limit(config), progress=progress)


def with_limit(config: RunConfig) -> RunConfig:
    """The experiment, on DEFAULT_LIMIT images per domain if it sets no limit itself."""
    data = config.data
    return config if data.limit is not None else config.changed(data=data.changed(limit=DEFAULT_LIMIT))


def print_ranking(ranking: Ranking, k: int) -> None:
    say(heat_map(ranking, k, shades=_shades()).removesuffix("\n"))
    say(f"the {k} of lowest entropy: {', '.join(ranking.best(k))}")


def heat_map(ranking: Ranking, k: int, *, shades: str) -> str:
    """A line for each order, ascending: mean entropy, a bar, a shade for each domain; the first `k` are marked."""
    values = [value for domain in ranking.domains.values() for value in domain.values()]
    low, high = min(values), max(values)
    longest = max(ranking.mean.values()) or 1.0
    lines = [
        f"{ranking.title}: mean entropy in nats",
        f"a shade for each of {', '.join(ranking.domains)}: {shades[0]} is {low:.3f}, {shades[-1]} is {high:.3f}",
    ]
    for place, (order, mean) in enumerate(ranking.mean.items()):
        heights = [(domain[order] - low) / ((high - low) or 1.0) for domain in ranking.domains.values()]
        cells = "".join(shades[min(int(height * len(shades)), len(shades) - 1)] for height in heights)
        bar = shades[-1] * round(_BAR * mean / longest)
        lines.append(f"{'*' if place < k else ' '} {order}  {mean:.3f}  {bar:<{_BAR}}  {cells}")
    return "\n".join(lines) + "\n"


def _shades() -> str:
    """Block characters if the terminal's encoding has them."""
    try:
        _FINE.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return _PLAIN
    return _FINE
