"""`trust-tta bench`: methods x domains x seeds, into a results store."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from trust_tta.bench.config import RunConfig
from trust_tta.bench.parsing import read_parts
from trust_tta.cli.arguments import (
    add_engine_arguments,
    add_run_arguments,
    check_engine,
    make_engine,
    method_option,
    names_list,
    schema_values,
    use_passive_threads,
)
from trust_tta.cli.output import writable_file
from trust_tta.errors import ConfigError, TrustError

EXAMPLES = """\
  trust-tta bench configs/cifar10c_online.toml --root ~/data
  trust-tta bench configs/cifar10c_online.toml --methods source,tent,trust --seeds 0,1,2 --option trust.k=4
  trust-tta bench --checkpoint net.pth --model vmamba_nano --dataset sample --domains fog,snow --methods bn,trust
  trust-tta bench configs/paper/table1.toml --small     the same experiment on the shipped network and images
  trust-tta bench configs/paper/table1.toml --dataset imagenet-c   one part of a configuration that has several
  trust-tta bench configs/cifar10c_online.toml --device cuda --processes 8   a small network does not fill a GPU
  trust-tta bench configs/cifar10c_online.toml --engine ray --address 10.0.0.1:6379    on a Ray cluster
  trust-tta bench configs/demo.toml --list              what would be run, and what is done already
  trust-tta bench configs/demo.toml --export demo.csv   run what is missing, then write one row per cell
  trust-tta bench configs/demo.toml --log tensorboard   send finished cells to a tracker, too"""
KEPT = "finished cells are kept"


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add_run_arguments(parser, results=True)
    add("--methods", type=names_list, metavar="A,B", help="methods to run, with the options of the configuration")
    text = "an option of a method; repeatable"
    add("--option", type=method_option, action="append", default=[], metavar="METHOD.OPTION=VALUE", help=text)
    add("--processes", type=int, metavar="N", help="worker processes (default 1; with --engine ray, all CPUs)")
    add_engine_arguments(parser, task="cell")
    add("--retry-failed", action="store_true", help="run failed cells again")
    add("--list", action="store_true", help="show the cells and their state; run nothing")
    add("--export", metavar="FILE", help="write the cells to a .csv or .parquet file at the end")
    add("--log", choices=("mlflow", "tensorboard", "wandb"), help="send finished cells to this tracker, too")


def run(arguments: Namespace) -> None:
    use_passive_threads()
    check_engine(arguments, "cpus", "gpus")
    if arguments.export:
        if Path(arguments.export).suffix not in (".csv", ".parquet"):
            raise ConfigError(f"--export {arguments.export}: the file must end in .csv or .parquet")
        writable_file("--export", arguments.export)
    flags = {**schema_values(arguments, RunConfig), "method_options": arguments.option}
    parts = read_parts(arguments.config, flags, small=arguments.small)
    if arguments.list:
        from trust_tta.cli.cells import list_cells

        for config in parts:
            list_cells(config)
        return
    for config in parts:
        writable_file("--store", config.store)
    from trust_tta.bench.sweep import finished_cells
    from trust_tta.bench.trackers import log_cells
    from trust_tta.cli.cells import export, run_parts

    with log_cells(arguments.log, parts) as on_note:
        try:
            with make_engine(arguments, device=parts[0].device) as engine:
                cells, problems = run_parts(parts, retry=arguments.retry_failed, engine=engine, on_note=on_note)
        except KeyboardInterrupt:
            if arguments.export:
                export(finished_cells(parts), Path(arguments.export))
            raise
        if arguments.export:
            export(cells, Path(arguments.export))
    if problems:
        raise TrustError("; ".join(problems))
