"""`trust-tta rank`: the 24 traversal orders by the entropy of the predictions they give."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trust_tta.cli.common import add_run_arguments, changes, wait_politely
from trust_tta.cli.progress import Advance, progress
from trust_tta.errors import ConfigError

if TYPE_CHECKING:
    from trust_tta.bench.config import RunConfig
    from trust_tta.bench.ranking import Ranking

HELP = "rank the 24 traversal orders by entropy on given data, by default on 256 images of each domain"
EXAMPLES = """\
  trust-tta rank configs/demo.toml --domains fog,snow --limit 128
  trust-tta rank --checkpoint net.pth --model vmamba_nano --dataset cifar10-c --root data --json ranking.json
  trust-tta rank configs/cifar10c_online.toml --k 4     then: bench --option 'trust.orders=["abcd", ...]'"""

DEFAULT_LIMIT = 256  # images of each domain, where nothing else is said: every batch is passed 24 times
_BAR = 30  # characters
_FINE, _PLAIN = "░▒▓█", ".:+#"  # from low to high


def add_arguments(parser: ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument("--k", type=int, default=6, metavar="N", help="how many orders to choose (default 6)")
    parser.add_argument("--json", metavar="FILE", help="write the ranking as a record that `trust-tta report` draws")


def run(arguments: Namespace) -> None:
    wait_politely()
    from trust_tta.bench.parsing import read_config

    if not 1 <= arguments.k <= 24:
        raise ConfigError(f"--k {arguments.k} is not possible; there are 24 orders, give 1 to 24")
    changed: dict[str, Any] = {**changes(arguments), "methods": ["source"]}
    config = read_config(Path(arguments.config) if arguments.config else None, changed)
    if config.data.limit is None:
        config = replace(config, data=replace(config.data, limit=DEFAULT_LIMIT))
    ranking = _rank(config)
    print(heat_map(ranking, arguments.k, shades=_shades()), end="")
    print(f"the {arguments.k} of lowest entropy: {', '.join(ranking.best(arguments.k))}")
    if arguments.json:
        _write_json(ranking, arguments.k, Path(arguments.json))


def heat_map(ranking: Ranking, k: int, *, shades: str) -> str:
    """A line for each order, ascending: mean entropy, a bar, a shade for each domain; the first `k` are marked."""
    values = [value for domain in ranking.domains.values() for value in domain.values()]
    low, high = min(values), max(values)
    longest = max(ranking.mean.values()) or 1.0
    lines = [
        f"{_title(ranking)}: mean entropy in nats",
        f"a shade for each of {', '.join(ranking.domains)}: {shades[0]} is {low:.3f}, {shades[-1]} is {high:.3f}",
    ]
    for place, (order, mean) in enumerate(ranking.mean.items()):
        cells = "".join(_shade(domain[order], low, high, shades) for domain in ranking.domains.values())
        bar = shades[-1] * round(_BAR * mean / longest)
        lines.append(f"{'*' if place < k else ' '} {order}  {mean:.3f}  {bar:<{_BAR}}  {cells}")
    return "\n".join(lines) + "\n"


def _rank(config: RunConfig) -> Ranking:
    from trust_tta.bench.ranking import rank_domains

    with ExitStack() as stack:
        bar: list[Advance] = []
        return rank_domains(
            config,
            start=lambda batches: bar.append(stack.enter_context(progress(batches, "batches"))),
            beat=lambda: bar[0](),
        )


def _write_json(ranking: Ranking, k: int, path: Path) -> None:
    """One record for `trust-tta report --analyses`: the mean over the domains."""
    from trust_tta.atomic import replacing
    from trust_tta.report.analyses import EntropyByOrder
    from trust_tta.results import to_json

    record = EntropyByOrder(
        title=_title(ranking), orders=tuple(ranking.mean), entropy=tuple(ranking.mean.values()), k=k
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text(to_json(record) + "\n", encoding="utf-8")
    print(f"the ranking is in {path}")


def _title(ranking: Ranking) -> str:
    level = f" at severity {ranking.severity}" if ranking.severity else ""
    return f"{ranking.dataset}{level}, {ranking.images} images"


def _shade(value: float, low: float, high: float, shades: str) -> str:
    share = (value - low) / (high - low) if high > low else 0.0
    return shades[min(int(share * len(shades)), len(shades) - 1)]


def _shades() -> str:
    """Blocks where the terminal's encoding has them."""
    try:
        _FINE.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return _PLAIN
    return _FINE
