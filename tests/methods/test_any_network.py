"""Every method on the usual kinds of networks, and what PyTorch networks do: works, or is refused in one line."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from tests.libraries import import_vision
from tests.methods.public_networks import NETWORKS, SIDES, TORCHVISION, small
from tests.methods.twins import CLASSES, TWINS, twin
from trust_tta.errors import ConfigError, ShapeError, TrustError, TrustWarning
from trust_tta.export.network import PixelInputNetwork
from trust_tta.methods import gather_fisher, gather_source_statistics
from trust_tta.methods.base import Method
from trust_tta.methods.features import features_and_logits
from trust_tta.methods.parameters import select
from trust_tta.methods.registry import create_method, list_methods
from trust_tta.models.classifier import classifiers
from trust_tta.models.networks import outputs_of
from trust_tta.preprocessing import Preprocessing

ORDERED = ("trust", "trust_naive", "ensemble", "repetition", "augmentation")  # need traversal orders
METHODS = [name for name in list_methods() if name not in ORDERED]
FEW_STEPS: dict[str, dict[str, Any]] = {
    "foa": {"population": 4},
    "dpcore": {"new_steps": 2},
    "cotta": {"augmentations": 2, "threshold": 1.0},
    "rotta": {"memory_size": 8, "update_frequency": 4},
    "eta": {"margin": 10.0, "weighting": False},
    "eata": {"margin": 10.0, "weighting": False},
    "sar": {"margin": 10.0},
    "deyo": {"margin": 10.0, "plpd": -1.0},
}


def images(count: int = 8, *, side: int = 16, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(seed))


def adapt(name: str, network: nn.Module, *, device: str = "cpu", side: int = 16) -> Method:
    options = dict(FEW_STEPS.get(name, {}))
    clean = [images(side=side, seed=9).to(device)]
    if name == "eata":
        options["fisher"] = gather_fisher(network, clean)
    if name in ("foa", "dpcore"):
        options["source_statistics"] = gather_source_statistics(network, clean)
    return create_method(name, network, **options)


def check_two_batches_and_reset(method: Method, batches: Sequence[Tensor], source: nn.Module) -> list[Tensor]:
    """Finite logits of each batch; after `reset()` the same again, and every parameter and buffer of the source."""
    outputs = [method(batch) for batch in batches]
    assert all(logits.shape == (len(batches[0]), CLASSES) and bool(logits.isfinite().all()) for logits in outputs)
    method.reset()
    expected, found = source.state_dict(), method.detach().state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[key], value.to(found[key])) for key, value in expected.items())
    return outputs


OFTEN_IN_BF16 = ("resnet50", "convnext_tiny", "transformer_encoder")
CASES = [
    pytest.param(network, dtype, marks=[pytest.mark.slow] if dtype == "bf16" and network not in OFTEN_IN_BF16 else [])
    for network in NETWORKS
    for dtype in ("float32", "bf16")
]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("network", "dtype"), CASES)
def test_every_method_adapts_public_networks(network: str, name: str, dtype: str) -> None:
    if name == "foa":
        pytest.importorskip("cma")
    side = SIDES.get(network, 32)
    method = adapt(name, small(network), side=side)
    batches = [images(4, side=side, seed=seed) for seed in (0, 1)]
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
        first = check_two_batches_and_reset(method, batches, small(network))
        torch.testing.assert_close(method(batches[0]), first[0], rtol=0, atol=0)


@pytest.mark.parametrize("name", ORDERED)
@pytest.mark.parametrize("network", NETWORKS)
def test_methods_of_scan_orders_refuse_networks_without_a_scan(network: str, name: str) -> None:
    with pytest.raises(ConfigError, match="has none; use a VMamba, or another method such as 'tent'") as found:
        create_method(name, small(network))
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("name", ["tent", "tide", "roid", "sar", "shot", "rotta", "neo", "bn", "bn_ema"])
@pytest.mark.parametrize("network", ["resnet18", "transformer_encoder"])
def test_networks_in_half_precision_adapt_with_a_warning(network: str, name: str) -> None:
    """At a rate of zero, so that statistics alone change, they predict as in float32, but for rounding."""
    side, learns = SIDES.get(network, 32), name not in ("neo", "bn", "bn_ema")
    options: dict[str, Any] = {"lr": 0.0} if learns else {}
    with pytest.warns(TrustWarning, match="are bfloat16, in which small updates are lost") if learns else nullcontext():
        half = create_method(name, small(network).bfloat16(), **options)
    exact = create_method(name, small(network), **options)
    batches = [images(side=side, seed=seed) for seed in (0, 1)]
    found = check_two_batches_and_reset(half, [batch.bfloat16() for batch in batches], small(network).bfloat16())
    for batch, logits in zip(batches, found, strict=True):
        expected = exact(batch)
        assert float((logits.float() - expected).abs().max()) < 0.1 * float(expected.abs().max())


@pytest.mark.parametrize("name", ["roid", "cmf", "deyo"])
def test_a_single_selected_image_whose_map_is_one_pixel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no batch statistics of its own, and takes those of the whole batch, as if all had been selected."""
    method: Any = adapt(name, small("resnet18"))  # maps of one pixel in its last stage
    batch = images()
    method.counters.forwards = 0
    make = lambda indices: batch[indices]  # noqa: E731
    everything = method.logits_of_some(make, torch.arange(8), 8)
    assert torch.equal(method.logits_of_some(make, torch.tensor([3]), 8), everything[3:4])
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        method.logits_of_some(make, torch.tensor([0]), 1)
    if name != "deyo":
        monkeypatch.setattr(method, "weigh", lambda logits: (torch.ones(8), torch.arange(8) == 3))
        assert bool(method(batch).isfinite().all())


