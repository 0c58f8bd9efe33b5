"""timm's networks in ours, and ours in timm's, with the real library."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import trust_tta as tt
from tests.docs.pages import DOCS, blocks
from tests.libraries import import_timm
from trust_tta.cli.main import main
from trust_tta.errors import ConfigError, TrustWarning
from trust_tta.methods import gather_source_statistics
from trust_tta.methods.features import features_and_logits
from trust_tta.methods.parameters import select
from trust_tta.methods.prompts import take_prompts
from trust_tta.methods.registry import method_options
from trust_tta.models.checkpoint import Checkpoint
from trust_tta.preprocessing import CIFAR10_MEAN

timm: Any = import_timm()
doors: Any = pytest.importorskip("trust_tta.timm")

LITTLE: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {"img_size": 64, "depth": 4},
    "convnext_atto": {"depths": (1, 1, 1, 1)},
    "resnet50_gn": {"layers": (1, 1, 1, 1)},
}
NETWORKS = ("resnet10t", "vit_tiny_patch16_224", "convnext_atto", "resnet50_gn", "resnetv2_50x1_bit", "efficientnet_b0")
NEED_MORE = {
    "trust",
    "trust_naive",
    "ensemble",
    "repetition",
    "augmentation",
    "foa",
    "dpcore",
}  # orders, or a place for prompts
SMALL: dict[str, dict[str, Any]] = {
    "vmamba_tiny_s1l8_bn": {"depths": (1, 1), "dims": (8, 16)},
    "vim_tiny": {"img_size": 32, "patch_size": 8, "stride": 8, "dim": 24, "depth": 2},
    "groupmamba_tiny": {"dims": (16, 32), "depths": (1, 1), "mlp_ratios": (2, 2), "stem_dim": 8},
    "localvmamba_tiny": {"dims": (8, 16), "depths": (1, 1), "directions": (("h", "h_flip", "w2", "w2_flip"),) * 2},
    "localvim_tiny": {
        "img_size": 32, "patch_size": 8, "stride": 8, "dim": 24, "depth": 2,
        "directions": (("h", "h_flip", "w2", "w2_flip"),) * 2,
    },
    "msvmambav3_tiny": {"depths": (1, 1), "dims": (8, 16)},
    "efficientvmamba_tiny": {"depths": (1, 1, 1), "dims": (8, 16, 24)},
    "spatialmamba_tiny": {"depths": (1, 1), "dims": (8, 16)},
    "vssd_micro": {
        "depths": (1, 1, 1), "dims": (8, 16, 32), "heads": (1, 2, 2), "attention": (False, False, True), "d_state": 4,
    },
    "mambavision_tiny": {
        "dim": 8, "stem_dim": 4, "depths": (1, 1, 2), "windows": (8, 8, 2), "heads": (1, 1, 2),
    },
}  # fmt: skip


def theirs(name: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    if name == "resnetv2_50x1_bit":  # little, it has no name: GroupNorms, and a convolution as classifier
        from timm.models.resnetv2 import ResNetV2

        little: nn.Module = ResNetV2(layers=(1, 1, 1, 1), num_classes=5, stem_type="fixed")
        return little.eval()
    network: nn.Module = timm.create_model(name, num_classes=5, **LITTLE.get(name, {}), **options)
    return network.eval()


def images(count: int = 8, size: int = 64) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "name",
    ["resnet10t", "vit_tiny_patch16_224", "convnext_atto", pytest.param("resnetv2_50x1_bit", marks=pytest.mark.slow)],
)
def test_every_method_takes_them(name: str) -> None:
    options: dict[str, dict[str, Any]] = {"cotta": {"augmentations": 2}, "eata": {}}
    for method in sorted(set(tt.list_methods()) - NEED_MORE):
        network = theirs(name)
        if method == "eata":
            from trust_tta.methods.source_data import gather_fisher

            options["eata"] = {"fisher": gather_fisher(network, [images(4)])}
        adapted = tt.create_method(method, network, **options.get(method, {}))
        before = adapted(images(4))
        assert before.shape == (4, 5), method
        assert torch.isfinite(before).all(), method
        adapted.reset()
        assert torch.equal(adapted(images(4)), before), f"{method}: reset is not bit for bit"


@pytest.mark.parametrize("name", sorted(NEED_MORE - {"foa", "dpcore"}))
def test_methods_that_need_more_say_so(name: str) -> None:
    with pytest.raises(ConfigError, match="ResNet has no"):
        tt.create_method(name, theirs("resnet10t"))


class Hooked:
    """A ViT with prompts by hooks alone: in before the first norm, out after the last block."""

    def __init__(self, network: Any, prompts: Tensor) -> None:
        self.network, self.layers, blocks = network, list[Tensor](), network.blocks
        self.prefix, self.count, self.prompts = network.num_prefix_tokens, len(prompts), prompts
        norms = [*(block.norm1 for block in blocks[1:]), network.norm]
        self.handles = [network.norm_pre.register_forward_pre_hook(lambda m, given: (self.put(given[0]),))]
        self.handles += [b.register_forward_hook(self.keep(norm)) for b, norm in zip(blocks, norms, strict=True)]
        self.handles += [network.norm.register_forward_pre_hook(lambda m, given: (self.take(given[0]),))]

    def put(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, : self.prefix], self.prompts.expand(len(x), -1, -1), x[:, self.prefix :]], dim=1)

    def take(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, : self.prefix], x[:, self.prefix + self.count :]], dim=1) if x.dim() == 3 else x

    def keep(self, norm: Any) -> Any:
        def hook(module: nn.Module, given: Any, out: Tensor) -> None:
            self.layers.append(norm(out[:, 0] if self.network.cls_token is not None else self.take(out).mean(1)))

        return hook

    def run(self, given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens of all layers, pooled features, logits."""
        features = self.network.forward_features(given)
        pooled, logits = self.network.forward_head(features, pre_logits=True), self.network.forward_head(features)
        for handle in self.handles:
            handle.remove()
        return torch.cat(self.layers, dim=1), pooled, logits


