"""MambaVision and its like against the original code: names, shapes, logits, scan orders; files, methods and licenses.

Configurations, weights and inputs are read from the golden files, so other files of the same layout run unchanged.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import trust_tta as tt
from tests.golden import BESIDE, ROOT, load_golden, load_golden_json
from tests.models.networks import BACKBONES
from tests.models.official import from_official
from trust_tta.errors import CheckpointError, ConfigError, ShapeError, TrustWarning
from trust_tta.export.run import export_network
from trust_tta.methods import gather_fisher, gather_source_statistics
from trust_tta.models import checkpoint as checkpoint_module
from trust_tta.models import efficientvmamba
from trust_tta.models.base import ScanNetwork
from trust_tta.models.checkpoint import Checkpoint, describe, matching_variants
from trust_tta.models.config import (
    EfficientVMambaConfig,
    MambaVisionConfig,
    MSVMambaConfig,
    SpatialMambaConfig,
    VSSDConfig,
)
from trust_tta.models.efficientvmamba import EfficientVMamba
from trust_tta.models.mambavision import MambaVision
from trust_tta.models.msvmamba import MSVMamba
from trust_tta.models.spatialmamba import SpatialMamba
from trust_tta.models.vssd import VSSD
from trust_tta.models.weights import encode_weights, load_state
from trust_tta.orders import PAPER_ORDERS
from trust_tta.preprocessing import Preprocessing

State = dict[str, Tensor]


@dataclass(frozen=True)
class Family:
    """How the golden files of one network are read; `tolerance` is the absolute one of float32.

    `orders` name the scan orders of variants of the logits, where their names differ. `paths` are variants in which
    each quarter of an EfficientVMamba is read in another way: from (height, width, device) to pixels (4, l). `fields`
    are variants with other fields of the configuration.
    """

    config: Any
    network: Callable[[Any], ScanNetwork]
    orders: Mapping[str, str] = field(default_factory=dict)
    paths: Mapping[str, Callable[..., Tensor]] = field(default_factory=dict)
    fields: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    tolerance: float = 1e-4


VISIT_QUARTERS = efficientvmamba.visit_quarters


def flipped_quarters(height: int, width: int, device: torch.device) -> Tensor:
    return VISIT_QUARTERS(height, width, device).flip(1)


def transposed_quarters(height: int, width: int, device: torch.device) -> Tensor:
    pixels = torch.arange(height * width, device=device).view(height, width)
    a, b, c, d = pixels[::2, ::2], pixels[1::2, ::2], pixels[::2, 1::2], pixels[1::2, 1::2]
    return torch.stack((a.t().flatten(), b.flatten(), c.t().flatten(), d.flatten()))


# (full; low 1, low 2, low 3) read (h; h_flip, v, v_flip), which are the letters a, b, c, d.
MSVMAMBA_ORDERS = {"flipped": "badc", "rotated": "acdb", "swapped": "cbad"}
FAMILIES = {
    "mambavision": Family(MambaVisionConfig, MambaVision, tolerance=5e-4),
    "msvmamba": Family(MSVMambaConfig, MSVMamba, MSVMAMBA_ORDERS),
    "efficientvmamba": Family(
        EfficientVMambaConfig, EfficientVMamba, paths={"flipped": flipped_quarters, "transposed": transposed_quarters}
    ),
    "spatialmamba": Family(SpatialMambaConfig, SpatialMamba),
    "vssd": Family(VSSDConfig, VSSD, fields={"negative_dA": {"positive_decay": False}}),
}

# Our names, and those in the file of published shapes.
PUBLISHED = {
    "mambavision_tiny": "mamba_vision_T",
    "mambavision_tiny2": "mamba_vision_T2",
    "mambavision_small": "mamba_vision_S",
    "mambavision_base": "mamba_vision_B",
    "mambavision_base_21k": "mamba_vision_B_21k",
    "mambavision_large": "mamba_vision_L",
    "mambavision_large_21k": "mamba_vision_L_21k",
    "mambavision_large2": "mamba_vision_L2",
    "mambavision_large2_512_21k": "mamba_vision_L2_512_21k",
    "mambavision_large3_256_21k": "mamba_vision_L3_256_21k",
    "mambavision_large3_512_21k": "mamba_vision_L3_512_21k",
    **{f"msvmamba_{size}": f"msvmamba_{size}" for size in ("nano", "micro", "tiny")},
    **{f"msvmambav3_{size}": f"msvmambav3_{size}" for size in ("tiny", "small", "base")},
    **{f"efficientvmamba_{size}": f"efficient_vssm_{size}" for size in ("tiny", "small", "base")},
    **{f"spatialmamba_{size}": f"spatialmamba_{size}" for size in ("tiny", "small", "base")},
    **{f"vssd_{size}": f"vssd_{size}" for size in ("micro", "tiny", "small", "base")},
}

ORDERED = [name for name in BACKBONES if not name.startswith("vssd")]
NEED_ORDERS = ("trust_naive", "trust", "ensemble", "repetition", "augmentation")


# A parameter that networks of one family alone have.
SIGNATURES = {
    "levels.0.downsample.reduction": "mambavision",
    "state_fusion": "spatialmamba",
    "conv_branch": "efficientvmamba",
    "attn.A_log": "vssd",
    "conv2d_b1": "msvmamba",
}
LEFT_OUT = "backbone.ds.stem"  # Mamba2D: docs/develop/decisions.md


def golden_files() -> list[str]:
    """Names of all golden files of backbones, wherever golden files are looked for."""
    given = os.environ.get("TRUST_TTA_GOLDEN")
    folders = [*([Path(given)] if given else []), BESIDE / "golden", ROOT / "tests" / "golden"]
    return sorted({path.stem for folder in folders for path in (folder / "backbones").glob("*.npz")})


def open_golden(file: str) -> tuple[dict[str, Any], Family, ScanNetwork, State]:
    """Arrays of a golden file, its family by the names of its parameters, and the network with its weights."""
    arrays = load_golden(f"backbones/{file}.npz")
    state = {k.removeprefix("param/"): torch.from_numpy(np.array(v)) for k, v in arrays.items() if k[:6] == "param/"}
    if any(LEFT_OUT in name for name in state):
        pytest.skip("Mamba2D is not among the networks")
    (found,) = {family for signature, family in SIGNATURES.items() if any(signature in name for name in state)}
    family = FAMILIES[found]
    network = family.network(from_official(family.config, json.loads(str(arrays["config"])))).eval()
    load_state(network, state, origin=file)
    return arrays, family, network, state


def tiny(name: str, **changes: Any) -> Any:
    """A small network in float64 and evaluation mode, whose scans and statistics matter."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = tt.create_model(name, num_classes=5, **{**BACKBONES[name], **changes}).double().eval()
        with torch.no_grad():
            for key, value in model.state_dict().items():
                if value.is_floating_point():
                    value.add_(0.1 * torch.rand_like(value) if "running_" in key else 0.1 * torch.randn_like(value))
            for key, parameter in model.named_parameters():
                if model.parameter_roles()[key].kind == "scan":
                    parameter.add_(0.4 * torch.randn_like(parameter))
    return model