@pytest.mark.parametrize("network", TWINS)
def test_features_are_the_input_of_the_classifier(network: str) -> None:
    model = twin(network)
    with torch.no_grad():
        features, logits = features_and_logits(model, images())
        assert torch.equal(logits, model(images()))
        (head,) = classifiers(model)
        torch.testing.assert_close(head(features), logits)


def test_lame_by_hook_equals_lame_by_forward_features() -> None:
    class Split(type(twin("resnet"))):  # type: ignore[misc]
        def forward_features(self, x: Tensor) -> Tensor:
            x = self.layer2(self.layer1(self.relu(self.bn1(self.conv1(x)))))
            return torch.flatten(self.avgpool(x), 1)

        def forward_head(self, features: Tensor) -> Tensor:
            logits: Tensor = self.fc(features)
            return logits

    torch.manual_seed(0)
    split = Split().eval()
    split.load_state_dict(twin("resnet").state_dict())
    for name in ("lame", "neo", "t3a"):
        assert torch.equal(adapt(name, split)(images()), adapt(name, twin("resnet"))(images()))


def test_logits_that_are_not_the_classifiers_output_are_refused() -> None:
    class Scaled(type(twin("resnet"))):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = 2 * super().forward(x)
            return logits

    with pytest.raises(ConfigError, match="are not the output of its layer 'fc'"):
        create_method("neo", Scaled().eval())(images())


@pytest.mark.parametrize(
    ("network", "skipped"),
    [
        ("resnet", {"layer2.0.bn1", "layer2.0.bn2", "layer2.0.downsample.1", "layer2.1.bn1", "layer2.1.bn2"}),
        ("vit", {"blocks.layers.3.norm1", "blocks.layers.3.norm2", "blocks.norm"}),
        ("convnext", {"features.3.0.norm", "features.3.1.norm", "classifier.0"}),
        ("densenet", {"features.3.0.norm", "features.3.1.norm", "features.3.2.norm", "features.4"}),
        ("mobilenet", {"features.4.block.1", "features.4.block.4", "features.4.block.7"}),
    ],
)
def test_last_stage_is_found_by_structure(network: str, skipped: set[str]) -> None:
    model = twin(network)
    every, kept = select(model, "bn"), select(model, "bn", skip_last=True)
    # Of a series of five, the last quarter is two: the twin of MobileNet has a stem and four blocks.
    expected = skipped | ({f"features.3.block.{i}" for i in (1, 4, 7)} if network == "mobilenet" else set())
    assert {name.rpartition(".")[0] for name in set(every) - set(kept)} == expected


