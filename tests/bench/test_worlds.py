"""The worlds benchmark (`benchmarks/worlds.py`): a small run on the shipped network, and its page."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from benchmarks.worlds import STREAMS, WORLDS, Row, accuracies, experiments, kept_rows, main, page_text, readme_text

from trust_tta.bench.config import RunConfig
from trust_tta.errors import ConfigError
from trust_tta.results import ResultStore


def _all(**changes: object) -> dict[str, list[RunConfig]]:
    arguments = argparse.Namespace(
        networks=Path("networks"), data=Path("data"), streams=list(STREAMS), methods=[], corruptions=[], images=None,
        seeds=2, device="cpu", store=Path("s.sqlite"),
    )  # fmt: skip
    vars(arguments).update(changes)
    return {name: experiments(arguments, name) for name in WORLDS}


def test_every_world_runs_source_bn_and_tide_with_two_seeds() -> None:
    for name, configs in _all().items():
        places = {config.experiment for config in configs}
        assert {place.split(" / ")[0] for place in places} == {name}
        for place in places:
            found = [c for c in configs if c.experiment == place]
            for method in ("source", "bn", "tide"):
                seeds = [c.stream.seeds for c in found if method in [m.name for m in c.methods]]
                assert sorted(seed for part in seeds for seed in part) == [0, 1]


def test_corruptions_methods_and_images_are_limited() -> None:
    chosen = _all(corruptions=["fog", "snow"], methods=["source", "trust"], images=64, seeds=1)
    nano = {config.experiment.split(" / ")[1]: config for config in chosen["shipped_nano"]}
    assert nano["online"].data.domains == ("fog", "snow")
    assert nano["clean"].data.domains == ("clean",)
    assert nano["interlude"].data.domains == ("fog", "clean", "snow")
    assert (nano["online"].data.limit, nano["batch1"].data.limit, nano["clean"].data.limit) == (64, 16, 128)
    assert [method.name for method in chosen["resnet56"][0].methods] == ["source"]  # no scan orders


def test_networks_and_images_lie_in_the_given_folders() -> None:
    chosen = _all(networks=Path("/nets"), data=Path("/images"))
    assert chosen["resnet56"][0].model.overrides == {"file": "/nets/resnet56_cifar10.th"}
    assert chosen["cifar100_layernorm"][0].model.checkpoint == "/nets/ln100.safetensors"
    assert chosen["cifar100_layernorm"][0].data.images == "/images/cifar100/test_images.npy"


def test_a_run_resumes_and_its_page_has_the_accuracies_of_the_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, page = tmp_path / "worlds.sqlite", tmp_path / "worlds.md"
    options = ["--worlds=shipped_nano,resnet56", "--methods=source,bn", "--streams=online", "--corruptions=fog"]
    command = [
        "run",
        *options,
        "--images=16",
        "--seeds=1",
        "--device=cpu",
        f"--store={store}",
        f"--networks={tmp_path}",
    ]
    assert main(command) == 1
    first = capsys.readouterr().out
    assert "there is no file" in first  # the network of one world is not there
    assert first.count("fog                 seed 0") == 2
    assert main(command) == 1
    assert "fog                 seed 0" not in capsys.readouterr().out
    assert main(["page", f"--store={store}", f"--out={page}"]) == 0
    with ResultStore(store, create=False) as found:
        values = {cell.key.method: 100 * cell.result.accuracy for cell in found.results()}
    gain = f"{values['bn'] - values['source']:+.1f}"
    assert f"| `bn` | {gain} | {gain} (shipped_nano, online) |" in page.read_text(encoding="utf-8")
    assert main([*command, "--images=8"]) == 1
    with pytest.raises(ConfigError, match="on different images"):
        main(["page", f"--store={store}", f"--out={page}"])


def test_gains_on_the_page_are_differences_of_accuracies() -> None:
    page = page_text({("resnet56", "online"): {"source": 0.5, "bn": 0.75, "tide": 0.7}}, measured="")
    assert "| resnet56, online | +20.0 | -5.0 (bn) |" in page
    assert "| `bn` | **75.0** (+25.0) |" in page
    assert accuracies([]) == {}


def test_earlier_rows_stay_unless_run_anew_or_of_another_network() -> None:
    def row(world: str, method: str, accuracy: float, samples: int = 64) -> Row:
        return Row(f"{world} / online", method, "fog", 0, 128, samples, accuracy)

    earlier = [row(world, method, 0.5) for world in ("resnet56", "mambavision") for method in ("source", "bn", "tide")]
    new = [row("resnet56", "tide", 0.7), row("mambavision", "source", 0.6), row("mambavision", "tide", 0.8)]
    earlier += [row("shipped_nano", method, 0.5) for method in ("source", "bn")]
    new.append(row("shipped_nano", "source", 0.501))
    found = accuracies([*new, *kept_rows(earlier, new)])
    assert found["shipped_nano", "online"] == {"source": 0.501, "bn": 0.5}
    assert found["resnet56", "online"] == {"source": 0.5, "bn": 0.5, "tide": 0.7}
    assert found["mambavision", "online"] == {"source": 0.6, "tide": 0.8}
    with pytest.raises(ConfigError, match="on different images"):
        accuracies([row("resnet56", "source", 0.5), row("resnet56", "tide", 0.7, samples=32)])


def test_readme_says_where_tide_is_behind() -> None:
    found = {
        ("resnet56", "online"): {"source": 0.5, "bn": 0.75, "tide": 0.7},
        ("resnet56", "clean"): {"source": 0.9, "bn": 0.85, "tide": 0.88},
    }
    text = readme_text(found, measured="8 images.")
    assert "+9.0 points over the untouched network on average, below it in 1, at the least -2.0 (" in text
    assert "ahead of the best other method in 0 of 2; at the least -5.0, against `bn` (" in text
    assert "| 50.0, **70.0**, 75.0 | 90.0, **88.0**, 85.0 |" in text