def images(count: int = 4, side: int = 64) -> Tensor:
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("file", golden_files())
def test_logits_are_those_of_the_original_code(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, family, network, state = open_golden(file)
    for name in (key for key in arrays if key.startswith("logits") and not key.endswith("_f64")):
        variant = name.removeprefix("logits").removeprefix("_")
        given = torch.from_numpy(arrays.get(f"x_{variant}", arrays["x"]))
        order = None if not variant or f"x_{variant}" in arrays else family.orders.get(variant, variant)
        changed = network
        with torch.no_grad(), monkeypatch.context() as patch:
            if variant in family.paths:
                patch.setattr(efficientvmamba, "visit_quarters", family.paths[variant])
                order = None
            if variant in family.fields:
                changed, order = family.network(network.config.changed(**family.fields[variant])).eval(), None
                load_state(changed, state, origin=file)
            single, double = changed.float()(given, order=order), changed.double()(given.double(), order=order)
        np.testing.assert_allclose(single, arrays[name], rtol=1e-4, atol=family.tolerance, err_msg=name)
        np.testing.assert_allclose(double, arrays[f"{name}_f64"], rtol=1e-10, atol=1e-10, err_msg=name)


@pytest.mark.parametrize("file", golden_files())
def test_features_are_those_of_the_original_code(file: str) -> None:
    arrays, family, network, _ = open_golden(file)
    with torch.no_grad():
        features = network.forward_features(torch.from_numpy(arrays["x"]))
    np.testing.assert_allclose(features, arrays["features"], rtol=1e-4, atol=family.tolerance)


@pytest.mark.parametrize("name", ["msvmambav3_tiny", "msvmamba_nano", "efficientvmamba_tiny"])
def test_the_kernels_of_a_gpu_give_the_same(name: str) -> None:
    """On odd maps, with an order for each image: logits and the gradient of every parameter."""
    model = tiny(name, depths=(1, 1), dims=(8, 16)).to(torch.float32, memory_format=torch.channels_last)
    images_, results = images(2, 44)[..., :36].float(), []
    for backend in ("reference", "triton"):
        model.set_scan_backend(backend)
        logits = model(images_, order=["badc", "cdab"])
        results.append([logits, *torch.autograd.grad(logits.square().sum(), list(model.parameters()))])
    for found, wanted in zip(*results, strict=True):
        assert (found - wanted).norm() <= 1e-4 * wanted.norm() + 1e-5


@pytest.mark.parametrize(("name", "published"), PUBLISHED.items())
def test_a_variant_has_the_published_names_shapes_and_count(name: str, published: str) -> None:
    expected = load_golden_json("backbones/state_dicts.json")["models"][published]
    with torch.device("meta"):
        model = tt.create_model(name)
    assert isinstance(model, ScanNetwork)
    shapes = {key: list(value.shape) for key, value in model.state_dict().items()}
    assert shapes == {**expected["parameters"], **expected["buffers"]}
    assert sum(p.numel() for p in model.parameters()) == expected["num_parameters"]
    given = expected["constructor"] | ({"depths": [2, 2, 9, 2]} if name == "efficientvmamba_base" else {})
    family = FAMILIES[name.split("_")[0].removesuffix("v3")]
    assert model.config == from_official(family.config, given)  # efficientvmamba_base states other depths


@pytest.mark.parametrize("name", ORDERED)
def test_scan_orders_give_different_logits_and_each_image_may_have_its_own(name: str) -> None:
    model = tiny(name)
    batch = images(len(model.scan_orders[:6]))
    with torch.no_grad():
        alone = {order: model(batch, order=order) for order in model.scan_orders}
        assert torch.equal(model(batch), alone[model.scan_orders[0]])
        mixed = model(batch, order=list(model.scan_orders[:6]))
    logits = torch.stack([value.flatten() for value in alone.values()])
    assert len(torch.unique(logits.round(decimals=6), dim=0)) == len(model.scan_orders)
    for i, order in enumerate(model.scan_orders[:6]):
        torch.testing.assert_close(mixed[i], alone[order][i], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", BACKBONES)
def test_an_image_alone_equals_the_image_in_a_batch_and_backends_agree(name: str) -> None:
    model, batch = tiny(name), images(3)
    with torch.no_grad():
        logits = model(batch)
        torch.testing.assert_close(model(batch[1:2]), logits[1:2], rtol=1e-9, atol=1e-9)
        for backend in ("reference", "portable"):
            model.set_scan_backend(backend)
            torch.testing.assert_close(model(batch), logits, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", BACKBONES)
def test_every_parameter_has_a_role_and_a_gradient(name: str) -> None:
    model = tiny(name)
    model(images(2), order=model.scan_orders[-1]).square().sum().backward()
    roles = model.parameter_roles()
    assert roles.keys() == dict(model.named_parameters()).keys()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    assert {"norm", "scan", "projection", "other"} == {role.kind for role in roles.values()}
    assert not any(role.last for key, role in roles.items() if key.startswith("patch_embed"))
    assert all(roles[key].last for key in model.classifier_names())


QUICK = ("source", "tent", "trust", "tide", "shot")


def source_data(name: str, model: Any) -> dict[str, Any]:
    """Options that a method gathers on clean images."""
    clean = [images(4).float()]
    if name == "eata":
        return {"fisher": gather_fisher(model, clean)}
    statistics = name in ("foa", "dpcore")
    return {"source_statistics": gather_source_statistics(model, clean)} if statistics else {}


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in tt.list_methods()]
)
@pytest.mark.parametrize("name", BACKBONES)
@pytest.mark.filterwarnings("ignore:.*poor for a batch")
def test_methods_adapt_and_reset_bit_for_bit(name: str, method: str) -> None:
    model, batches = tiny(name).float(), images(16).float().split(8)
    if method in NEED_ORDERS and name not in ORDERED:
        with pytest.raises(
            ConfigError, match="VSSD sums over all tokens: .* use another method such as 'tent' or 'tide'"
        ):
            tt.create_method(method, model)
        return
    adapted = tt.create_method(method, model, **source_data(method, model))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    logits = [adapted(batch) for batch in batches]
    assert all(part.isfinite().all() for part in logits)
    adapted.reset()
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    for part, batch in zip(logits, batches, strict=True):
        assert torch.equal(adapted(batch), part)


@pytest.mark.parametrize("name", ORDERED)
def test_trust_adapts_under_the_scan_orders_of_the_network(name: str) -> None:
    model = tiny(name)
    method = tt.create_method("trust", model)
    expected = PAPER_ORDERS if len(model.scan_orders) == 24 else model.scan_orders[:6]
    assert [str(order) for order in method.orders] == [str(order) for order in expected]
    ranking = tt.rank_orders(model, [images(2)])
    assert sorted(str(order) for order, _ in ranking) == sorted(model.scan_orders)


@pytest.mark.parametrize("name", BACKBONES)
def test_half_precision_follows_float32(name: str) -> None:
    model, batch = tiny(name).float(), images(2).float()
    with torch.no_grad():
        wanted = model(batch)
        with torch.autocast("cpu", torch.bfloat16):
            cast = model(batch, order=model.scan_orders[-1])
        low = model.bfloat16()(batch.bfloat16())
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), wanted, rtol=0.05, atol=0.05)
    assert cast.isfinite().all()