def test_a_network_with_norms_in_the_last_stage_alone_is_refused_with_the_remedy() -> None:
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    )
    with pytest.raises(ConfigError, match="in its last stage, which this method skips; pass skip_last=False"):
        create_method("sar", network)


# what networks return


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


class Named(NamedTuple):
    loss: Tensor | None
    logits: Tensor


OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "dict": lambda logits: {"logits": logits, "loss": None},
    "tuple": lambda logits: (None, logits),
    "named-tuple": lambda logits: Named(None, logits),
    "dataclass": Output,
    "flat": lambda logits: logits[:, 0],
    "one": lambda logits: logits[:, :1],
    "probabilities": lambda logits: logits.softmax(1),
}


class Returns(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.network, self.kind = twin("resnet"), kind

    def forward(self, x: Tensor) -> Any:
        return OUTPUTS[self.kind](self.network(x))


@pytest.mark.parametrize(
    ("kind", "key"), [("dict", "logits"), ("tuple", 1), ("named-tuple", "logits"), ("dataclass", "logits")]
)
@pytest.mark.parametrize("name", ["tent", "tide", "neo", "bn"])
def test_output_key_names_the_logits(kind: str, key: Any, name: str) -> None:
    network: Any = Returns(kind)
    with pytest.raises(ConfigError, match="set model.output_key"):
        adapt(name, network)(images())
    network.output_key = key
    assert torch.equal(adapt(name, network)(images()), adapt(name, twin("resnet"))(images()))
    network.output_key = "missing"
    with pytest.raises(ConfigError, match="has output_key='missing', but its output is a"):
        adapt(name, network)(images())


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("flat", r"returned shape \(8,\); logits \(n, classes\)"),
        ("one", "returned one output z .* where z is the input"),
    ],
)
def test_output_of_another_shape_is_refused(kind: str, reason: str) -> None:
    with pytest.raises(ShapeError, match=reason):
        create_method("tent", Returns(kind))(images())


def test_probabilities_are_warned_of_once() -> None:
    method = create_method("tent", Returns("probabilities"))
    with pytest.warns(TrustWarning, match="returned probabilities; methods take logits"):
        method(images())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        method(images())


# what networks are made of


def with_weight_norm(network: Any) -> nn.Module:
    parametrizations.weight_norm(network.fc)
    return network  # type: ignore[no-any-return]


def with_legacy_weight_norm(network: Any) -> nn.Module:
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(network.fc)
    return network  # type: ignore[no-any-return]


def with_pruning(network: Any) -> nn.Module:
    prune.l1_unstructured(network.conv1, "weight", amount=0.5)
    return network  # type: ignore[no-any-return]


def with_tied_weights(network: Any) -> nn.Module:
    network.layer2[1].bn2.weight = network.layer2[1].bn1.weight
    return network  # type: ignore[no-any-return]


def with_dropout(network: Any) -> nn.Module:
    network.fc = nn.Sequential(nn.Dropout(0.5), network.fc)
    return network  # type: ignore[no-any-return]


def with_plain_statistics(network: Any) -> nn.Module:
    network.bn1 = nn.BatchNorm2d(8, affine=False)
    network.layer1[0].bn1 = nn.BatchNorm2d(8, track_running_stats=False)
    return network.eval()  # type: ignore[no-any-return]


def with_sync_batch_norm(network: Any) -> nn.Module:
    return nn.SyncBatchNorm.convert_sync_batchnorm(network)  # type: ignore[no-any-return]


def channels_last(network: Any) -> nn.Module:
    return network.to(memory_format=torch.channels_last)  # type: ignore[no-any-return]


def with_convolution_as_classifier(network: Any) -> nn.Module:
    network.avgpool = nn.Sequential(network.avgpool, nn.Conv2d(16, CLASSES, 1))  # the outputs of the module come last
    del network.fc
    network.fc = nn.Identity()
    return network  # type: ignore[no-any-return]


CHANGES = [
    with_weight_norm, with_legacy_weight_norm, with_pruning, with_tied_weights, with_dropout, with_plain_statistics,
    with_sync_batch_norm, channels_last, with_convolution_as_classifier,
]  # fmt: skip


class Headless(nn.Module):
    """Its logits are distances to learned centers."""

    classes = ("a", "b", "c", "d", "e")

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.centers = nn.Conv2d(3, 8, 3), nn.Parameter(torch.randn(CLASSES, 8))


