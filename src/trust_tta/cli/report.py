"""`trust-tta report`: tables, figures and one self-contained page from a results store."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

EXAMPLES = """\
  trust-tta report runs/demo.sqlite                       write runs/demo.html and print the tables
  trust-tta report runs/demo.sqlite --out page.html --title "My network on CIFAR-10-C"
  trust-tta report runs/demo.sqlite --figures figures/    also PDF and SVG figures for a paper
  trust-tta report runs/demo.sqlite --tables tables/      also each table as CSV, Markdown and LaTeX
  trust-tta report runs/demo.sqlite --analyses rank.json  also what `trust-tta rank --json` found"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE", help="the results store that a benchmark wrote")
    parser.add_argument("--out", metavar="FILE", help="the page (default: the store's name with .html)")
    parser.add_argument("--title", metavar="TEXT", help="the page's title")
    parser.add_argument("--figures", metavar="DIR", help="draw PDF and SVG figures there (needs the extra 'figures')")
    parser.add_argument("--tables", metavar="DIR", help="write each table there as CSV, Markdown and LaTeX")
    parser.add_argument("--analyses", metavar="PATH", nargs="+", default=[], help="JSON files or folders of analyses")
    parser.add_argument("--quiet", action="store_true", help="do not print the tables")


def run(arguments: Namespace) -> None:
    """Write what was asked for, and say in words what the numbers are."""
    from trust_tta.report.figures import write_figures
    from trust_tta.report.files import group_text, write_tables
    from trust_tta.report.groups import read_contents
    from trust_tta.report.page import write_page
    from trust_tta.report.text import printable
    from trust_tta.results.order_records import read_records

    analyses = read_records(arguments.analyses)
    contents = read_contents(arguments.store)
    if not arguments.quiet:
        for group in contents.groups:
            print(printable(group_text(group)))
    out = Path(arguments.out) if arguments.out else Path(arguments.store).with_suffix(".html")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_page(arguments.store, out, title=arguments.title, analyses=analyses)
    if arguments.tables:
        tables = write_tables(contents.groups, arguments.tables)
        print(printable(f"tables: {len(tables)} files in {arguments.tables}"))
    if arguments.figures:
        written = write_figures(arguments.store, arguments.figures, analyses=analyses)
        print(printable(f"figures: {len(written)} files in {arguments.figures}"))
    print(printable(f"report: {out}"))