@pytest.mark.parametrize("name", BACKBONES)
def test_stochastic_depth_is_random_in_training_alone(name: str) -> None:
    model, batch = tiny(name, drop_path=0.5), images(2)
    with torch.no_grad():
        expected = model(batch)
        assert torch.equal(model(batch), expected)
        model.set_stochastic_depth(True)
        torch.manual_seed(0)
        assert any(not torch.equal(model(batch), expected) for _ in range(8))  # a draw may drop nothing


# Files.


def write_file(folder: Path, model: Any, *, prefix: str = "", file: str = "model.safetensors") -> Path:
    state = {f"{prefix}{key}": value.contiguous() for key, value in model.state_dict().items()}
    if file.endswith(".safetensors"):
        save_file(state, folder / file)
    else:
        torch.save({"epoch": 3, "state_dict": state}, folder / file)
    return folder / file


@pytest.fixture(scope="module")
def mambavision() -> Any:
    torch.manual_seed(0)
    return tt.create_model("mambavision_tiny", num_classes=3).eval()


@pytest.mark.parametrize(
    ("prefix", "file"),
    [("model.", "model.safetensors"), ("", "tiny.pth.tar")],
    ids=["hub", "authors"],
)
def test_a_file_is_recognized_by_its_parameters(tmp_path: Path, mambavision: Any, prefix: str, file: str) -> None:
    path = write_file(tmp_path, mambavision, prefix=prefix, file=file)
    found = tt.create_model(checkpoint=path)
    assert isinstance(found, MambaVision)
    assert found.preprocessing == Preprocessing(resize=224)
    given = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(found(given), mambavision(given))


