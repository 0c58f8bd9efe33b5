"""`trust-tta data`: list, fetch and check data sets."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections import Counter
from pathlib import Path

from trust_tta.cli.output import say, try_folder
from trust_tta.cli.progress import Drawer
from trust_tta.errors import DataError, TrustError

EXAMPLES = """\
  trust-tta data list                      the data sets we know, and where to get them
  trust-tta data get cifar10 --root data   fetch CIFAR-10, checked pixel by pixel
  trust-tta data check data                what is there, what is missing, what is broken
  trust-tta data check data --thorough     the same, reading every pixel"""


def add_arguments(parser: ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser("list", help="the data sets we know", epilog="example: trust-tta data list")
    get = actions.add_parser("get", help="fetch a data set", epilog="example: trust-tta data get cifar10 --root data")
    get.add_argument("dataset", choices=("cifar10",), help="the one that can be fetched")
    get.add_argument("--root", default="data", metavar="FOLDER", help="where to put it (default: data)")
    thorough = "example: trust-tta data check data --thorough"
    check = actions.add_parser("check", help="look at every data set under a folder", epilog=thorough)
    check.add_argument("root", metavar="ROOT", help="folder that holds data sets, or is one")
    check.add_argument("--thorough", action="store_true", help="read every pixel, not only the headers")


def run(arguments: Namespace) -> None:
    if arguments.action == "list":
        list_datasets()
    elif arguments.action == "get":
        get_cifar10(Path(arguments.root))
    else:
        check(Path(arguments.root), thorough=arguments.thorough)


def list_datasets() -> None:
    from trust_tta.data.specs import DATASETS

    for spec in DATASETS:
        classes = f"{spec.classes} classes" if spec.classes else "any classes"
        domains = f"{len(spec.domains)} domains" if len(spec.domains) > 1 else "1 domain"
        say(f"{spec.name}: {classes}, {domains if spec.parts else 'any domains'}")
        say(f"  files    {spec.wanted}")
        say(f"  source   {spec.source}")
        say(f"  licence  {spec.licence}")


def get_cifar10(root: Path) -> None:
    try_folder("--root", root)
    from trust_tta.data.fetch import fetch_cifar10

    with Stages() as stages:
        folder = fetch_cifar10(root, progress=stages.show)
    say(f"CIFAR-10 is in {folder}")


def check(root: Path, *, thorough: bool) -> None:
    from trust_tta.data.check import check_root

    if not root.is_dir():
        raise DataError(f"'{root}' is not a folder; give the folder that holds your data sets, or is one")
    with Stages() as stages:
        findings = check_root(root, thorough=thorough, progress=stages.show)
    for finding in findings:
        say(str(finding))
    counts = Counter(finding.level for finding in findings)
    say(f"{counts['ok']} ok, {counts['warning']} warnings, {counts['error']} errors")
    if counts["error"]:
        raise TrustError(f"{root} has {counts['error']} errors, listed above; mend or fetch these files again")


class Stages(Drawer):
    """Progress through several stages, each with a total of its own."""

    stage, done = "", 0

    def show(self, label: str, done: int, total: int) -> None:
        """`done` of `total` (0: unknown) of the stage `label`."""
        if label != self.stage:
            self.stage, self.done = label, 0
            self.start(total or None, label)
        self.advance(done - self.done)
        self.done = done