class WithAuxiliaryHead(type(twin("resnet"))):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.rotation = nn.Linear(16, 4)


@pytest.mark.parametrize(
    "make", [lambda: with_convolution_as_classifier(twin("resnet")), WithAuxiliaryHead, Headless, lambda: twin("vit")],
    ids=["convolution", "auxiliary-head", "class-names", "vit"],
)  # fmt: skip
def test_number_of_classes_is_that_of_the_classifier(make: Callable[[], nn.Module]) -> None:
    assert outputs_of(make()) == CLASSES


def test_exported_networks_return_the_logits_of_their_output() -> None:
    network: Any = Returns("dataclass")
    network.output_key = "logits"
    plain = Preprocessing(size=16, resize=None, crop=False, mean=(0.0,) * 3, std=(1.0,) * 3)
    with torch.no_grad():
        found = PixelInputNetwork(network, plain, "float", backend="portable")(images())
        torch.testing.assert_close(found, twin("resnet")(images()))


@pytest.mark.parametrize("name", ["source", "tent", "tide", "shot", "neo"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_networks_are_made_of(change: Any, name: str) -> None:
    """The source predicts as the network itself; others adapt, reset and leave the network usable."""
    network = change(twin("resnet")).eval()
    with torch.no_grad():
        expected = network(images())
    method = adapt(name, network)
    first = method(images())
    if name == "source":
        torch.testing.assert_close(first, expected)
    assert bool(first.isfinite().all())
    method(images(seed=1))
    method.reset()
    torch.testing.assert_close(method(images()), first)
    assert method.detach()(images()).shape == (8, CLASSES)


def test_hooks_of_the_network_run() -> None:
    network: Any = twin("resnet")
    calls: list[str] = []
    network.layer1.register_forward_hook(lambda *_: calls.append("hook"))
    adapt("tent", network)(images())
    assert calls == ["hook", "hook"]  # the adapting forward and the prediction


def test_compiled_networks_adapt_as_the_original() -> None:
    network = twin("resnet")
    compiled: Any = torch.compile(network, backend="eager")
    assert torch.equal(adapt("tent", compiled)(images()), adapt("tent", twin("resnet"))(images()))


def lazy() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(2))


def quantized() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(twin("resnet"), {nn.Linear})  # type: ignore[no-any-return]


class Counting(type(twin("resnet"))):  # type: ignore[misc]
    """Its forward writes to one buffer and assigns another."""

    brightness: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("brightness", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.brightness = 0.9 * self.brightness + 0.1 * x.detach().mean()
        logits: Tensor = super().forward(x) * (1 + self.brightness)
        return logits


@pytest.mark.parametrize("name", ["source", "tent", "tide"])
def test_buffers_that_the_forward_changes_are_part_of_the_state(name: str) -> None:
    network = Counting().eval()
    source = copy.deepcopy(network.state_dict())
    method = adapt(name, network)
    first, fork = method(images()), method.fork()
    saved, second = method.state_dict(), method(images(seed=1))
    method.evaluate(images(seed=3))
    assert torch.equal(fork(images(seed=1)), second)  # from a copy of the buffers
    third = method(images(seed=2))
    with pytest.raises(ShapeError, match="not finite"):
        method(torch.full_like(images(), torch.nan))
    method.load_state_dict(saved)
    assert torch.equal(method(images(seed=1)), second)
    assert torch.equal(method(images(seed=2)), third)
    method.reset()
    assert all(torch.equal(value, source[key]) for key, value in method.detach().state_dict().items())
    assert torch.equal(method(images()), first)


class Detached(type(twin("resnet"))):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            logits: Tensor = super().forward(x)
        return logits


class Rewriting(type(twin("resnet"))):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out *= 2  # the backward of the ReLU needs what it overwrites
        logits: Tensor = self.fc(self.avgpool(self.layer2(self.layer1(out))).flatten(1))
        return logits


class Asserting(type(twin("resnet"))):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[2] == 224, "Wrong image height! Expected 224"
        logits: Tensor = super().forward(x)
        return logits


class Flat(type(twin("resnet"))):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(x.flatten(1))
        return logits


class Masked(type(twin("resnet"))):  # type: ignore[misc]
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        logits: Tensor = super().forward(x * mask)
        return logits


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Detached, "no gradient reaches the weights .*; remove that, or use a method that does not learn"),
        (Rewriting, r"cannot be differentiated \(.*in-?place operation"),
        (Asserting, r"does not take 8 images of 16x16 pixels and 3 channels \(Wrong image height"),
        (Flat, r"does not take 8 images of 16x16 pixels and 3 channels \(mat1 and mat2 shapes"),
        (Masked, r"Masked.forward takes \(x, mask\) and methods call it with images alone"),
        (lambda: nn.DataParallel(twin("resnet")), "wrapped in DataParallel; give the network itself: model.module"),
        (lambda: twin("resnet").to("meta"), "ResNet is on the meta device, without weights"),
    ],
    ids=["no-grad", "in-place", "assertion", "shape", "arguments", "data-parallel", "meta"],
)
def test_networks_that_fail_are_refused_in_one_line(make: Any, reason: str) -> None:
    with pytest.raises(TrustError, match=reason) as found:
        create_method("tent", make().eval())(images())
    assert "\n" not in str(found.value)
    with pytest.raises(TrustError, match=reason):
        gather_fisher(make().eval(), [images()])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("name", ["tent", "source", "tide"])
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.jit.script(twin("resnet")), "is scripted"),
        (quantized, "is quantized"),
        (lazy, "has no shape yet; run one batch"),
    ],
    ids=["scripted", "quantized", "lazy"],
)
def test_networks_that_cannot_be_adapted_are_refused_in_one_line(make: Any, reason: str, name: str) -> None:
    with pytest.raises(ConfigError, match=reason) as found:
        create_method(name, make())
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("name", ["tent", "tide"])
def test_sparse_images_are_refused_in_one_line(name: str) -> None:
    with pytest.raises(TrustError, match=r"give a dense one: images.to_dense\(\)"):
        create_method(name, twin("resnet"))(images().to_sparse())