@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("mambavision_large2", "model."),
        ("msvmamba_micro", ""),
        ("msvmambav3_base", "module."),
        ("efficientvmamba_small", "module.module."),
        ("spatialmamba_small", ""),
        ("vssd_tiny", ""),
        ("vmamba_tiny_s1l8", "module."),
        ("groupmamba_base", ""),
    ],
)
def test_every_family_is_recognized_by_names_and_shapes(name: str, prefix: str) -> None:
    with torch.device("meta"):
        state = tt.create_model(name).state_dict()
    found = matching_variants({f"{prefix}{key}": value for key, value in state.items()})
    assert found[0] == name


def test_a_file_of_another_variant_or_family_is_refused_with_the_right_name(tmp_path: Path, mambavision: Any) -> None:
    path = write_file(tmp_path, mambavision)
    for name in ("mambavision_tiny2", "mambavision_base", "vmamba_tiny_s1l8"):  # one is far larger than the file
        with pytest.raises(CheckpointError, match="holds the weights of 'mambavision_tiny'") as caught:
            tt.create_model(name, checkpoint=path)
        assert "\n" not in str(caught.value)
    state = {**mambavision.state_dict(), "extra.weight": torch.zeros(2)}
    save_file(state, tmp_path / "more.safetensors")
    with pytest.raises(ConfigError, match="no variant of this package has its parameters"):
        tt.create_model(checkpoint=tmp_path / "more.safetensors")
    with pytest.raises(CheckpointError, match="1 unknown to the network: extra.weight"):
        tt.create_model("mambavision_tiny", checkpoint=tmp_path / "more.safetensors")


