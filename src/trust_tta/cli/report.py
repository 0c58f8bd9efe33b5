"""`trust-tta report`: tables, figures and one self-contained page from a results store."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from trust_tta.cli.arguments import names_list
from trust_tta.cli.output import say, writable_file, writable_folder
from trust_tta.report.figures import write_figures
from trust_tta.report.formats import tables_text, write_tables
from trust_tta.report.model import read_report
from trust_tta.report.page import write_page
from trust_tta.report.summary import summarize
from trust_tta.results.order_records import read_records

EXAMPLES = """\
  trust-tta report runs/demo.sqlite                       write runs/demo.html and print the tables
  trust-tta report runs/demo.sqlite --out page.html --title "My network on CIFAR-10-C"
  trust-tta report runs/demo.sqlite --figures figures/    also PDF and SVG figures for a paper
  trust-tta report runs/demo.sqlite --tables tables/      also each table as CSV, Markdown and LaTeX
  trust-tta report runs/demo.sqlite --methods bn,tent,trust --domains fog,snow    only these
  trust-tta report runs/demo.sqlite --analyses rank.json  also what `trust-tta rank --json` found"""

FILTERS = {
    "experiments": "experiment",
    "datasets": "dataset",
    "settings": "setting",
    "batch-sizes": "batch_size",
    "methods": "method",
    "domains": "domain",
}  # flags and the field of a run that they select by


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("store", metavar="STORE", help="the results store that a benchmark wrote")
    add("--out", metavar="FILE", help="the page (default: the store's name with .html)")
    add("--title", metavar="TEXT", help="the page's title")
    add("--figures", metavar="DIR", help="draw PDF and SVG figures there (needs the extra 'figures')")
    add("--tables", metavar="DIR", help="write each table there as CSV, Markdown and LaTeX")
    add("--analyses", metavar="PATH", nargs="+", default=[], help="JSON files or folders that `trust-tta rank` wrote")
    for name, field in FILTERS.items():
        add(f"--{name}", type=names_list, metavar="A,B", help=f"only these {name.replace('-', ' ')}", dest=field)
    add("--quiet", action="store_true", help="do not print the tables")


def run(arguments: Namespace) -> None:
    only = {field: getattr(arguments, field) for field in FILTERS.values() if getattr(arguments, field) is not None}
    report = read_report(arguments.store, order_records=read_records(arguments.analyses), only=only)
    out = writable_file("--out", arguments.out or Path(arguments.store).with_suffix(".html"))
    for flag in ("tables", "figures"):
        if getattr(arguments, flag):
            writable_folder(f"--{flag}", getattr(arguments, flag))
    if not arguments.quiet:
        for group in report.groups:
            say(f"{tables_text(group).rstrip()}\n\n{' '.join(summarize(group))}\n")
    write_page(report, out, title=arguments.title)
    if arguments.tables:
        tables = write_tables(report, arguments.tables)
        say(f"tables: {len(tables)} files in {arguments.tables}")
    if arguments.figures:
        written = write_figures(report, arguments.figures)
        say(f"figures: {len(written)} files in {arguments.figures}")
    say(f"report: {out}")