def gpu_methods() -> list[str]:
    return [name for name in METHODS if name != "foa" or find_spec("cma") is not None]


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["contiguous", "channels-last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("network", [*TORCHVISION, "transformer_encoder"])
def test_every_method_on_public_networks_on_a_gpu(network: str, dtype: torch.dtype, layout: str) -> None:
    """Two batches at full size: finite logits, and every tensor of the source after `reset()`.

    Channels-last maps of this size are normalized by our kernels, whose outputs these networks modify in place.
    """
    side = SIDES.get(network, 224)
    if network == "transformer_encoder":
        made = twin("vit")
    else:
        import_vision()
        models = pytest.importorskip("torchvision.models")
        torch.manual_seed(0)
        made = models.get_model(network, weights=None, num_classes=CLASSES).eval()
        for parameter in list(made.parameters())[-2:]:  # a ViT starts with a classifier of zeros
            nn.init.normal_(parameter, std=0.3)
    memory_format = torch.channels_last if layout == "channels-last" else torch.contiguous_format
    for name in gpu_methods():
        model: Any = copy.deepcopy(made).cuda()
        method = adapt(name, model.to(memory_format=memory_format), device="cuda", side=side)
        batches = [images(side=side, seed=seed).cuda().to(memory_format=memory_format) for seed in (0, 1)]
        try:
            with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
                check_two_batches_and_reset(method, batches, made)
        except Exception as error:
            error.add_note(f"method: {name}")
            raise


@pytest.mark.gpu
@pytest.mark.parametrize("network", NETWORKS)
def test_every_method_predicts_on_a_gpu_as_on_the_cpu(network: str) -> None:
    """The first batch, within 3 % of the largest logit, without TF32; float32 and float64 differ by up to 0.3 %."""
    side, apart = SIDES.get(network, 32), dict[str, float]()
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for name in set(gpu_methods()) - {"cotta", "rotta"}:  # they draw noise on the device
            expected = adapt(name, small(network), side=side)(images(side=side))
            found = adapt(name, small(network).cuda(), device="cuda", side=side)(images(side=side).cuda()).cpu()
            apart[name] = float((found - expected).abs().max() / expected.abs().max())
    assert max(apart.values()) < 0.03, apart