def test_a_file_that_states_another_family_is_refused_with_the_right_name(tmp_path: Path) -> None:
    model = tiny("mambavision_tiny").float()
    (tmp_path / "a.safetensors").write_bytes(encode_weights(model.state_dict(), describe(model).to_metadata()))
    with pytest.raises(CheckpointError, match="holds the weights of 'mambavision_tiny', not of 'vssd_micro'"):
        tt.create_model("vssd_micro", checkpoint=tmp_path / "a.safetensors")


def test_a_noncommercial_license_is_reported_once_and_written_into_files(tmp_path: Path, mambavision: Any) -> None:
    checkpoint_module._warn_of_license.cache_clear()
    path = write_file(tmp_path, mambavision, file="mambavision_tiny_1k.pth.tar")
    with pytest.warns(TrustWarning, match="CC-BY-NC-SA-4.0, forbids commercial use"):
        model = tt.create_model(checkpoint=path)
    assert describe(model).to_metadata()["license"] == "CC-BY-NC-SA-4.0"
    assert Checkpoint.open(path).to_metadata()["license"] == "CC-BY-NC-SA-4.0"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tt.create_model(checkpoint=path)


def test_every_way_to_load_a_file_reports_its_license(tmp_path: Path, mambavision: Any) -> None:
    path = write_file(tmp_path, mambavision, file="mambavision_tiny_1k.pth.tar")
    made = tt.create_model("mambavision_tiny", num_classes=3)
    checkpoint_module._warn_of_license.cache_clear()
    with pytest.warns(TrustWarning, match="forbids commercial use"):
        tt.load_checkpoint(made, path)
    assert made.license == "CC-BY-NC-SA-4.0"


