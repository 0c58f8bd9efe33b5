"""UPerNet: golden heads and inference, shapes, orders, roles, files as MMSegmentation writes them."""

from __future__ import annotations

import sys
import types
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import trust_tta as tt
from tests.golden import Arrays, load_golden, load_golden_json
from trust_tta.errors import CheckpointError, ConfigError
from trust_tta.models.checkpoint import Checkpoint, load_checkpoint
from trust_tta.models.config import UPerNetConfig
from trust_tta.models.upernet import FCNHead, UPerHead, UPerNet, resize, slide, windows
from trust_tta.models.variants import VARIANTS

TINY: dict[str, Any] = {
    "depths": (1, 1, 1), "dims": (8, 12, 16), "channels": 8, "auxiliary_channels": 4, "num_classes": 5,
}  # fmt: skip
CASES = ("even", "odd", "odder")


def golden_state(golden: Arrays) -> dict[str, Tensor]:
    return {name.removeprefix("sd/"): torch.from_numpy(v) for name, v in golden.items() if name.startswith("sd/")}


def tiny_upernet(variant: str = "upernet_vmamba_nano", **changes: Any) -> UPerNet:
    torch.manual_seed(0)
    model = tt.create_model(variant, **TINY | changes).double().eval()
    assert isinstance(model, UPerNet)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(torch.rand_like(tensor) * 0.3)
    return model


def tiny_images(count: int = 2, *, height: int = 26, width: int = 22) -> Tensor:
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


# golden numbers of MMSegmentation


@pytest.fixture(scope="module")
def upper_head() -> UPerHead:
    head = UPerHead((16, 32, 64, 128), 32, 7, dropout=0.1).eval()
    head.load_state_dict(golden_state(load_golden("segmentation/uperhead_weights.npz")))
    return head


