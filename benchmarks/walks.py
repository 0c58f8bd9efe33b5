"""Which functions of the package one batch, or one benchmark, passes through: python -m benchmarks.walks [--list]

Counts distinct functions: of the second batch of 16 images through `trust` and through `tide`, after which nothing is
set up any more, and of `trust-tta bench` on a small file with the `report` of its store, in this process.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import trust_tta as tt
from trust_tta.cli.main import main as trust_tta

PACKAGE = str(Path(tt.__file__).parent)
OTHERS = ("models/", "ops/", "orders.py")  # the network's own
BELOW = (*OTHERS, "methods/", "data/", "preprocessing.py")  # what a benchmark runs
BENCHMARK = """\
methods = ["source", "trust"]

[model]
checkpoint = "vmamba_nano_cifar10"

[data]
dataset = "sample"
domains = ["fog"]
limit = 32

[stream]
batch_size = 16
seeds = [0]
"""


def functions_called(run: Callable[[], Any]) -> list[str]:
    """The functions of the package that `run` calls, as file:function, in the order of their first calls."""
    found: dict[str, None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        ours = code.co_filename.startswith(PACKAGE) and code.co_flags & inspect.CO_OPTIMIZED  # no module or class body
        if event == "call" and ours and not code.co_name.startswith("<"):
            found.setdefault(f"{code.co_filename[len(PACKAGE) + 1 :]}:{code.co_qualname}")

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return list(found)


def of_batch(name: str) -> list[str]:
    """Through a method on a small VMamba, without the network's own functions."""
    torch.manual_seed(0)
    method = tt.create_method(name, tt.create_model("vmamba_nano", num_classes=10))
    images = torch.rand(16, 3, 32, 32)
    method(images)
    return [at for at in functions_called(lambda: method(images)) if not at.startswith(OTHERS)]


def of_benchmark(folder: Path) -> list[str]:
    """Through two cells of a benchmark and the report of their store, without data, methods and networks."""
    config, store = folder / "small.toml", folder / "runs.sqlite"
    config.write_text(BENCHMARK)
    commands = (["bench", str(config), "--store", str(store)], ["report", str(store), "--out", str(folder / "page")])
    codes: list[int] = []
    found = functions_called(lambda: codes.extend(map(trust_tta, commands)))
    if any(codes):
        raise SystemExit("the benchmark failed")
    return [at for at in found if not at.startswith(BELOW)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="list the functions, too")
    listed = parser.parse_args().list
    walks = {"a batch through trust": of_batch("trust"), "a batch through tide": of_batch("tide")}
    with tempfile.TemporaryDirectory() as folder:
        walks["a TOML file to its page"] = of_benchmark(Path(folder))
    for name, functions in walks.items():
        print(f"{name}: {len(functions)} functions")
        if listed:
            print(*(f"    {at}" for at in functions), sep="\n")


if __name__ == "__main__":
    main()
