"""All measurements of `trust-tta speed` as one record; a backend that fails its self-check is not timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch

from trust_tta.bench.environment import collect_facts, now
from trust_tta.bench.speed import Row, copy_bandwidth, float32_only, refuse, run_job
from trust_tta.bench.speed_network import count
from trust_tta.bench.speed_plan import NATIVE, Settings, exponents, make_jobs, memory_over_one, over_reference
from trust_tta.models.factory import create_model
from trust_tta.models.networks import require_vmamba
from trust_tta.models.vmamba import VMamba
from trust_tta.progress import SILENT, Progress
from trust_tta.results import canonical_json
from trust_tta.scan import grouped_scan
from trust_tta.scan.selfcheck import Check, check_backend

SCHEMA_VERSION = 1


def measure_speed(
    settings: Settings,
    *,
    device: torch.device,
    keep: Callable[[dict[str, Any]], None] = lambda record: None,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Measure everything and return the record; `keep` gets it after every row, so that a stopped run leaves some."""
    begun = time.perf_counter()
    torch.manual_seed(0)
    model = require_vmamba(create_model(settings.model), by="speed").to(device).eval()
    checks = {name: check_backend(name, str(device)) for name in ("reference", NATIVE[device.type])}
    rows: list[Row] = []
    with float32_only(device):
        record = _describe(settings, model, device, checks)
        jobs = make_jobs(settings, model, grouped_scan, device=device, bandwidth=record["copy_bytes_per_second"])
        progress.start(len(jobs), "measuring")
        for job in jobs:
            check = checks[job.row.backend]
            if check.passed:
                rows.append(run_job(job, device))
            else:
                rows.append(refuse(job, f"the backend's error is {check.error:.1e} ({check.where})"))
            progress.advance()
            record |= _conclude(rows) | {"seconds": time.perf_counter() - begun}
            keep(record)
        progress.finish()
    record["facts"]["finished"] = now()
    keep(record)
    return record


def failed_backends(record: dict[str, Any]) -> list[str]:
    """The backends of a record that did not agree with the reference."""
    return [name for name, check in record["parity"].items() if not check["passed"]]


def _describe(settings: Settings, model: VMamba, device: torch.device, checks: dict[str, Check]) -> dict[str, Any]:
    """The record before its rows: circumstances, checks, counts, the speed of a copy."""
    config = canonical_json(asdict(settings))
    facts = collect_facts(device=device, dtype=",".join(settings.dtypes), config=config)
    brief = replace(settings.limits, seconds=settings.limits.seconds / 4)
    return {
        "schema_version": SCHEMA_VERSION,
        "facts": {**asdict(facts), "started": now()},
        "settings": asdict(settings),
        "parity": {name: {**asdict(check), "passed": check.passed} for name, check in checks.items()},
        "copy_bytes_per_second": copy_bandwidth(device, limits=brief),
        "network": {"name": settings.model, **asdict(count(model, size=settings.size))},
    }


def _conclude(rows: list[Row]) -> dict[str, Any]:
    """The rows and what they amount to."""
    return {
        "rows": [asdict(row) for row in rows],
        "exponents": exponents(rows),
        "over_reference": over_reference(rows),
        "memory_over_one_order": memory_over_one(rows),
    }