@pytest.mark.parametrize("case", CASES)
def test_the_decoding_head_is_the_original(upper_head: UPerHead, case: str) -> None:
    golden = load_golden("segmentation/uperhead_io.npz")
    maps = [torch.from_numpy(golden[f"{case}/in{i}"]) for i in range(4)]
    with torch.no_grad():
        single = upper_head.float()(maps)
        exact = upper_head.double()([x.double() for x in maps])
        pooled = upper_head.pool(maps[3].double())
        features = upper_head.forward_features([x.double() for x in maps])
    np.testing.assert_allclose(single, golden[f"{case}/logits_f64"], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(exact, golden[f"{case}/logits_f64"], rtol=0, atol=1e-10)
    np.testing.assert_allclose(pooled, golden[f"{case}/psp_f64"], rtol=0, atol=1e-10)
    if case == "odd":
        np.testing.assert_allclose(features, golden["odd/feat_f64"], rtol=0, atol=1e-10)


@pytest.mark.parametrize("case", ["even", "odd"])
def test_the_auxiliary_head_is_the_original(case: str) -> None:
    golden = load_golden("segmentation/fcnhead.npz")
    head = FCNHead(64, 32, 7, dropout=0.1).eval()
    head.load_state_dict(golden_state(golden))
    images = torch.from_numpy(golden[f"{case}/in"])
    with torch.no_grad():
        np.testing.assert_allclose(head(images), golden[f"{case}/logits_f64"], rtol=1e-4, atol=1e-4)
        exact = head.double()(images.double())
    np.testing.assert_allclose(exact, golden[f"{case}/logits_f64"], rtol=0, atol=1e-10)


class Branches(nn.Module):
    """The backbone of the golden files: four convolutions of the image, at four strides."""

    def __init__(self) -> None:
        super().__init__()
        shapes = ((8, 4), (12, 8), (16, 16), (24, 32))
        self.convs = nn.ModuleList(nn.Conv2d(3, c, 3, stride=s, padding=1) for c, s in shapes)

    def embed(self, images: Tensor) -> Tensor:
        return images

    def forward_maps(self, x: Tensor, order: None = None, *, directions: None = None) -> list[Tensor]:
        return [conv(x).relu() for conv in self.convs]


def golden_network(dropout: float = 0.1) -> UPerNet:
    head = UPerHead((8, 12, 16, 24), 16, 5, dropout=dropout)
    network = UPerNet(Branches(), head, FCNHead(16, 8, 5, dropout=dropout))  # type: ignore[arg-type]
    network.load_state_dict(golden_state(load_golden("segmentation/encoder_decoder.npz")))
    return network.double().eval()


@pytest.mark.parametrize("name", ["50x70", "25x40", "32x53"])
def test_whole_and_sliding_inference_are_the_original(name: str) -> None:
    golden, network = load_golden("segmentation/encoder_decoder.npz"), golden_network()
    images = torch.from_numpy(golden[f"{name}/img"]).double()
    with torch.no_grad():
        np.testing.assert_allclose(network(images), golden[f"{name}/whole_f64"], rtol=0, atol=1e-10)
        slid = slide(network, images, crop=32, stride=21)
        np.testing.assert_allclose(slid, golden[f"{name}/slide_f64"], rtol=0, atol=1e-10)
        if name == "50x70":
            coarse, auxiliary = network.forward_training(images)
            np.testing.assert_allclose(coarse, golden[f"{name}/head_logits_stride4_f64"], rtol=0, atol=1e-10)
            np.testing.assert_allclose(auxiliary, golden[f"{name}/aux_logits_stride16_f64"], rtol=0, atol=1e-10)


@pytest.mark.parametrize("mode", ["whole", "slide"])
@pytest.mark.parametrize(
    ("case", "size", "padding"),
    [
        ("pad0_ori83x117", (83, 117), (0, 0, 0, 0)),
        ("pad_r6_b2_ori31x44", (31, 44), (0, 6, 0, 2)),
        ("flipH_ori50x70", (50, 70), (0, 0, 0, 0)),
    ],
)
def test_predictions_at_the_original_size_are_the_original_ones(
    mode: str, case: str, size: tuple[int, int], padding: tuple[int, int, int, int]
) -> None:
    golden, network = load_golden("segmentation/encoder_decoder.npz"), golden_network()
    images = torch.from_numpy(golden["50x70/img"]).double()
    with torch.no_grad():
        logits = network(images) if mode == "whole" else slide(network, images, crop=32, stride=21)
    left, right, top, bottom = padding
    logits = logits[:, :, top : logits.shape[2] - bottom, left : logits.shape[3] - right]
    logits = resize(logits.flip(-1) if case.startswith("flip") else logits, size)
    key = f"50x70/{mode}/predict_{case}"
    np.testing.assert_allclose(logits[:1], golden[f"{key}_logits_image0_f32"], rtol=0, atol=2e-6)
    np.testing.assert_array_equal(logits.argmax(1, keepdim=True), golden[f"{key}_pred"])


@pytest.mark.parametrize("classes", ["150", "21", "59"])
def test_heads_have_the_shapes_of_published_files(classes: str) -> None:
    golden = load_golden_json("segmentation/upernet_vmamba_t_head_shapes.json")[classes]
    with torch.device("meta"):
        network = UPerNet.from_config(VARIANTS["upernet_vmamba_tiny_s1l8"].override({"num_classes": int(classes)}))  # type: ignore[arg-type]
    own = {n: list(p.shape) for n, p in network.named_parameters() if not n.startswith("backbone.")}
    buffers = {n: list(b.shape) for n, b in network.named_buffers() if not n.startswith("backbone.")}
    flat: dict[str, list[int]] = {}
    for key in ("parameters", "buffers"):
        flat |= golden[key]
    assert own | buffers == flat
    sizes = {
        head: sum(p.numel() for n, p in network.named_parameters() if n.startswith(head))
        for head in ("decode_head.", "auxiliary_head.")
    }
    assert sizes["decode_head."] == {"150": 31_497_366, "21": 31_431_189, "59": 31_450_683}[classes]
    assert classes != "150" or sizes["auxiliary_head."] == 923_798


def test_the_base_heads_have_the_published_size() -> None:
    with torch.device("meta"):
        network = tt.create_model("upernet_vmamba_base_s2l15")
    assert sum(p.numel() for p in network.decode_head.parameters()) == 33_315_990
    assert sum(p.numel() for p in network.auxiliary_head.parameters()) == 1_218_710


# networks by name


@pytest.mark.parametrize("name", [name for name in tt.list_models() if name.startswith("upernet_")])
def test_every_variant_has_its_backbone_and_a_norm_for_each_map(name: str) -> None:
    with torch.device("meta"):
        network, plain = tt.create_model(name), tt.create_model(name.removeprefix("upernet_"))
    assert isinstance(network, UPerNet)
    assert network.config is not None
    backbone = {k: v.shape for k, v in network.backbone.state_dict().items() if not k.startswith("outnorm")}
    assert backbone == {k: v.shape for k, v in plain.state_dict().items() if not k.startswith("classifier.")}
    for i, dim in enumerate(network.config.dims):
        assert network.backbone.state_dict()[f"outnorm{i}.weight"].shape == (dim,)
    parameters = sum(p.numel() for p in network.parameters())
    assert parameters / 3 < network.config.rough_size() < 3 * parameters


def test_there_is_a_segmenter_for_every_vmamba() -> None:
    names = set(tt.list_models())
    assert {f"upernet_{name}" for name in names if name.startswith(("vmamba_", "vanilla_vmamba_"))} <= names


def test_the_published_tiny_network_has_62_million_parameters() -> None:
    with torch.device("meta"):
        network = tt.create_model("upernet_vmamba_tiny_s1l8", num_classes=150)
    assert round(sum(p.numel() for p in network.parameters()) / 1e6) == 62


def test_the_small_network_fits_in_six_megabytes_of_half_precision() -> None:
    network = tt.create_model("upernet_vmamba_nano", num_classes=11)
    assert 2 * sum(p.numel() for n, p in network.named_parameters() if not n.startswith("auxiliary")) < 6_000_000


@pytest.mark.parametrize("height", [26, 33])
@pytest.mark.parametrize("variant", ["upernet_vmamba_nano", "upernet_vmamba_tiny_s1l8", "upernet_vanilla_vmamba_tiny"])
def test_logits_have_the_size_of_the_images(variant: str, height: int) -> None:
    network = tiny_upernet(variant)
    logits = network(tiny_images(height=height))
    assert logits.shape == (2, 5, height, 22)
    assert logits.std() > 1e-3


def test_maps_are_the_normalized_maps_of_the_backbone() -> None:
    network = tiny_upernet()
    images = tiny_images()
    plain = super(type(network.backbone), network.backbone).forward_maps(network.backbone.embed(images))
    for i, (map_, before) in enumerate(zip(network.forward_maps(images), plain, strict=True)):
        torch.testing.assert_close(map_, network.backbone.get_submodule(f"outnorm{i}")(before))


def test_orders_reach_the_scans() -> None:
    network, images = tiny_upernet(), tiny_images(3)
    plain, other = network(images), network(images, order="badc")
    assert (plain - other).abs().max() > 1e-4
    torch.testing.assert_close(network(images, order="abcd"), plain)
    torch.testing.assert_close(network(images, directions=network.scan_directions("badc", 3)), other)
    mixed = network(images, order=["abcd", "badc", "abcd"])
    torch.testing.assert_close(mixed, torch.stack([plain[0], other[1], plain[2]]))


def test_every_parameter_of_both_heads_has_a_gradient() -> None:
    network = tiny_upernet(drop_path=0.0, dropout=0.0).train()
    main, auxiliary = network.forward_training(tiny_images())
    (main.square().sum() + auxiliary.square().sum()).backward()
    dead = [n for n, p in network.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert [n for n in dead if not n.endswith(("patch_embed.0.bias", "patch_embed.5.bias", "downsample.1.bias"))] == []


def test_roles_cover_everything_and_leave_the_auxiliary_head_alone() -> None:
    network = tiny_upernet()
    roles = network.parameter_roles()
    assert list(roles) == [name for name, _ in network.named_parameters()]
    assert {role.kind for role in roles.values()} == {"norm", "scan", "projection", "other"}
    assert all(role.kind == "other" and role.last for n, role in roles.items() if n.startswith("auxiliary_head."))
    assert roles["decode_head.fpn_bottleneck.bn.weight"].kind == "norm"
    assert [roles[f"backbone.outnorm{i}.weight"].last for i in range(3)] == [False, False, True]
    assert roles["backbone.layers.0.blocks.0.op.A_logs"].kind == "scan"


def test_pixels_go_through_the_preprocessing() -> None:
    network = tt.create_model("upernet_vmamba_nano", **TINY).eval()
    pixels = np.random.default_rng(0).integers(0, 256, (1, 40, 50, 3), dtype=np.uint8)
    with torch.no_grad():
        logits = network(pixels)
        assert network.preprocessing is not None
        torch.testing.assert_close(logits, network(network.preprocessing(pixels)))
    assert logits.shape == (1, 5, 224, 224)


def test_wrong_fields_are_refused() -> None:
    with pytest.raises(ConfigError, match="chanels: there is no such option; did you mean 'channels'"):
        tt.create_model("upernet_vmamba_nano", chanels=3)
    with pytest.raises(ConfigError, match="at least 2"):
        tt.create_model("upernet_vmamba_nano", depths=(1,), dims=(8,))
    with pytest.raises(ConfigError, match="give a crop >= 1 and a stride from 1 to the crop"):
        slide(tiny_upernet(), tiny_images(), crop=8, stride=9)


@pytest.mark.parametrize(
    ("length", "crop", "stride"), [(50, 32, 21), (25, 32, 21), (32, 32, 1), (33, 8, 8), (100, 7, 3)]
)
def test_windows_cover_every_pixel_and_stay_inside(length: int, crop: int, stride: int) -> None:
    found = list(windows(length, crop, stride))
    assert all(0 <= start < end <= length and end - start == min(crop, length) for start, end in found)
    assert {i for start, end in found for i in range(start, end)} == set(range(length))


# files


def upstream_file(network: nn.Module, path: Path) -> None:
    """A file as a training with MMEngine writes it: beside the weights, objects of packages that are not here."""
    module = types.ModuleType("mmengine.logging.history_buffer")
    buffer = type("HistoryBuffer", (), {"__module__": module.__name__, "__init__": lambda self: None})
    module.HistoryBuffer = buffer  # type: ignore[attr-defined]
    history = buffer()
    history.__dict__.update(_log_history=np.arange(3.0), _count_history=np.ones(3), _statistics_methods=OrderedDict())
    parents = {name: types.ModuleType(name) for name in ("mmengine", "mmengine.logging")}
    content = {
        "meta": {"iter": 160000, "cfg": "model = dict()", "dataset_meta": {"classes": ("wall",)}},
        "state_dict": OrderedDict(network.state_dict()),
        "message_hub": {"log_scalars": OrderedDict(loss=history), "runtime_info": {"iter": np.int64(3)}},
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, found in {**parents, module.__name__: module}.items():
            patch.setitem(sys.modules, name, found)
        torch.save(content, path)


def test_upstream_files_load_strictly_and_run_no_code(tmp_path: Path) -> None:
    network = tiny_upernet().float()
    upstream_file(network, tmp_path / "upernet.pth")
    assert "mmengine" not in sys.modules
    loaded = tt.create_model("upernet_vmamba_nano", checkpoint=tmp_path / "upernet.pth", **TINY)
    assert not loaded.training
    for name, value in network.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert Checkpoint.open(tmp_path / "upernet.pth", variant="upernet_vmamba_nano").num_classes == 5
    assert "mmengine" not in sys.modules


def test_old_spellings_and_convolutions_for_linear_layers_load() -> None:
    network = tiny_upernet("upernet_vanilla_vmamba_tiny")
    old = {}
    for name, value in network.state_dict().items():
        name = name.replace(".norm.", ".ln_1.") if ".blocks." in name and ".op." not in name else name
        name = name.replace(".op.", ".self_attention.").replace("patch_embed.0.", "patch_embed.proj.")
        name = name.replace("patch_embed.2.", "patch_embed.norm.")
        old[name] = value[:, :, None, None] if name.endswith("in_proj.weight") else value
    other = tiny_upernet("upernet_vanilla_vmamba_tiny", drop_path=0.3)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    load_checkpoint(other, old)
    torch.testing.assert_close(other(tiny_images()), network(tiny_images()))


def test_a_file_without_the_auxiliary_head_loads_and_one_with_half_of_it_does_not() -> None:
    network = tiny_upernet()
    state = {n: v for n, v in network.state_dict().items() if not n.startswith("auxiliary_head.")}
    other = tiny_upernet()
    before = other.auxiliary_head.conv_seg.weight.clone()
    load_checkpoint(other, state)
    assert torch.equal(other.auxiliary_head.conv_seg.weight, before)
    half = {n: v for n, v in network.state_dict().items() if n != "auxiliary_head.convs.0.conv.weight"}
    with pytest.raises(CheckpointError, match=r"auxiliary_head\.convs\.0\.conv\.weight"):
        load_checkpoint(other, half)
    with pytest.raises(CheckpointError, match=r"decode_head\.bottleneck"):
        load_checkpoint(other, {n: v for n, v in state.items() if "bottleneck.conv" not in n})


def test_other_classes_take_everything_but_what_classifies() -> None:
    network, other = tiny_upernet(), tiny_upernet(num_classes=3)
    with pytest.raises(CheckpointError, match="of another shape"):
        load_checkpoint(other, network.state_dict())
    load_checkpoint(other, network.state_dict(), head=False)
    kept = "decode_head.bottleneck.conv.weight"
    assert torch.equal(other.get_parameter(kept), network.get_parameter(kept))
    assert other.decode_head.conv_seg.weight.shape[0] == 3


def test_a_config_says_what_it_is() -> None:
    network = tiny_upernet()
    assert isinstance(network.config, UPerNetConfig)
    assert (network.config.channels, network.num_classes) == (8, 5)
