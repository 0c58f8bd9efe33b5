"""`trust-tta bench` on a tiny network."""

from __future__ import annotations

import csv
import io
import os
import re
import signal
import subprocess
import sys
from argparse import ArgumentTypeError
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.bench.tiny import write_checkpoint
from tests.results.test_store import execute
from trust_tta.bench.sweep import CellWriter
from trust_tta.cli.arguments import integers, method_option
from trust_tta.cli.main import main
from trust_tta.report.formats import to_text
from trust_tta.report.model import make_groups
from trust_tta.report.tables import accuracy_table
from trust_tta.results import ResultStore
from trust_tta.results.codec import to_json
from trust_tta.results.store import Claimant

TOML = """
store = "{folder}/results.sqlite"
methods = ["source", "tent"]
model.name = "vmamba_nano"
model.checkpoint = "{checkpoint}"
model.overrides = {{ depths = [1, 1], dims = [8, 16], patch_size = 4 }}
data.dataset = "sample"
data.domains = ["fog", "contrast"]
data.limit = 32
stream.batch_size = 16
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TOML.format(folder=tmp_path, checkpoint=write_checkpoint(tmp_path)), encoding="utf-8")
    return path


def test_lines_tables_and_export(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out" / "cells.csv"
    assert main(["bench", str(config), "--seeds", "0,1", "--export", str(out)]) == 0
    printed = capsys.readouterr().out
    warning, *lines = printed.splitlines()[:9]
    assert warning.startswith("warning: too few batches between two resets to learn from (2)")
    assert all(re.fullmatch(r"(source|tent) +(fog|contrast) +seed [01] +\d+\.\d %.*\d\.\d s", line) for line in lines)
    assert [line.split()[0] for line in lines[:4]] == ["source", "tent", "source", "tent"]
    with ResultStore(tmp_path / "results.sqlite") as store:
        cells = store.results()
    drawn = to_text(accuracy_table(make_groups(cells)[0]))
    assert drawn in printed
    with out.open(encoding="utf-8") as file:
        assert [row["digest"] for row in csv.DictReader(file)] == [cell.key.digest for cell in cells]

    assert main(["bench", str(config), "--seeds", "0,1"]) == 0
    again = capsys.readouterr().out
    assert "seed 0 " not in again.split("sample, online, severity 5")[0]
    assert drawn in again


def test_a_terminal_without_unicode_gets_ascii(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["bench", str(config), "--methods", "source", "--experiment", "caf\udce9", "--seeds", "0,1"]
    shown = {}
    for encoding in ("ascii", "utf-8"):
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(flags) == 0
        assert main(["report", str(config.with_name("results.sqlite"))]) == 0
        stream.seek(0)
        shown[encoding] = stream.read().split("sample, online, severity 5", 1)[1]
    assert shown["utf-8"].count(" ± ") >= 4
    assert shown["ascii"] == shown["utf-8"].replace(" ± ", " +-")  # no wider, so that columns stay in line
    assert "caf?: sample" in shown["ascii"]


def test_flags_alone_are_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import save_file

    from tests.bench.tiny import OVERRIDES
    from trust_tta.models.typed import create_model

    path = tmp_path / "net.safetensors"
    save_file(create_model("vmamba_nano", **OVERRIDES).state_dict(), path)
    arguments = ["--checkpoint", str(path), "--model", "vmamba_nano", "--dataset", "sample", "--domains", "fog"]
    code = main(["bench", *arguments, "--methods", "source", "--store", str(tmp_path / "s.sqlite")])
    assert code == 2  # the tiny network is no vmamba_nano, and there is no flag to say so
    assert "does not fit the network" in capsys.readouterr().err


def test_the_list_runs_nothing(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(config), "--list"]) == 0
    assert capsys.readouterr().out.endswith(f"4 cells, 0 done, in {tmp_path}/results.sqlite\n")
    assert not (tmp_path / "results.sqlite").exists()
    assert main(["bench", str(config), "--methods", "tent", "--option", "tent.lr=0.01"]) == 0
    capsys.readouterr()
    assert main(["bench", str(config), "--option", "tent.lr=0.01", "--list"]) == 0
    listed = capsys.readouterr().out
    assert [line.split()[0] for line in listed.splitlines()[:4]] == ["to", "done", "to", "done"]


def test_failed_cells_end_in_exit_code_one(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    split = ["--option", "trust.mode=split", "--option", "trust.k=2"]
    arguments = ["bench", str(config), "--methods", "source,trust", *split, "--limit", "33"]
    assert main(arguments) == 1
    out, err = capsys.readouterr()
    label = "trust (k=2, mode=split)"
    assert f"failed: {label} on fog, seed 0, batch 16: 1 images cannot be split among 2 orders" in out
    assert err.splitlines()[-1].startswith("trust-tta: failed cells: 2")
    assert main(arguments) == 1
    assert "failed: trust (k=2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--methods", "tents"], "unknown method 'tents'; did you mean 'tent'?"),
        (["--option", "tent.lrr=1"], "method 'tent': lrr: there is no such option; did you mean 'lr'?"),
        (["--option", "trust.k=1"], "--option trust.k: the method 'trust' is not run"),
        (["--severity", "9", "--limit", "0"], "--severity is 9; give a value <= 5; --limit is 0; give a value >= 1"),
        (["--batch-size", "16,0"], "1 mistake: --batch-size is 0; give a value >= 1"),
        (["--domains", ","], "--domains: the list is empty; give at least one"),
        (["--domains", ""], "--domains: the list is empty; give at least one"),
        (["--export", "cells.xls"], "must end in .csv or .parquet"),
        (["--checkpoint", "nothing.pth"], "no checkpoint at 'nothing.pth'"),
        (["--dataset", "cifar10-c", "--root", "/nothing"], "/nothing is not a folder"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_is_one_line_and_exit_code_two(
    config: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], part: str
) -> None:
    assert main(["bench", str(config), *arguments]) == 2
    error = capsys.readouterr().err
    assert part in error
    assert len(error.splitlines()) == 1


def test_labels_of_the_configuration_name_the_rows(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = config.read_text(encoding="utf-8").replace(
        '"tent"]', '"tent", { name = "tent", steps = 2, label = "twice" }]'
    )
    config.write_text(text, encoding="utf-8")
    assert main(["bench", str(config), "--domains", "fog"]) == 0
    rows = [line.split()[0] for line in capsys.readouterr().out.split("severity 5")[1].splitlines()[4:7]]
    assert rows == ["source", "tent", "twice"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("trust.k=4", ("trust", "k", 4)),
        ("tent.lr=1e-3", ("tent", "lr", 1e-3)),
        ("trust.merge=slerp", ("trust", "merge", "slerp")),
        ('trust.orders=["abcd", "badc"]', ("trust", "orders", ["abcd", "badc"])),
        ("tent.episodic=true", ("tent", "episodic", True)),
    ],
)
def test_options_are_written_as_in_toml(text: str, value: object) -> None:
    assert method_option(text) == value


@pytest.mark.parametrize("text", ["trust", "trust.k", "k=4", "trust.=4", "trust.k="])
def test_a_broken_option_is_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="give it as trust.k=4"):
        method_option(text)


def test_a_broken_list_of_integers_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="is not a list of integers"):
        integers("1,x")


SMALL = """
[small]
methods = ["tent"]
data = {{ dataset = "sample", domains = ["fog"], limit = 32 }}
store = "{folder}/small.sqlite"
"""


def test_the_small_scale_runs_into_its_own_store(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with config.open("a", encoding="utf-8") as file:
        file.write(SMALL.format(folder=tmp_path))
    assert main(["bench", str(config), "--small"]) == 0
    assert f"results are in {tmp_path}/small.sqlite" in capsys.readouterr().out
    assert not (tmp_path / "results.sqlite").exists()
    with ResultStore(tmp_path / "small.sqlite", create=False) as store:
        (cell,) = store.results()
    assert (cell.key.experiment, cell.key.method, cell.key.domain) == ("tiny-small", "tent", "fog")


def test_a_part_that_cannot_run_does_not_stop_the_others(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = config.read_text(encoding="utf-8")
    head = "\n".join(line for line in text.splitlines() if not line.startswith("data."))
    parts = [
        f'{{ dataset = "cifar10-c", root = "{tmp_path}/nothing" }}',
        '{ dataset = "sample", domains = ["snow"], limit = 32 }',
    ]
    config.write_text(head + "".join(f"\n[[parts]]\ndata = {part}" for part in parts), encoding="utf-8")
    assert main(["bench", str(config), "--methods", "source"]) == 1
    out, err = capsys.readouterr()
    first, second = "part 1 of 2: vmamba_nano on cifar10-c", "part 2 of 2: vmamba_nano on sample"
    assert out.index(first) < out.index(second) < out.index("source  snow")
    assert len(err.splitlines()) == 1
    assert "cifar10-c was not run:" in err
    assert main(["bench", str(config), "--methods", "source", "--dataset", "sample"]) == 0
    assert "part 1" not in capsys.readouterr().out
    assert main(["bench", str(config), "--dataset", "cifar10-c"]) == 2


def test_a_committed_configuration_runs_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the shipped network, with fewer images than it names; the page of its store is written from it."""
    monkeypatch.chdir(tmp_path)
    path = Path(__file__).parents[2] / "configs" / "paper" / "two_orders.toml"
    flags = ["--small", "--limit", "16", "--batch-size", "8", "--seeds", "0", "--domains", "contrast"]
    assert main(["bench", str(path), *flags]) == 0
    rows = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert "trust, 2 orders" in rows
    assert main(["report", "runs/two_orders-small.sqlite", "--quiet"]) == 0
    page = (tmp_path / "runs" / "two_orders-small.html").read_text(encoding="utf-8")
    assert "two_orders-small" in page


