"""`trust-tta rank`: the 24 scan orders by the entropy of the predictions they give."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trust_tta.bench.config import RunConfig
from trust_tta.bench.parsing import read_parts
from trust_tta.cli.arguments import add_run_arguments, schema_values, use_passive_threads
from trust_tta.cli.output import ProgressDisplay, say, writable_file, writable_folder
from trust_tta.errors import ConfigError
from trust_tta.report.text import printable
from trust_tta.results.order_records import EntropyByOrder, write_record

EXAMPLES = """\
  trust-tta rank configs/demo.toml --domains fog,snow --limit 128
  trust-tta rank --checkpoint net.pth --model vmamba_nano --dataset cifar10-c --root data --json ranking.json
  trust-tta rank configs/paper/table1.toml --small --json runs/orders    a record for each domain, for a report
  trust-tta rank configs/paper/standard.toml --json runs/orders          a record for each data set
  trust-tta rank configs/cifar10c_online.toml --k 4     then: bench --option 'trust.orders=["abcd", ...]'"""

DEFAULT_LIMIT = 256  # images per domain by default: every batch is passed 24 times
_BAR = 30  # characters
FINE, PLAIN = "░▒▓█", ".:+#"  # from low to high; the second where the terminal lacks the first


def add_arguments(parser: ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument("--k", type=int, default=6, metavar="N", help="how many orders to choose (default 6)")
    records = "write records for `trust-tta report`: FILE.json the mean, a folder one per domain or data set"
    parser.add_argument("--json", metavar="PATH", help=records)


def run(arguments: Namespace) -> None:
    use_passive_threads()
    if not 1 <= arguments.k <= 24:
        raise ConfigError(f"--k {arguments.k}: there are 24 orders, give 1 to 24")
    if arguments.json:
        (writable_file if arguments.json.endswith(".json") else writable_folder)("--json", arguments.json)
    flags = {**schema_values(arguments, RunConfig), "methods": ["source"]}
    parts = read_parts(arguments.config, flags, small=arguments.small)
    if len(parts) > 1 and (arguments.json or "").endswith(".json"):
        names = ", ".join(part.data.dataset for part in parts)
        raise ConfigError(
            f"{arguments.config} has {len(parts)} parts ({names}); choose one with --dataset, or give --json a folder"
        )
    rank(parts, k=arguments.k, out=Path(arguments.json) if arguments.json else None)


def rank(parts: Sequence[RunConfig], *, k: int, out: Path | None) -> None:
    """Print the ranking of each experiment.

    `out` is a JSON file for the mean, or a folder for a record of each domain, or of each of several experiments.
    """
    from trust_tta.bench.experiment import rank_domains

    for config in parts:
        with ProgressDisplay() as progress:
            mean, domains = rank_domains(with_limit(config), k=k, progress=progress)
        shades = FINE if printable(FINE) == FINE else PLAIN
        say(heat_map(mean, domains, shades=shades))
        say(f"the {k} orders of lowest entropy: {', '.join(mean.orders[:k])}")
        if out is None:
            continue
        if out.suffix == ".json":
            write_record(mean, out)
        elif len(parts) > 1:
            dataset = config.data.dataset
            write_record(replace(mean, title=dataset), out / f"orders-{dataset}.json")
        else:
            for record in domains:
                write_record(record, out / f"orders-{record.title}.json")
    if out is not None:
        say(f"the ranking is in {out}")


def with_limit(config: RunConfig) -> RunConfig:
    """The experiment with DEFAULT_LIMIT images per domain, unless it sets a limit."""
    data = config.data
    return config if data.limit is not None else config.changed(data=data.changed(limit=DEFAULT_LIMIT))


def heat_map(mean: EntropyByOrder, domains: Sequence[EntropyByOrder], *, shades: str) -> str:
    """A line for each order: `*` if chosen, its mean entropy, a bar, and a shade for each domain."""
    found = [record.by_order for record in domains]
    values = [value for record in domains for value in record.entropy]
    low, high = min(values), max(values)
    lines = [
        f"{mean.title}: mean entropy in nats",
        f"a shade for each of {', '.join(record.title for record in domains)}: "
        f"{shades[0]} is {low:.3f}, {shades[-1]} is {high:.3f}",
    ]
    for place, (order, entropy) in enumerate(mean.by_order.items()):
        heights = [(by_order[order] - low) / ((high - low) or 1.0) for by_order in found]
        cells = "".join(shades[min(int(height * len(shades)), len(shades) - 1)] for height in heights)
        bar = shades[-1] * round(_BAR * entropy / (max(mean.entropy) or 1.0))
        lines.append(f"{'*' if place < mean.k else ' '} {order}  {entropy:.3f}  {bar:<{_BAR}}  {cells}")
    return "\n".join(lines)
