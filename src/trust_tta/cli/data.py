"""`trust-tta data`: list, fetch and check data sets."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections import Counter
from pathlib import Path

from trust_tta.cli.output import ProgressDisplay, say, writable_folder
from trust_tta.data.registry import DATASETS, GROUP
from trust_tta.errors import CheckpointError, DataError, TrustError
from trust_tta.plugins import installed

EXAMPLES = """\
  trust-tta data list                      the known data sets, and where to get them
  trust-tta data get cifar10 --root data   fetch CIFAR-10, checked pixel by pixel
  trust-tta data get cifar10 --from cifar-10-python.tar.gz
  trust-tta data check data                what is there, what is missing, what is broken
  trust-tta data check data --thorough     the same, reading every pixel
  trust-tta data check photos --checkpoint net.safetensors      are the class folders those of the network?
  trust-tta data check photos --dataset mypackage.data:Photos   a data set of your own"""


def add_arguments(parser: ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser("list", help="list the known data sets", epilog="example: trust-tta data list")
    get = actions.add_parser("get", help="fetch a data set", epilog="example: trust-tta data get cifar10 --root data")
    get.add_argument("dataset", metavar="NAME", help="cifar10, or a data set of your own with a function `fetch`")
    get.add_argument("--root", default="data", metavar="FOLDER", help="where to put it (default: data)")
    get.add_argument("--from", dest="archive", metavar="FILE", help="the archive: a file or a URL")
    thorough = "example: trust-tta data check data --thorough"
    check = actions.add_parser("check", help="check every data set under a folder", epilog=thorough)
    check.add_argument("root", metavar="ROOT", help="folder that contains data sets, or is one")
    check.add_argument("--thorough", action="store_true", help="read every pixel, not only the headers")
    check.add_argument("--checkpoint", metavar="NAME", help="compare class folders with those of this network")
    check.add_argument("--dataset", metavar="NAME", help="a data set of your own, as package.module:Name")


def run(arguments: Namespace) -> None:
    {"list": list_datasets, "get": get, "check": check}[arguments.action](arguments)


def list_datasets(_: Namespace) -> None:
    for spec in DATASETS:
        classes = f"{spec.classes} classes" if spec.classes else "any classes"
        domains = f"{len(spec.targets)} domains" if len(spec.targets) > 1 else "1 domain"
        say(f"{spec.name}: {classes}, {domains if spec.domains else 'any domains'}")
        say(f"  files    {spec.wanted}")
        say(f"  source   {spec.homepage}")
        say(f"  license  {spec.license}")
    for name in installed(GROUP):
        say(f"{name}: of an installed package")


def get(arguments: Namespace) -> None:
    writable_folder("--root", arguments.root)
    from trust_tta.data.fetch import fetch_dataset

    with ProgressDisplay() as progress:
        folder = fetch_dataset(arguments.dataset, arguments.root, archive=arguments.archive, progress=progress)
    say(f"{arguments.dataset} is in {folder}")


def check(arguments: Namespace) -> None:
    from trust_tta.data.check import check_dataset, check_root

    root = Path(arguments.root)
    if not root.is_dir():
        raise DataError(f"'{root}' is not a folder; give the folder of your data sets, or of one of them")
    classes = None
    if arguments.checkpoint:
        from trust_tta.models.checkpoint import Checkpoint

        classes = Checkpoint.open(arguments.checkpoint).classes
        if classes is None:
            raise CheckpointError(f"--checkpoint {arguments.checkpoint} has no class names; omit it")
    with ProgressDisplay() as progress:
        if arguments.dataset:
            findings = check_dataset(arguments.dataset, root, classes=classes, thorough=arguments.thorough)
        else:
            findings = check_root(root, classes=classes, thorough=arguments.thorough, progress=progress)
    for finding in findings:
        say(str(finding))
    counts = Counter(finding.status for finding in findings)
    say(f"{counts['ok']} ok, {counts['warning']} warnings, {counts['error']} errors")
    if counts["error"]:
        errors = "1 error" if counts["error"] == 1 else f"{counts['error']} errors"
        raise TrustError(f"{root} has {errors}, listed above; repair these files or fetch them again")
