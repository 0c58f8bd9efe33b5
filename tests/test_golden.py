from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests import golden

COMMITTED = Path(__file__).resolve().parent / "golden"


@pytest.mark.parametrize(
    "name", ["tta_bn.npz", "vssm_ln2d.npz", "newer/eata.npz", "networks/vim_square.npz", "segmentation/metrics.npz"]
)
def test_a_clone_alone_has_the_files_that_promises_rest_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRUST_TTA_GOLDEN", raising=False)
    monkeypatch.setattr(golden, "BESIDE", Path("nowhere"))
    assert golden.golden_path(name) == COMMITTED / name
    assert golden.load_golden(name)


def test_the_environment_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "newer").mkdir()
    np.savez(tmp_path / "newer" / "eata.npz", x=np.arange(3))
    monkeypatch.setenv("TRUST_TTA_GOLDEN", str(tmp_path))
    assert golden.load_golden("newer/eata.npz")["x"].tolist() == [0, 1, 2]


def test_what_is_nowhere_is_skipped_with_the_places() -> None:
    with pytest.raises(
        pytest.skip.Exception, match=r"in none of \$TRUST_TTA_GOLDEN, ../shared/golden and tests/golden"
    ):
        golden.golden_path("newer/nothing.npz")


def test_all_files_together_stay_small() -> None:
    assert sum(file.stat().st_size for file in COMMITTED.rglob("*") if file.is_file()) < 32 * 2**20