VITS: dict[str, dict[str, Any]] = {
    "class token": {},
    "mean token": {"class_token": False, "global_pool": "avg", "fc_norm": True},
    "registers, norm before": {"reg_tokens": 2, "pre_norm": True, "no_embed_class": True},
}


@pytest.mark.parametrize("kind", VITS)
def test_prompts_follow_the_class_token_of_a_vit(kind: str) -> None:
    network = theirs("vit_tiny_patch16_224", **VITS[kind])
    prompts = torch.randn(3, 192, generator=torch.Generator().manual_seed(2))
    prompted = take_prompts(network)
    with torch.no_grad():
        seen = prompted.forward(prompted.embed(images(4)), prompts)
        layers, pooled, logits = Hooked(network, prompts).run(images(4))
    torch.testing.assert_close(seen.layers, layers, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(seen.features, pooled, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(prompted.classify(seen.features), logits, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits, network(images(4)), atol=1e-3)
    plain = prompted.forward(prompted.embed(images(4)))
    torch.testing.assert_close(prompted.classify(plain.features), network(images(4)))


def test_foa_searches_tokens_of_a_vit_without_gradients() -> None:
    network = theirs("vit_tiny_patch16_224")
    before = {name: value.clone() for name, value in network.state_dict().items()}
    statistics = gather_source_statistics(network, [images(8, size=64)])
    method: Any = tt.create_method("foa", network, source_statistics=statistics, population=4)
    run_with_grad: list[bool] = []
    method.model.blocks[0].register_forward_hook(lambda *_: run_with_grad.append(torch.is_grad_enabled()))
    shifted = 2 * images(6) + 1
    first, second = method(shifted), method(shifted)
    assert first.shape == (6, 5)
    assert method.search.best.shape == (3 * 192,)
    assert method.search.told.shape == (2, 5)
    assert method.search.told[1].min() <= method.search.told[0].min()  # the last best competes
    assert not torch.equal(first, second)
    assert run_with_grad
    assert not any(run_with_grad)
    assert method.counters.backwards == 0
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())
    method.reset()
    assert torch.equal(method(shifted), first)


def test_dpcore_learns_tokens_of_a_vit() -> None:
    network = theirs("vit_tiny_patch16_224")
    before = {name: value.clone() for name, value in network.state_dict().items()}
    statistics = gather_source_statistics(network, [images(16)], statistics="source")
    method: Any = tt.create_method("dpcore", network, source_statistics=statistics, new_steps=8, rho=0.999)
    shifted = 2 * images(6) + 1
    x = take_prompts(method.model).embed(shifted)
    start = method.first_prompt(shifted, x)
    bound = (6 / (3 * 16 * 16 + 192)) ** 0.5
    assert start.shape == (8 * 192,)
    assert 0.99 * bound < start.abs().max() <= bound
    first = method(shifted)
    assert first.shape == (6, 5)
    learned = method.coreset[0, 2 * 192 :]
    assert (learned - start).abs().min() > 0
    with torch.no_grad():
        assert method.distance(method.forward_stats(x, learned)) < method.distance(method.forward_stats(x, start))
        assert method.distance(method.forward_stats(x, learned)) < method.distance(method.forward_stats(x))
    method(shifted)
    assert len(method.coreset) == 1
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())
    method.reset()
    assert torch.equal(method(shifted), first)


