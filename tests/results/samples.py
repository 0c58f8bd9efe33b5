"""Small whole records for the tests of this room."""

from __future__ import annotations

from dataclasses import replace

from trust_tta.results import Cell, CellKey, CellResult, History, Provenance, Reliability
from trust_tta.results.order_records import EntropyByOrder

PROVENANCE = Provenance(
    trust_tta="0.1.0",
    torch="2.13.0",
    numpy="2.4.6",
    triton=None,
    python="3.11.7",
    platform="Linux",
    device="cpu",
    dtype="float32",
    threads=1,
    commit=None,
    config='seed = 0\nname = "é, \\"x\\""\n',
    started="2026-01-02T03:04:05+00:00",
    finished="2026-01-02T03:04:06+00:00",
)
KEY = CellKey(
    experiment="main",
    dataset="cifar10-c",
    domain="fog",
    severity=5,
    method="trust",
    options='{"k": 6}',
    batch_size=128,
    seed=0,
    checkpoint="abc",
    fingerprint="def",
)
RESULT = CellResult(
    samples=3,
    accuracy=2 / 3,
    accuracy_before=1 / 3,
    entropy=0.1,
    nll=0.2,
    ece=0.3,
    brier=0.4,
    forwards=12,
    backwards=6,
    updates=6,
    skipped_updates=0,
    seconds_median=0.01,
    seconds_mean=0.02,
    seconds_total=0.04,
    peak_memory=2**31,
    history=History(
        samples=(2, 1), accuracy=(1.0, 0.0), accuracy_before=(0.5, 0.0), entropy=(0.1, 0.1), seconds=(0.01, 0.03)
    ),
    reliability=Reliability(),
)


def cell(
    method: str,
    domain: str,
    accuracy: float,
    *,
    seed: int = 0,
    dataset: str = "cifar10-c",
    options: str = "{}",
    batch_size: int = 128,
    checkpoint: str = "abc",
) -> Cell:
    """A finished cell that differs from the others in what tables look at."""
    key = replace(
        KEY,
        method=method,
        domain=domain,
        seed=seed,
        dataset=dataset,
        options=options,
        batch_size=batch_size,
        checkpoint=checkpoint,
    )
    return Cell(key, replace(RESULT, accuracy=accuracy), PROVENANCE)


ENTROPY = EntropyByOrder(title="pacs", orders=("abcd", "badc", "dbca"), entropy=(0.6, 0.75, 0.7), k=2)
ORDER_RECORDS = [ENTROPY]
