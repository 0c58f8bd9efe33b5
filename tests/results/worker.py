"""A process that fills a store: `python -m tests.results.worker STORE CELLS`; announces what it recorded."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import replace

from tests.results.samples import KEY, PROVENANCE, RESULT
from trust_tta.results import CellKey, CellResult, History, ResultStore


def keys(n: int) -> Iterator[CellKey]:
    return (replace(KEY, seed=seed) for seed in range(n))


def compute(key: CellKey) -> CellResult:
    """A result that is large on disk and follows from the key alone."""
    draw = random.Random(key.seed)
    column = tuple(draw.random() for _ in range(700))
    course = History(samples=(1,) * 700, accuracy=column, entropy=column, seconds=column)
    return replace(RESULT, accuracy=draw.random(), history=course)


def main(path: str, n: int) -> None:
    sys.stdin.readline()  # so that several can be let go together
    with ResultStore(path) as store:
        for key in keys(n):
            if store.claim([key]):
                store.finish(key, compute(key), PROVENANCE)
                sys.stdout.write(f"{key.seed}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