def test_prompts_of_networks_with_two_classifiers_are_refused_in_one_line() -> None:
    with torch.device("meta"):
        network = timm.create_model("deit_tiny_distilled_patch16_224")
    for method in ("foa", "dpcore"):
        with pytest.raises(ConfigError, match="needs one linear classifier") as found:
            tt.create_method(method, network)
        assert "\n" not in str(found.value)


@pytest.mark.parametrize("name", NETWORKS)
def test_features_classify_as_the_network_does(name: str) -> None:
    network = theirs(name)
    with torch.no_grad():
        features, logits = features_and_logits(network, images(3))
        assert features.shape == (3, network.num_features)
        torch.testing.assert_close(logits, network(images(3)))
    neo = tt.create_method("neo", network, alpha=0.0)  # nothing moves: the network's own logits
    torch.testing.assert_close(neo(images(3)), logits)


def test_lame_propagates_over_their_pooled_features() -> None:
    network = theirs("resnet10t")
    features = network.forward_head(network.forward_features(images()), pre_logits=True)  # type: ignore[operator]
    from trust_tta.methods.lame import propagate, rbf

    normal = nn.functional.normalize(features.double(), dim=1).detach()
    expected = propagate(network(images()).detach().double().log_softmax(1), rbf(normal, 5))
    got = tt.create_method("lame", network, statistics="source")(images())
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["sar", "deyo"])
@pytest.mark.parametrize(
    ("name", "kept", "left_out"),
    [
        ("resnet18", ["layer3.1.bn2.weight", "bn1.bias"], ["layer4."]),
        ("resnet50_gn", ["layer3.5.bn3.weight", "bn1.weight"], ["layer4."]),
        ("vit_base_patch16_224", ["blocks.8.norm2.weight"], ["blocks.9.", "blocks.10.", "blocks.11.", "norm."]),
        ("convnext_atto", ["stages.2.blocks.0.norm.weight"], ["stages.3.", "head.norm."]),
        ("resnetv2_50x1_bit", ["stages.2.blocks.0.norm1.weight"], ["stages.3.", "norm."]),
    ],
)
def test_the_last_layers_are_left_out_as_the_authors_do(
    method: str, name: str, kept: list[str], left_out: list[str]
) -> None:
    with torch.device("meta"):
        network = timm.create_model(name)
    assert method_options(method)["skip_last"]
    chosen = select(network, "bn", skip_last=True)
    assert set(kept) <= set(chosen)
    assert not [n for n in chosen if n.startswith(tuple(left_out))]
    dropped = set(select(network, "bn")) - set(chosen)
    assert dropped
    assert all(n.startswith(tuple(left_out)) for n in dropped)


def test_a_norm_of_theirs_that_is_none_of_pytorchs_is_adapted() -> None:
    from timm.layers import RmsNorm

    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), RmsNorm(4), nn.Linear(4, 3))
    assert select(network, "bn") == ["2.weight"]


@pytest.mark.parametrize("method", ["tide", "bn_alpha", "bn_ema", "rotta"])
def test_norms_that_hold_an_activation_keep_it(method: str) -> None:
    """EfficientNet's BatchNorms apply SiLU themselves: statistics of ours in their place do, too."""
    network = theirs("efficientnet_b0")
    with torch.no_grad():
        expected = network(images(4)).log_softmax(1)
    adapted = tt.create_method(method, network)
    torch.testing.assert_close(adapted.model(images(4)).log_softmax(1).detach(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["resnet18", "convnext_atto", "vit_tiny_patch16_224", "mobilenetv3_small_050"])
def test_pixels_become_what_their_transform_makes(name: str) -> None:
    network: Any = tt.create_model(f"timm:{name}", num_classes=5)
    pixels = np.random.default_rng(0).integers(0, 256, (300, 260, 3), dtype=np.uint8)
    from PIL import Image

    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(network))
    wanted = transform(Image.fromarray(pixels))
    torch.testing.assert_close(network.preprocessing(pixels)[0], wanted, rtol=0, atol=1e-5)
    small: Any = tt.create_model("timm:vit_tiny_patch16_224", img_size=64)
    assert small.preprocessing.size == 64