def test_a_published_average_is_the_average_of_a_file_with_both(tmp_path: Path) -> None:
    model = tiny("vssd_micro")
    average = {key: value + 1 for key, value in model.state_dict().items()}
    for file, expected in (("vssd_tiny_best_ema.pth", average), ("vssd_micro_best.pth", model.state_dict())):
        torch.save({"model": model.state_dict(), "model_ema": average}, tmp_path / file)
        loaded = tt.load_checkpoint(tiny("vssd_micro"), tmp_path / file).state_dict()
        assert all(torch.equal(loaded[key], value) for key, value in expected.items())
    torch.save({"state_dict": model.state_dict()}, tmp_path / "vssd_tiny_best_ema.pth")
    loaded = tt.load_checkpoint(tiny("vssd_micro"), tmp_path / "vssd_tiny_best_ema.pth").state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) for n in ORDERED])
def test_onnx_of_any_size_agrees_and_has_no_custom_operators(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    model = tiny(name).float()
    model.preprocessing = Preprocessing(size=64, resize=None, crop=False)
    exported = export_network(model, "onnx", tmp_path / "model.onnx", size="any")
    assert exported.agreement.largest_error < 1e-4 * exported.agreement.largest_logit
    assert {imported.domain for imported in onnx.load(tmp_path / "model.onnx").opset_import} <= {"", "ai.onnx"}


@pytest.mark.slow
def test_onnx_of_any_size_has_as_many_windows_as_the_image_needs(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model = tiny("mambavision_tiny", windows=(8, 8, 7, 4)).float()  # at 97 pixels a single window in each direction
    model.preprocessing = Preprocessing(size=128, resize=None, crop=False)
    exported = export_network(model, "onnx", tmp_path / "model.onnx", size="any")
    assert exported.agreement.largest_error < 1e-4 * exported.agreement.largest_logit


def test_vssd_refuses_images_that_are_no_multiple_of_32() -> None:
    with pytest.raises(ShapeError, match="images are 50x70; VSSD takes .* multiples of 32: resize them to 64x64"):
        tiny("vssd_micro")(torch.zeros(1, 3, 50, 70, dtype=torch.float64))


def test_adapted_fusion_kernels_of_spatialmamba_take_effect_in_evaluation_mode() -> None:
    model, batch = tiny("spatialmamba_tiny"), images(1)
    with torch.no_grad():
        before = model(batch)
        model.layers[0].blocks[0].self_attention.state_fusion.alpha.add_(1.0)
        assert not torch.allclose(model(batch), before)


# MambaVision.


def test_windows_pad_maps_of_any_size() -> None:
    model = tiny("mambavision_tiny")
    for height, width in ((32, 32), (40, 72), (100, 36), (33, 47)):
        batch = torch.randn(2, 3, height, width, dtype=torch.float64)
        with torch.no_grad():
            assert model(batch, order="mixer_v_flip").isfinite().all()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dim": 7}, "give an even one"),
        ({"heads": (1, 1, 3, 4)}, "3 heads do not divide 320 channels"),
        ({"windows": (7, 7)}, "4 depths, 2 windows and 4 heads"),
    ],
)
def test_wrong_fields_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tt.create_model("mambavision_tiny", **fields)


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("vssd_tiny", {"heads": (3, 4, 8, 16)}, "3 heads do not divide 128 channels"),
        ("vssd_tiny", {"heads": (2, 4)}, "4 dims, 2 heads and 4 values of attention"),
        ("spatialmamba_tiny", {"dims": (64, 100, 256, 512)}, "each stage doubles"),
        ("efficientvmamba_tiny", {"dims": (4, 8, 16, 32)}, "at least 8"),
        ("msvmambav3_tiny", {"mlp_ratio": 4.0}, "mlp_ratio"),
    ],
)
def test_wrong_fields_of_other_families_are_refused(name: str, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tt.create_model(name, **fields)
