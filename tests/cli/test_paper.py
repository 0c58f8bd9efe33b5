"""`trust-tta paper`: the list, the document made from it, and a run of a tiny stand-in."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from benchmarks.paper_page import PAGE, fill, markdown

from tests.bench.tiny import write_checkpoint
from trust_tta.bench.parsing import read_parts
from trust_tta.cli import paper
from trust_tta.cli.main import build_parser, main
from trust_tta.report.paper import load_published
from trust_tta.results import ResultStore
from trust_tta.results.order_records import read_records

ROOT = Path(__file__).parents[2]
ITEMS = paper.read_items(ROOT / paper.FOLDER)
TINY = """\
# Figure 9: a stand-in: of two methods
# Needs nothing.
store = "{folder}/full.sqlite"
methods = ["source", "trust"]
model.name = "vmamba_nano"
model.checkpoint = "{checkpoint}"
model.overrides = {{ depths = [1, 1], dims = [8, 16], patch_size = 4 }}
data.dataset = "cifar10-c"
data.root = "{folder}"
stream.batch_size = 16
small.data = {{ dataset = "sample", domains = ["fog"], limit = 32 }}
small.store = "{folder}/small.sqlite"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Configurations: with an analysis beside it, without one, and one that cannot be run at either scale."""
    configs = tmp_path / "configs"
    configs.mkdir()
    text = TINY.format(folder=tmp_path, checkpoint=write_checkpoint(tmp_path))
    (configs / "standard.toml").write_text(text, encoding="utf-8")
    broken = text.replace("Figure 9", "Table 2").replace(".sqlite", "2.sqlite").replace("tiny10.pth", "gone.pth")
    (configs / "broken.toml").write_text(broken, encoding="utf-8")
    plain = text.replace("Figure 9", "Figure 10").replace(".sqlite", "3.sqlite")
    (configs / "plain.toml").write_text(plain, encoding="utf-8")
    return configs


def test_every_table_and_figure_with_numbers_has_an_item() -> None:
    """All places of the published numbers but two times, which `trust-tta speed` measures."""
    rows = markdown(ITEMS).splitlines()[2:]
    places = " ".join(row.split("|")[1] for row in rows)
    numbers = {
        (kind, n)
        for kind, listed in re.findall(r"(Table|Figure)s? (\d+(?: and \d+)?)", places)
        for n in listed.split(" and ")
    }
    published = {tuple(item.place.split()) for item in load_published().tables if item.place[-1].isdigit()}
    assert published <= numbers
    assert {("Figure", "2"), ("Figure", "12"), ("Figure", "13")} <= numbers


def test_the_list_is_there_outside_a_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["paper"]) == 0
    shown = capsys.readouterr().out
    for item in ITEMS:
        assert f"{item.name:<20} {item.place}: {item.about}\n{'':<20} {item.needs}\n" in shown
    assert f"{'':<20} with Figure 11: mean entropy of the 24 orders\n" in shown
    assert shown.count("\n") == 2 * len(ITEMS) + 1


def test_a_wheel_carries_the_configurations() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert included == {paper.FOLDER: "trust_tta/assets/paper"}


def test_the_document_lists_the_experiments_as_they_are() -> None:
    """Run `python -m benchmarks.paper_page` after a configuration has changed."""
    page = PAGE.read_text(encoding="utf-8")
    assert fill(page) == page


def test_every_command_of_the_table_parses_at_both_scales() -> None:
    commands = re.findall(r"`(trust-tta [^`]+)`", markdown(ITEMS))
    assert len(commands) == len(ITEMS) + len(paper.RANKED)
    parser = build_parser()
    for command in commands:
        arguments = parser.parse_args(shlex.split(command)[1:])
        dataset = getattr(arguments, "data.dataset")
        changes = {"data": {"dataset": dataset}} if dataset else {}
        assert read_parts(ROOT / arguments.config, changes, small=False)
        small = parser.parse_args(shlex.split(re.sub(r" --dataset \S+", "", command))[1:] + ["--small"])
        assert read_parts(ROOT / small.config, {}, small=small.small)


def test_the_list_is_in_the_papers_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", "--configs", str(ROOT / paper.FOLDER)]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert listed == [item.name for item in ITEMS]
    assert [listed.index(n) for n in ("table1", "standard", "batch_size", "evaluation_order", "cost")] == sorted(
        listed.index(n) for n in ("table1", "standard", "batch_size", "evaluation_order", "cost")
    )


def test_a_run_makes_store_records_and_page(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", "--run", "standard", "--small", "--configs", str(folder)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^standard +\d+ s$", out, re.MULTILINE)
    with ResultStore(tmp_path / "small.sqlite", create=False) as store:
        assert [cell.key.method for cell in store.results()] == ["source", "trust"]
    assert [record.title for record in read_records([tmp_path / "small-orders"])] == ["fog"]
    page = (tmp_path / "small.html").read_text(encoding="utf-8")
    assert "Figure 9: a stand-in: of two methods" in page
    assert "entropy by order" in page


def test_missing_data_is_reported_and_leaves_no_page(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["paper", "--run", "plain", "--root", str(tmp_path / "nowhere"), "--configs", str(folder)]) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith(f"plain: {tmp_path}/nowhere is not a folder")
    assert not list(tmp_path.glob("*.html"))


def test_experiments_that_cannot_run_are_reported_at_the_end(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["paper", "--run", "--small", "--configs", str(folder)]) == 1
    out, err = capsys.readouterr()
    assert out.index("broken: Table 2") < out.index("standard: Figure 9")
    assert "broken: no checkpoint at" in out.splitlines()[-1]
    assert err.splitlines()[-1].endswith("1 of the tables and figures failed, for the reasons above")
    assert (tmp_path / "small.html").is_file()
    assert (tmp_path / "small3.html").is_file()
    assert not (tmp_path / "small2.html").exists()


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--run", "tabel1"], "--run tabel1: there is no such table or figure; choose one of broken, standard, plain"),
        (["--configs", "nowhere"], "no configurations in 'nowhere'"),
    ],
    ids=["a name", "a folder"],
)
def test_mistakes(folder: Path, arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", "--configs", str(folder), *arguments]) == 2
    assert part in capsys.readouterr().err


def test_a_configuration_without_its_two_lines_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "bare.toml").write_text("methods = []\n", encoding="utf-8")
    assert main(["paper", "--configs", str(folder)]) == 2
    assert "does not begin with '# PLACE: ABOUT'" in capsys.readouterr().err