def test_unknown_names_and_random_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match="timm has no network 'resnet1818'; did you mean"):
        tt.create_model("timm:resnet1818")
    with pytest.raises(ConfigError, match="'timm:resnet18' has random weights; override it with pretrained = true"):
        Checkpoint.open(None, variant="timm:resnet18")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("timm") / "resnet10t.pth"
    torch.manual_seed(0)
    torch.save(timm.create_model("resnet10t", num_classes=10).state_dict(), file)
    return file


def test_bench_runs_them_by_toml_and_by_flags(weights: Path, tmp_path: Path) -> None:
    toml = tmp_path / "theirs.toml"
    toml.write_text(
        f'methods = ["source", "lame"]\nstore = "{tmp_path / "a.sqlite"}"\n[model]\nname = "timm:resnet10t"\n'
        f'[model.overrides]\npretrained = true\npretrained_cfg_overlay = {{file = "{weights}", num_classes = 10}}\n'
        "[model.preprocessing]\nsize = 32\nmean = [0.485, 0.456, 0.406]\nstd = [0.229, 0.224, 0.225]\n"
        '[data]\ndataset = "sample"\ndomains = ["fog"]\nlimit = 16\n[stream]\nbatch_size = 16\n'
    )
    assert main(["bench", str(toml), "--export", str(tmp_path / "a.csv"), "--device", "cpu"]) == 0
    flags = ["--model", "timm:resnet10t", "--checkpoint", str(weights), "--num-classes", "10"]
    data = ["--dataset", "sample", "--domains", "fog", "--limit", "16", "--batch-size", "16", "--device", "cpu"]
    out = ["--store", str(tmp_path / "b.sqlite"), "--export", str(tmp_path / "b.csv")]
    assert main(["bench", "--methods", "source,sar", *flags, "--override", "drop_path_rate=0.0", *data, *out]) == 0
    toml_rows, flag_rows = (list(csv.DictReader((tmp_path / f"{name}.csv").read_text().splitlines())) for name in "ab")
    assert [row["method"] for row in toml_rows] == ["source", "lame"]
    assert [row["method"] for row in flag_rows] == ["source", "sar"]


def test_bench_gathers_clean_statistics_for_prompts(tmp_path: Path) -> None:
    little: dict[str, Any] = {"img_size": 32, "depth": 2, "num_classes": 10}
    file = tmp_path / "vit.pth"
    torch.save(timm.create_model("vit_tiny_patch16_224", **little).state_dict(), file)
    flags = ["--model", "timm:vit_tiny_patch16_224", "--checkpoint", str(file), "--num-classes", "10"]
    flags += ["--override", "img_size=32", "--override", "depth=2", "--device", "cpu"]
    data = ["--dataset", "sample", "--domains", "fog", "--limit", "16", "--batch-size", "16"]
    few = ["--option", "foa.population=4", "--option", "dpcore.new_steps=2"]
    out = ["--store", str(tmp_path / "a.sqlite"), "--export", str(tmp_path / "a.csv")]
    assert main(["bench", "--methods", "source,foa,dpcore", *flags, *data, *few, *out]) == 0
    rows = list(csv.DictReader((tmp_path / "a.csv").read_text().splitlines()))
    assert {row["method"]: row["forwards"] for row in rows} == {"source": "1", "foa": "5", "dpcore": "4"}


