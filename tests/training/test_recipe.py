from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.samples import tiny_network
from trust_tta.errors import ConfigError
from trust_tta.training.loop import (
    copy_buffers,
    decay_at,
    learning_rate,
    parameter_groups,
    set_drop_path,
    update_average,
)
from trust_tta.training.recipe import FinetuneRecipe, TrainRecipe, recipe_for, segmentation_recipe


def test_every_mistake_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        TrainRecipe(epochs=0, lr=-1.0, label_smoothing=1.0, cutmix=1.5, warmup_epochs=0, std=(1.0, 0.0, 1.0))
    message = str(caught.value)
    for words in ("epochs is 0", "lr is -1.0", "label_smoothing is 1.0", "cutmix is 1.5", "std.1 is 0.0"):
        assert words in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epochs": 2.5}, "epochs is 2.5; give an integer"),
        ({"lr": "fast"}, "lr is 'fast'; give a number"),
        ({"flip": 1}, "flip is 1; give true or false"),
        ({"seed": True}, "seed is True; give an integer"),
        ({"seed": 2**63}, "seed is 9223372036854775808; give a value <= 9223372036854775807"),
        ({"lr": math.nan}, "lr is nan; give"),
        ({"lr": math.inf}, "lr is inf; give a finite number"),
        ({"mean": (0.5, 0.5)}, "mean.2 is missing"),
        ({"precision": "bf1"}, "precision is 'bf1'; did you mean 'bf16'?"),
        ({"warmup_epochs": 200}, "warmup_epochs: 200 is more than the 100 epochs"),
        ({"epocs": 3}, "epocs: there is no such option; did you mean 'epochs'?"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_value_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe_for("cifar10", changes, where="recipe.toml")
    assert str(caught.value).startswith("recipe.toml: ")
    assert words in str(caught.value)


def test_lists_from_a_file_are_taken() -> None:
    assert recipe_for("cifar10", {"mean": [0.1, 0.2, 0.3]}).mean == (0.1, 0.2, 0.3)


def test_defaults_follow_data_size_and_epochs() -> None:
    assert recipe_for("cifar10") == TrainRecipe()
    photos = recipe_for("pacs", {"epochs": 8}, size=64)
    assert (photos.crop_padding, photos.cutout, photos.warmup_epochs) == (8, 16, 2.0)
    assert photos.mean == (0.485, 0.456, 0.406)
    assert recipe_for("pacs", {"cutout": 3}).cutout == 3


def test_the_committed_recipes_are_valid() -> None:
    files = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))
    assert files
    for file in files:
        given = tomllib.loads(file.read_text())
        made = segmentation_recipe(given) if file.name == "camvid.toml" else recipe_for("pacs", given, where=file.name)
        recipe = made.model_dump(mode="json")
        assert {name: recipe[name] for name in given} == given


def test_the_papers_fine_tuning_is_the_default() -> None:
    assert FinetuneRecipe.defaults() == {"epochs": 300, "lr": 5e-4, "batch_size": 128, "seed": 0, "weight_decay": 0.0}


def test_the_plain_epochs_are_the_last() -> None:
    assert TrainRecipe(epochs=50, plain_share=0.1).plain_from == 45
    assert TrainRecipe(epochs=50, plain_share=0.0).plain_from == 50


def test_learning_rate_rises_in_a_line_and_falls_as_a_cosine() -> None:
    recipe = TrainRecipe(epochs=10, warmup_epochs=2, lr=0.3)
    rates = [learning_rate(step, 7, recipe) for step in range(71)]
    assert rates[:14] == pytest.approx([0.3 * i / 14 for i in range(1, 15)])
    assert rates[14] == 0.3
    assert rates[42] == pytest.approx(0.15)  # half way from step 14 to 70
    assert rates[28] == pytest.approx(0.15 * (1 + math.sqrt(0.5)))
    assert rates[70] == pytest.approx(0, abs=1e-12)


def test_no_warmup_starts_at_the_full_rate() -> None:
    assert learning_rate(0, 7, TrainRecipe(warmup_epochs=0, lr=0.3)) == 0.3


def test_warmup_over_all_epochs_never_divides_by_zero() -> None:
    recipe = TrainRecipe(epochs=2, warmup_epochs=2, lr=0.3)
    assert [learning_rate(i, 2, recipe) for i in range(4)] == pytest.approx([0.075, 0.15, 0.225, 0.3])


def test_only_weights_decay() -> None:
    model = tiny_network()
    decayed, free = parameter_groups(model, 0.05)
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.05, 0.0)
    names = {id(p): name for name, p in model.named_parameters()}
    found = {names[id(p)] for p in decayed["params"]}
    block = {"op.in_proj", "op.conv2d", "op.out_proj", "mlp.fc1", "mlp.fc2"}
    scan = {"op.x_proj_weight", "op.dt_projs_weight"}
    expected = {f"layers.{i}.blocks.0.{name}.weight" for i in (0, 1) for name in block}
    expected |= {f"layers.{i}.blocks.0.{name}" for i in (0, 1) for name in scan}
    expected |= {"patch_embed.0.weight", "layers.0.downsample.1.weight", "classifier.head.weight"}
    assert found == expected
    assert {names[id(p)] for p in free["params"]} == set(names.values()) - expected


def test_frozen_parameters_are_in_no_group() -> None:
    model = tiny_network().requires_grad_(False)
    model.classifier.head.requires_grad_(True)
    groups = parameter_groups(model, 0.05)
    assert [len(group["params"]) for group in groups] == [1, 1]


def test_average_is_the_geometric_sum() -> None:
    model, average = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    start = average.weight.detach().double()
    seen = []
    for i in range(5):
        with torch.no_grad():
            model.weight.fill_(i * 1.5 - 2)
        seen.append(model.weight.detach().double().clone())
        update_average(average, model, 0.7)
    expected = 0.7**5 * start + sum(0.3 * 0.7 ** (4 - i) * weight for i, weight in enumerate(seen))
    torch.testing.assert_close(average.weight.detach().double(), expected, rtol=0, atol=1e-6)


def test_decay_starts_low_and_zero_decay_copies() -> None:
    assert [decay_at(step, 0.9) for step in (0, 8, 10**6)] == [0.1, 0.5, 0.9]
    model, average = tiny_network(1), tiny_network(2)
    model.patch_embed[2].running_mean.fill_(7)  # type: ignore[operator]
    update_average(average, model, decay_at(0, 0.0))
    copy_buffers(average, model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, average.state_dict()[name]), name


def test_stochastic_depth_rises_from_zero() -> None:
    model = tiny_network()
    set_drop_path(model, 0.4)
    rates = [m.rate for m in model.modules() if type(m).__name__ == "StochasticDepth"]
    assert rates == [0.0, 0.4]


def test_huge_numbers_of_epochs_are_refused() -> None:
    with pytest.raises(ConfigError, match="epochs is "):
        recipe_for("cifar10", {"epochs": 10**400})
