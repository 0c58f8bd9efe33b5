"""Labeled pixels on the page: the IoU of each class, pictures under a slider, and the paper's Table 7."""

from __future__ import annotations

import importlib
import io
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.report.browser import CHROMIUM, browse
from tests.segmentation.test_bench import config_of
from trust_tta.bench.config import RunConfig
from trust_tta.bench.metrics import PixelMeter, mask_picture
from trust_tta.bench.sweep import sweep
from trust_tta.data.segmentation_metrics import IGNORED, count_confusion
from trust_tta.report.model import Report, read_report
from trust_tta.report.page import write_page
from trust_tta.report.paper import compare, load_published
from trust_tta.report.samples import galleries, legend
from trust_tta.report.tables import class_table, paper_domains_table, paper_table
from trust_tta.results import ResultStore


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    folder = tmp_path_factory.mktemp("pixels")
    config: RunConfig = config_of(folder, domains=["clean", "fog"])
    methods = tuple(method.changed(options={}) for method in config.methods)
    config = config.changed(keep_samples=2, experiment="table7", methods=methods)
    with ResultStore(config.store) as store:
        sweep(config, store)
    return read_report(config.store)


def test_class_table_sums_the_pixels_of_all_domains(report: Report) -> None:
    (group,) = report.groups
    table = class_table(group, report.class_names[group.dataset])
    assert table is not None
    assert [column.title for column in table.columns[:5]] == [
        "method", "mean Dice", "pixel accuracy", "sky", "building",
    ]  # fmt: skip
    for line in table.rows:
        assert line.variant is not None
        cells = group.cells_of(line.variant.label)
        counts = np.sum([np.array(cell.result.pixels) for cell in cells], axis=0)
        with np.errstate(invalid="ignore"):
            ious = counts[:, 0] / (counts[:, 1] + counts[:, 2] - counts[:, 0])
        shown = [np.nan if entry.value is None else entry.value for entry in line.cells[2:]]
        np.testing.assert_allclose(shown, ious)
        dices = []
        for cell in cells:
            right, predicted, labeled = np.array(cell.result.pixels).T
            with np.errstate(invalid="ignore"):
                dices.append(np.nanmean(2 * right / (predicted + labeled)))
        assert line.cells[0].value == pytest.approx(np.mean(dices))


def test_kept_masks_have_the_class_colors(report: Report) -> None:
    (group,) = report.groups
    found = galleries(group, report, "masks", 1)
    assert [gallery.name for gallery in found] == ["clean", "fog"]
    assert legend(group, report)[0] == ("rgb(128, 128, 128)", "sky")
    ((index, picture),) = found[0].pictures.items()
    assert picture is not None
    samples = found[0].samples[index]
    truth = np.array(Image.open(io.BytesIO(samples[0][1].truth)))
    assert {*np.unique(truth)} == {0, 1, 7, IGNORED}
    assert {variant.method for variant, _ in samples} == {"source", "tent", "trust", "tide"}
    trust = next(sample for variant, sample in samples if variant.method == "trust")
    assert trust.before is not None
    assert Image.open(io.BytesIO(trust.before)).size == Image.open(io.BytesIO(trust.after)).size == truth.shape[::-1]


def test_large_masks_are_scaled_down_by_nearest_neighbor() -> None:
    mask = torch.arange(4).repeat_interleave(100).expand(50, -1)
    small = Image.open(io.BytesIO(mask_picture(mask, np.eye(4, 3, dtype=np.uint8))))
    assert small.size == (160, 20)
    assert {*np.unique(np.array(small))} == {0, 1, 2, 3}
    colored = Image.open(io.BytesIO(mask_picture(mask, np.full((4, 3), 7, np.uint8))))
    assert (colored.getpalette() or [])[:12] == [7] * 12


def test_the_slider_divides_before_from_after(report: Report, tmp_path: Path) -> None:
    if not CHROMIUM.exists():
        pytest.skip("no Chromium")
    page = tmp_path / "page.html"
    write_page(report, page)
    assert "Mean IoU in percent" in page.read_text()
    found = browse(
        page,
        """const input = document.querySelector(".halves input"), over = document.querySelector(".halves .over");
        const before = getComputedStyle(over).clipPath;
        input.value = 20; input.dispatchEvent(new Event("input"));
        return [before, getComputedStyle(over).clipPath, all(".masks img").every((i) => i.src.startsWith("data:")),
          all(".masks").length];""",
        tmp_path / "profile",
    )
    assert found[0] != found[1]
    assert re.search(r"80%", found[1])
    assert found[2:] == [True, 4]


def test_published_trust_is_below_source_in_nine_cells(report: Report) -> None:
    below = {t.dataset: t.below_source() for t in load_published().tables if t.place == "Table 7"}
    assert below["voc21"] == {"frost", "fog", "brightness", "jpeg_compression"}
    assert below["context59"] == {"defocus_blur", "frost", "fog", "brightness", "jpeg_compression"}


def test_camvid_is_compared_with_table_7(report: Report) -> None:
    (group,) = report.groups
    (found,) = compare(group)
    assert "Table 7" in paper_table(group, found).caption
    domains = paper_domains_table(group, found)
    published = {
        line.name: line.cells[1].text + line.cells[1].mark for line in domains.rows if line.cells[0].text == "published"
    }
    assert published == {"tent": "60.2", "trust": "63.4 ▼"}
    assert "▼" in domains.caption


# an independent package


def test_the_mean_iou_is_that_of_torchmetrics() -> None:
    try:
        torchmetrics = importlib.import_module("torchmetrics.functional.classification")
    except (ImportError, RuntimeError) as error:  # absent, or together with a torchvision that does not fit PyTorch
        pytest.skip(f"torchmetrics cannot be imported ({error})")
    draw = torch.Generator().manual_seed(0)
    meter = PixelMeter(classes=6)
    logits, labels = torch.randn(4, 6, 9, 11, generator=draw), torch.randint(0, 6, (4, 9, 11), generator=draw)
    labels[:, 0] = IGNORED
    meter.update(logits, labels)
    options = {"num_classes": 6, "ignore_index": IGNORED}
    theirs = torchmetrics.multiclass_jaccard_index(logits.argmax(1), labels, average="none", **options)
    torch.testing.assert_close(meter.batches[0].confusion.iou.float(), theirs)
    dice = torchmetrics.multiclass_f1_score(logits.argmax(1), labels, average="none", **options)
    torch.testing.assert_close(count_confusion(logits.argmax(1), labels, classes=6).dice.float(), dice)
    assert meter.accuracy == pytest.approx(float(theirs.mean()), abs=1e-6)
