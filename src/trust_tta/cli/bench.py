"""`trust-tta bench`: methods x domains x seeds into a results store."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from trust_tta.cli.common import add_run_arguments, changes, names, option, wait_politely
from trust_tta.errors import CheckpointError, ConfigError, DataError, TrustError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trust_tta.bench.config import RunConfig
    from trust_tta.bench.sweep import Outcome
    from trust_tta.results import Cell

HELP = "run methods on the domains of a data set, resumable, into a results store"
EXAMPLES = """\
  trust-tta bench configs/cifar10c_online.toml --root ~/data
  trust-tta bench configs/cifar10c_online.toml --methods source,tent,trust --seeds 0,1,2 --option trust.k=4
  trust-tta bench --checkpoint net.pth --model vmamba_nano --dataset sample --domains fog,snow --methods bn,trust
  trust-tta bench configs/paper/table1.toml --small     the same experiment on the shipped network and images
  trust-tta bench configs/paper/table1.toml --dataset imagenet-c   one part of a configuration that has several
  trust-tta bench configs/cifar10c_online.toml --device cuda --processes 8   a small network does not fill a GPU
  trust-tta bench configs/demo.toml --list              what would be run, and what is done already
  trust-tta bench configs/demo.toml --export demo.csv   run what is missing, then write one row a cell"""


def add_arguments(parser: ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument("--methods", type=names, metavar="A,B", help="methods, with the configuration's options")
    parser.add_argument(
        "--option", type=option, action="append", default=[], metavar="METHOD.OPTION=VALUE", help="may be repeated"
    )
    parser.add_argument("--small", action="store_true", help="run what the section [small] of the configuration says")
    parser.add_argument("--clean-after", action="store_true", help="measure clean accuracy after each domain")
    parser.add_argument("--keep-samples", type=int, metavar="N", help="keep the predictions of N images of each domain")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="share the cells among N (default 1)")
    parser.add_argument("--retry-failed", action="store_true", help="run cells again that failed before")
    parser.add_argument("--list", action="store_true", help="show the cells and how they stand; run nothing")
    parser.add_argument("--export", metavar="FILE", help="write the cells to a .csv or .parquet file at the end")


def run(arguments: Namespace) -> None:
    wait_politely()
    from trust_tta.bench.parsing import read_parts

    if arguments.export and Path(arguments.export).suffix not in (".csv", ".parquet"):
        raise ConfigError(f"--export {arguments.export}: the file must end in .csv or .parquet")
    if arguments.processes < 1:
        raise ConfigError(f"--processes {arguments.processes}: give 1 or more")
    changed = changes(arguments) | {"method_options": arguments.option}
    if arguments.methods is not None:
        changed["methods"] = arguments.methods
    if arguments.clean_after:
        changed["clean_after"] = True
    if arguments.keep_samples is not None:
        changed["keep_samples"] = arguments.keep_samples
    parts = read_parts(Path(arguments.config) if arguments.config else None, changed, small=arguments.small)
    if arguments.list:
        for config in parts:
            list_cells(config)
        return
    cells, problems = run_parts(parts, retry=arguments.retry_failed, processes=arguments.processes)
    if arguments.export:
        export(cells, Path(arguments.export))
    if problems:
        raise TrustError("; ".join(problems))


def run_parts(parts: Sequence[RunConfig], *, retry: bool = False, processes: int = 1) -> tuple[list[Cell], list[str]]:
    """Run experiments with their tables; all finished cells, and a line for each problem.

    Of several, one that cannot be run (its data or network is missing) does not keep the others from running.
    """
    if processes > 1:
        return _run_at_once(parts, retry=retry, processes=processes)
    cells: list[Cell] = []
    problems: list[str] = []
    for number, config in enumerate(parts, start=1):
        if len(parts) > 1:
            print(f"part {number} of {len(parts)}: {config.data.dataset}, {config.stream.setting}")
        try:
            found, failed = run_cells(config, retry=retry)
        except (CheckpointError, ConfigError, DataError) as error:
            if len(parts) == 1:
                raise
            problems.append(f"{config.data.dataset} was not run: {error}")
            continue
        print_results(config, found)
        cells += found
        problems += _failures(failed)
    return cells, problems


def _run_at_once(parts: Sequence[RunConfig], *, retry: bool, processes: int) -> tuple[list[Cell], list[str]]:
    """The same in several processes; no part waits for the one before."""
    from trust_tta.cli.shared import run_shared

    cells: list[Cell] = []
    outcomes, problems = run_shared(parts, processes=processes, retry=retry)
    for config, outcome in outcomes:
        found = finished_cells(config, outcome)
        print_results(config, found)
        cells += found
        problems += _failures(outcome.failed)
    return cells, problems


def _failures(failed: int) -> list[str]:
    return [f"{failed} cells failed, for the reasons above; mend them and run with --retry-failed"] if failed else []


def run_cells(config: RunConfig, *, retry: bool = False) -> tuple[list[Cell], int]:
    """Run the experiment with a line for each finished cell; its finished cells, and how many failed."""
    from trust_tta.bench.sweep import sweep
    from trust_tta.cli.lines import Lines
    from trust_tta.results import ResultStore

    with ResultStore(config.store) as store, Lines(config, store.results(course=False)) as lines:
        outcome = sweep(config, store, observer=lines, retry=retry)
    return finished_cells(config, outcome), outcome.failed


def finished_cells(config: RunConfig, outcome: Outcome) -> list[Cell]:
    """The finished cells of an experiment; those that failed are printed with their reasons."""
    from trust_tta.report.text import printable
    from trust_tta.results import ResultStore

    digests = {key.digest for key in outcome.keys}
    with ResultStore(config.store, create=False) as store:
        for failure in store.failures(lambda key: key.digest in digests):
            key = failure.key
            where = f"{failure.label} on {key.domain}, seed {key.seed}, batch {key.batch_size}"
            print(printable(f"failed: {where}: {failure.message}"))
        return store.results(lambda key: key.digest in digests, course=False)


def print_results(config: RunConfig, cells: Sequence[Cell]) -> None:
    from trust_tta.cli.printing import result_tables
    from trust_tta.report.text import printable

    for block in result_tables(cells):
        print(printable(f"\n{block}"), end="")
    print(printable(f"\nresults are in {config.store}"))


def export(cells: Sequence[Cell], path: Path) -> None:
    from trust_tta.report.text import printable
    from trust_tta.results import write_csv, write_parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    (write_csv if path.suffix == ".csv" else write_parquet)(cells, path)
    print(printable(f"{len(cells)} cells are in {path}"))


def list_cells(config: RunConfig) -> None:
    """One line for each cell of the plan, with its state in the store."""
    from trust_tta.bench.plan import make_plan
    from trust_tta.bench.sources import DataSource
    from trust_tta.report.text import printable
    from trust_tta.results import ResultStore

    keys = make_plan(config, DataSource(config.data)).keys
    states: dict[str, str] = {}
    if Path(config.store).exists():
        with ResultStore(config.store, create=False) as store:
            states = {key.digest: state for state in ("done", "running", "failed") for key in store.keys(state)}
    for key in keys:
        place = f"{key.dataset}  {key.domain:<18} batch {key.batch_size}  seed {key.seed}"
        print(printable(f"{states.get(key.digest, 'to do'):<8} {key.method:<13} {place}  {key.digest[:12]}"))
    done = sum(states.get(key.digest) == "done" for key in keys)
    print(printable(f"{len(keys)} cells, {done} done, in {config.store}"))
