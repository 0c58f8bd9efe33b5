from __future__ import annotations

import json
from importlib import resources

from trust_tta.models.checkpoint import Checkpoint
from trust_tta.models.pretrained import PRETRAINED
from trust_tta.training.card import model_card


def test_the_shipped_card_is_made_from_the_shipped_record_and_file() -> None:
    known = PRETRAINED["vmamba_nano_cifar10"]
    assets = resources.files("trust_tta") / "assets"
    course = json.loads((assets / "vmamba_nano_cifar10.json").read_text())
    assert Checkpoint.open(known.name).sha256 == course["sha256"]
    assert known.accuracy == round(100 * course["accuracy"]["exported_file"], 2)
    card = (assets / "vmamba_nano_cifar10.md").read_text()
    assert card == model_card(course, name=known.name, data="CIFAR-10 (Krizhevsky, 2009)", licence=known.license)
