"""Tables and headings of the documents that repeat what the code knows."""

from __future__ import annotations

import re

import pytest
from benchmarks.commands_page import fill

from tests.docs.pages import DOCS, PAGES, sections, table_rows
from trust_tta.bench.config import DataConfig
from trust_tta.cli.main import COMMANDS
from trust_tta.data.registry import DATASETS
from trust_tta.data.streams import SETTINGS
from trust_tta.methods.registry import list_methods
from trust_tta.models.pretrained import PRETRAINED


def test_every_command_has_a_section_with_an_example() -> None:
    written = sections(DOCS / "reference" / "commands.md")
    assert list(written) == list(COMMANDS)
    for name, text in written.items():
        assert re.search(rf"^(\w+=\S+ )?trust-tta {name}\b", text, re.MULTILINE), name


def test_every_flag_is_in_the_table_of_its_command() -> None:
    """Run `python -m benchmarks.commands_page` after a flag has changed."""
    page = (DOCS / "reference" / "commands.md").read_text(encoding="utf-8")
    assert fill(page) == page
    assert re.findall(r"<!-- flags: (\w+) -->", page) == list(COMMANDS)


VMAMBAS = {known for known in PRETRAINED.values() if "_vmamba" in f"_{known.variant}"}


def test_the_page_of_checkpoints_lists_those_of_vmamba() -> None:
    rows = table_rows(sections(DOCS / "guides" / "checkpoints.md")["A published VMamba"])
    written = {row[0].strip("`"): (float(row[1].split()[0]), row[2]) for row in rows}
    assert written == {known.name: (known.accuracy, known.license) for known in VMAMBAS}


def test_the_page_of_the_networks_lists_their_checkpoints() -> None:
    rows = table_rows(sections(DOCS / "guides" / "networks.md")["Published files"])
    written = {row[0].strip("`"): (float(row[1].split()[0]), row[2]) for row in rows}
    others = set(PRETRAINED.values()) - VMAMBAS
    assert written == {known.name: (known.accuracy, known.license or "not stated") for known in others}


def test_requirements_on_networks_cover_every_method() -> None:
    rows = table_rows(sections(DOCS / "guides" / "checkpoints.md")["Your own network"])
    named = re.findall(r"`(\w+)`", " ".join(row[0] for row in rows))
    assert set(named) == set(list_methods()) - {"trust_naive", "ensemble", "repetition", "augmentation"}


def test_settings() -> None:
    rows = table_rows(sections(DOCS / "reference" / "protocol.md")["Settings"])
    assert [row[0].strip("`") for row in rows] == list(SETTINGS)


def test_layouts_of_the_page_are_those_of_the_registry() -> None:
    rows = table_rows(sections(DOCS / "guides" / "adding_a_dataset.md")["5. A data set of the package"])
    assert {row[0].strip("`") for row in rows} == {spec.layout for spec in DATASETS}


@pytest.mark.parametrize("name", ["sample", "array", "folder", "folder-c"])
def test_data_sets_that_the_pages_use_exist(name: str) -> None:
    file = "x.npy" if name == "array" else None
    assert DataConfig(dataset=name, images=file, labels=file).corrupts or name in {spec.name for spec in DATASETS}


def test_documents_import_public_names_only() -> None:
    """A page imports from the package, from one of its packages or shared modules, not from a file deeper inside."""
    for page in PAGES:
        inner = re.findall(r"^from trust_tta\.\w+\.[\w.]+ import .+", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert inner == [], page