@pytest.mark.parametrize("name", sorted(SMALL))
def test_timm_makes_our_networks(name: str) -> None:
    torch.manual_seed(0)
    made: Any = timm.create_model(name, num_classes=5, **SMALL[name]).eval()
    ours = {doors._FIELDS.get(key, key): value for key, value in SMALL[name].items()}
    if "image_size" in ours:
        ours["image_size"] = (32, 32)
    plain = tt.create_model(name, num_classes=5, **ours).eval()
    plain.load_state_dict(made.state_dict())
    x = images(2, 32)
    with torch.no_grad():
        assert torch.equal(made(x), plain(x))
        torch.testing.assert_close(made.forward_head(made.forward_features(x)), plain(x))
        pooled = made.forward_head(made.forward_features(x), pre_logits=True)
        torch.testing.assert_close(pooled, plain.forward_features(x))  # type: ignore[operator]
        other = made.scan_orders[-1]
        assert torch.equal(made(x, order=other), plain(x, order=other))
    from timm.optim import create_optimizer_v2

    made.reset_classifier(0)
    torch.testing.assert_close(made(x), pooled)
    made.reset_classifier(7)
    assert made(x).shape == (2, 7)
    assert tt.create_method("tide", made)(x).shape == (2, 7)
    assert create_optimizer_v2(made, opt="adamw", weight_decay=0.1, layer_decay=0.9)


@pytest.mark.parametrize("name", sorted(SMALL))
def test_features_are_the_maps_of_the_stages(name: str) -> None:
    torch.manual_seed(0)
    found: Any = timm.create_model(name, features_only=True, out_indices=(0, 1), **SMALL[name]).eval()
    with torch.no_grad():
        maps = found(images(2, 32))
    assert [m.shape[1] for m in maps] == found.feature_info.channels()
    assert [32 // m.shape[2] for m in maps] == found.feature_info.reduction()
    whole: Any = timm.create_model(name, **SMALL[name]).eval()
    whole.load_state_dict(found.model.state_dict())
    with torch.no_grad():
        last, inner = whole.forward_intermediates(images(2, 32))
        assert torch.equal(inner[0], maps[0])
        if last.dim() == 4:
            assert torch.equal(inner[-1], last)
        (channels_last,) = whole.forward_intermediates(
            images(2, 32), indices=1, output_fmt="NHWC", intermediates_only=True
        )
    assert torch.equal(channels_last.permute(0, 3, 1, 2), inner[-1])


def test_our_weights_come_through_our_reader() -> None:
    made: Any = timm.create_model("vmamba_nano", pretrained=True).eval()
    ours = tt.create_model("vmamba_nano", checkpoint="vmamba_nano_cifar10")
    with torch.no_grad():
        assert torch.equal(made(images(2, 32)), ours(images(2, 32)))
    assert (made.classes, made.preprocessing) == (ours.classes, ours.preprocessing)
    cfg = timm.data.resolve_model_data_config(made)
    assert (cfg["input_size"], cfg["mean"], cfg["crop_mode"]) == ((3, 32, 32), CIFAR10_MEAN, "squash")
    fresh: Any = timm.create_model("vmamba_nano", pretrained=True, num_classes=3)
    assert fresh.get_classifier().out_features == 3
    assert torch.equal(fresh.layers[0].blocks[0].op.Ds, made.layers[0].blocks[0].op.Ds)


def test_the_license_of_our_weights_is_reported(tmp_path: Path) -> None:
    made: Any = timm.create_model("mambavision_tiny", **SMALL["mambavision_tiny"])
    file = tmp_path / "mambavision_tiny_1k.pth.tar"
    torch.save(made.state_dict(), file)
    with pytest.warns(TrustWarning, match="CC-BY-NC-SA-4.0, forbids commercial use"):
        made.load_pretrained(str(file))
    assert made.license == "CC-BY-NC-SA-4.0"


def test_every_classifier_of_ours_is_registered() -> None:
    registered = set(timm.list_models(module="timm"))  # the last part of the module's name
    assert registered == set(doors.OURS) == {n for n in tt.list_models() if not n.startswith("upernet_")}
    assert "vmamba_tiny_s1l8.imagenet" in timm.list_pretrained("vmamba*")
    cfg = timm.get_pretrained_cfg("vmamba_tiny_s1l8")
    assert (cfg.crop_pct, cfg.input_size, cfg.license) == (0.875, (3, 224, 224), "MIT")


def test_the_page_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    found = [
        b for b in blocks(DOCS / "guides" / "ecosystem.md", "python") if b.marker.startswith("not run: it needs timm")
    ]
    assert len(found) == 2
    names: dict[str, Any] = {}
    for block in found:
        exec(compile(block.code, str(block), "exec"), names)
    assert names["logits"].shape == (8, 10)