def test_sigterm_exports_what_is_finished(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finish = CellWriter.finish

    def finish_and_terminate(*arguments: Any) -> None:
        finish(*arguments)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(CellWriter, "finish", finish_and_terminate)
    before, out = signal.getsignal(signal.SIGTERM), tmp_path / "cells.csv"
    assert main(["bench", str(config), "--export", str(out)]) == 130
    assert signal.getsignal(signal.SIGTERM) == before
    assert "interrupted; finished cells are kept; to continue: trust-tta bench" in capsys.readouterr().err
    assert len(out.read_text(encoding="utf-8").splitlines()) == 2  # the header and one cell


def test_list_shows_cells_whose_process_died(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(config), "--methods", "source"]) == 0
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    claimant = to_json(replace(Claimant.current(), pid=ended.pid))
    running = f"status = 'running', token = 'x', claimant = '{claimant}', expires = 0"
    execute(tmp_path / "results.sqlite", f"UPDATE cells SET {running}, result = NULL, course = NULL, facts = NULL")
    capsys.readouterr()
    assert main(["bench", str(config), "--methods", "source", "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[:-1]] == ["died", "died"]


def test_one_reason_is_given_once_for_all_parts(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = config.read_text(encoding="utf-8")
    head = "\n".join(line for line in text.splitlines() if not line.startswith("data."))
    part = f'\n[[parts]]\ndata = {{ dataset = "cifar10-c", root = "{tmp_path}/nothing" }}'
    config.write_text(head + 3 * part, encoding="utf-8")
    assert main(["bench", str(config), "--methods", "source"]) == 1
    error = capsys.readouterr().err
    assert error.count("was not run") == 1
    assert error.endswith("(3 parts)\n")
