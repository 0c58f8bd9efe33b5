"""The committed configurations, at both of their scales."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.tiny import read_config
from trust_tta.bench.config import ARRAY, SAMPLE, RunConfig
from trust_tta.bench.data import ExperimentData
from trust_tta.bench.experiment import make_plan
from trust_tta.bench.parsing import read_parts
from trust_tta.data.corruptions.table import ALL_CORRUPTIONS
from trust_tta.data.registry import find_spec
from trust_tta.methods.trust_options import OrderOptions
from trust_tta.schema import schema_fields

FOLDER = Path(__file__).parents[2] / "configs"
CONFIGS = sorted(FOLDER.rglob("*.toml"))
PAPER = [path for path in CONFIGS if path.parent.name == "paper"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_full_scale_is_read(path: Path) -> None:
    parts = read_parts(path)
    assert {part.experiment for part in parts} == {path.stem}
    for part in parts:
        assert part.data.dataset in (SAMPLE, ARRAY) or find_spec(part.data.dataset).domains
        for method in part.methods:
            options = method.all_options()
            if "orders" in options:
                assert OrderOptions(orders=options["orders"], k=1).chosen()


@pytest.mark.parametrize("path", PAPER, ids=lambda path: path.stem)
def test_the_small_scale_is_the_same_experiment_on_shipped_images(path: Path) -> None:
    full, small = read_parts(path), read_config(path, small=True)
    assert (small.experiment, small.store) == (f"{path.stem}-small", f"runs/{path.stem}-small.sqlite")
    assert small.data.dataset == ("camvid" if path.stem == "table7" else SAMPLE)
    assert set(small.data.domains or ()) <= set(ALL_CORRUPTIONS)
    assert {part.stream.setting for part in full} == {small.stream.setting}
    assert {method.name for method in small.methods} <= {method.name for method in full[0].methods}
    assert (small.clean_after, small.keep_samples) == (full[0].clean_after, full[0].keep_samples)
    if path.stem == "table7":  # CamVid and a network for it do not ship
        return
    assert small.model.checkpoint == "vmamba_nano_cifar10"
    plan = make_plan(small, ExperimentData(small.data))
    assert min(min(sequence.batches) for sequence in plan.sequences) >= 2
    assert len(plan.keys) == len({key.digest for key in plan.keys})


def test_the_documents_list_every_key_as_it_is_declared() -> None:
    """Write the table that this prints between the markers of docs/reference/protocol.md after a key has changed."""

    def shown(default: object) -> str:
        if default is ... or default is None or default == {}:
            return ""
        return f"`{json.dumps(default[0] if isinstance(default, tuple) else default)}`"

    rows = [f"| `{key}` | {shown(default)} | {text} |" for key, default, text in schema_fields(RunConfig)]
    table = "\n".join(["| key | default | meaning |", "| --- | --- | --- |", *rows])
    page = (FOLDER.parent / "docs" / "reference" / "protocol.md").read_text(encoding="utf-8")
    assert page.split("<!-- keys -->\n")[1].split("\n<!-- end -->")[0] == table, table


def test_the_settings_of_the_paper() -> None:
    """Adam with 1e-4, batches of 128, severity 5, reset at each corruption."""
    for path in PAPER:
        for part in read_parts(path):
            if path.stem != "table7":  # of labeled pixels, whose batches the paper does not state
                assert max(part.stream.batch_size) == 128
            assert part.data.severity == 5
            rates = [method.all_options().get("lr", 1e-4) for method in part.methods]
            assert set(rates) == {1e-4}
            assert part.stream.setting == {"standard": "standard", "stability": "continual"}.get(path.stem, "online")
