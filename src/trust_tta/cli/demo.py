"""`trust-tta demo`: a run on shipped images with a shipped network."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from functools import partial
from importlib.resources import as_file, files

from trust_tta.bench.parsing import read_parts
from trust_tta.cli.arguments import use_passive_threads
from trust_tta.cli.output import say, writable_folder
from trust_tta.errors import ConfigError, TrustError
from trust_tta.report.formats import verdict
from trust_tta.report.model import read_report
from trust_tta.report.page import write_page
from trust_tta.report.text import counted

EXAMPLES = """\
  trust-tta demo                       half a minute on two cores; results in the folder demo
  trust-tta demo --images 64 --seeds 1 --out /tmp/demo   a quick look
  trust-tta demo --task segmentation   segmentation masks: streets under noise and snow
  trust-tta demo                       again: finished cells are not run twice"""

KEPT = "finished cells are kept"
MAX_PROCESSES = 8  # each loads PyTorch and the network


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--task", default="classification", choices=("classification", "segmentation"), help="what is predicted")
    add("--out", default="demo", metavar="FOLDER", help="folder for results and report (default: demo)")
    add("--seeds", type=int, metavar="N", help="number of seeds (default 3; for segmentation 1)")
    add("--images", type=int, metavar="N", help="images per corruption and seed (default 160; for segmentation 16)")


def run(arguments: Namespace) -> None:
    use_passive_threads()
    out = writable_folder("--out", arguments.out)
    seeds, images = arguments.seeds, arguments.images
    if (seeds is not None and seeds < 1) or (images is not None and not 2 <= images <= 2000):
        raise ConfigError(f"--seeds {seeds} --images {images}: give 1 or more seeds and 2 to 2000 images")
    import torch

    from trust_tta.bench.environment import choose_device
    from trust_tta.bench.processes import run_in_processes
    from trust_tta.cli.cells import run_parts

    changes = {"store": str(out / "results.sqlite"), "data": {"limit": images} if images else {}}
    with as_file(files("trust_tta").joinpath("assets", f"demo_{arguments.task}.toml")) as path:
        first, *others = read_parts(path, changes)
    if seeds:
        first = first.changed(stream=first.stream.changed(seeds=tuple(range(seeds))))
    parts, data = [first, *others], first.data
    images_of = "CIFAR-10 test images" if data.dataset == "sample" else "CamVid's test pictures"
    say(f"{images_of}: {counted(len(data.domains or ()), 'corruption')}, {data.limit} images each")
    for part in parts:
        methods = ", ".join(method.name for method in part.methods)
        say(f"  {part.model.checkpoint}: {methods}; {counted(len(part.stream.seeds), 'seed')}")
    # The network is too small to use several cores: one process per core is faster.
    processes = min(MAX_PROCESSES, torch.get_num_threads()) if choose_device(first.device).type == "cpu" else 1
    cells, problems = run_parts(parts, engine=partial(run_in_processes, processes=processes) if processes > 1 else None)
    page = out / "report.html"
    write_page(read_report(first.store), page)
    say(f"the report is {page.resolve()}")
    if problems:
        raise TrustError("; ".join(problems))
    say(verdict(cells))
