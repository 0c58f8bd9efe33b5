"""`trust-tta paper`: the tables and figures of the TRUST paper, listed or run one after the other."""

from __future__ import annotations

import re
import time
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from pathlib import Path

import trust_tta
from trust_tta.bench.parsing import read_parts
from trust_tta.cli.arguments import use_passive_threads
from trust_tta.cli.output import say
from trust_tta.cli.rank import rank
from trust_tta.errors import ConfigError, TrustError
from trust_tta.report.model import read_report
from trust_tta.report.page import write_page
from trust_tta.results.order_records import read_records
from trust_tta.schema import did_you_mean

EXAMPLES = """\
  trust-tta paper                               list them, and what each needs
  trust-tta paper --run --small                 all of it on the shipped network and images, in minutes on a CPU
  trust-tta paper --run table1 batch_size       two of them at full scale, with your data and networks"""

FOLDER = "configs/paper"
_HEADER = re.compile(r"# (?P<place>[^:\n]+): (?P<about>[^\n]+)\n# (?P<needs>Needs [^\n]+)\n")

RANKED = {"standard": ("Figure 11", "mean entropy of the 24 orders")}  # where the paper also ranks the orders
RANKED_ORDERS = 6


@dataclass(frozen=True)
class PaperExperiment:
    """A configuration of the paper, with the content of its first two lines."""

    path: Path
    place: str
    about: str
    needs: str

    @property
    def name(self) -> str:
        return self.path.stem


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--run", nargs="*", metavar="NAME", help="run the named ones, or all if none is named")
    add("--small", action="store_true", help="run on the shipped network and images")
    add("--root", default="data", metavar="DIR", help="folder that holds the data sets (default: data)")
    add("--configs", metavar="DIR", help="folder of their configurations (default: the shipped ones)")


def run(arguments: Namespace) -> None:
    items = read_items(Path(arguments.configs) if arguments.configs else shipped())
    if arguments.run is None:
        for item in items:
            say(f"{item.name:<20} {item.place}: {item.about}")
            say(f"{'':<20} {item.needs}")
            if item.name in RANKED:
                say("{:<20} with {}: {}".format("", *RANKED[item.name]))
        return
    use_passive_threads()
    known = {item.name: item for item in items}
    if unknown := [name for name in arguments.run if name not in known]:
        raise ConfigError(f"--run {unknown[0]}: there is no such table or figure; {did_you_mean(unknown[0], known)}")
    problems: list[str] = []
    seconds: dict[str, float] = {}
    for item in [known[name] for name in arguments.run or known]:
        say(f"\n{item.name}: {item.place}, {item.about}")
        begun = time.perf_counter()
        found = run_item(item, small=arguments.small, root=arguments.root)
        problems += [f"{item.name}: {problem}" for problem in found]
        seconds[item.name] = time.perf_counter() - begun
    say("\n".join(["", *(f"{name:<24} {taken:7.0f} s" for name, taken in seconds.items())]))
    for problem in problems:
        say(problem)
    if problems:
        raise TrustError(f"{len(problems)} of the tables and figures failed, for the reasons above")


def run_item(item: PaperExperiment, *, small: bool, root: str) -> list[str]:
    """Run a configuration, rank the orders if the paper does, and write the page; returns a line for each problem."""
    from trust_tta.bench.processes import EXPERIMENT_ERRORS
    from trust_tta.cli.cells import run_parts

    try:
        parts = read_parts(item.path, {"data": {"root": root}}, small=small)
        cells, problems = run_parts(parts)
    except EXPERIMENT_ERRORS as error:
        return [str(error)]
    store = Path(parts[0].store)
    records = store.with_name(f"{store.stem}-orders")
    if item.name in RANKED:
        try:
            rank(parts, k=RANKED_ORDERS, out=records)
        except EXPERIMENT_ERRORS as error:
            problems.append(f"{RANKED[item.name][0]}: {error}")
    if cells:
        page = store.with_suffix(".html")
        report = read_report(store, order_records=read_records([records] if records.is_dir() else []))
        write_page(report, page, title=f"{item.place}: {item.about}")
        say(f"report: {page}")
    return problems


def shipped() -> Path:
    """The folder of the paper's configurations: below the working directory, in the package, or in its clone."""
    package = Path(trust_tta.__file__).parent
    places = (Path(FOLDER), package / "assets" / "paper", package.parents[1] / FOLDER)
    return next((place for place in places if place.is_dir()), places[0])


def read_items(folder: Path) -> list[PaperExperiment]:
    """The configurations of a folder in the paper's order: tables, figures, then everything else."""
    items = []
    for path in sorted(folder.glob("*.toml")):
        header = _HEADER.match(path.read_text(encoding="utf-8"))
        if header is None:
            raise ConfigError(f"'{path}' does not begin with '# PLACE: ABOUT' and '# Needs ...'; write these two lines")
        items.append(PaperExperiment(path, **header.groupdict()))
    if not items:
        raise ConfigError(f"no configurations in '{folder}'; give a folder of TOML files with --configs")
    return sorted(items, key=lambda item: place_rank(item.place))


def place_rank(place: str) -> tuple[int, int]:
    kinds = ("Table", "Figure")
    kind = next((i for i, word in enumerate(kinds) if place.startswith(word)), len(kinds))
    number = re.search(r"\d+", place)
    return kind, int(number.group()) if number and kind < len(kinds) else 0
