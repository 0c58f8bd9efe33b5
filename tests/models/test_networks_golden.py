"""Networks beside VMamba against the original code: names, shapes, logits; and what a traversal means on each.

Configuration, weights and inputs are read from the golden files, so other files of the same layout run unchanged.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import trust_tta as tt
from tests.golden import BESIDE, ROOT, Arrays, load_golden, load_golden_json
from tests.models.official import from_official
from trust_tta.models.base import ScanNetwork
from trust_tta.models.config import GroupMambaConfig, LocalVimConfig, LocalVMambaConfig, VimConfig
from trust_tta.models.groupmamba import GROUPS, GroupedScan, GroupMamba
from trust_tta.models.localvim import LocalMixer, LocalVim
from trust_tta.models.localvmamba import LocalSS2D, LocalVMamba
from trust_tta.models.sequences import Route, visit
from trust_tta.models.vim import Vim
from trust_tta.models.vmamba import Block
from trust_tta.models.weights import load_state
from trust_tta.ops.map_sequences import read
from trust_tta.training.linear_probe import extract_features, fit_head
from trust_tta.training.recipe import FinetuneRecipe

State = dict[str, Tensor]
Config = dict[str, Any]
Change = Callable[[State, Config], tuple[State, Config]]


@dataclass(frozen=True)
class Family:
    """How the files of one network are read; `tolerance` is that of float32, absolute and relative.

    `variants` say what was changed for the logits of that name, and `networks` who has upstream's mistakes.
    """

    config: Any
    network: Callable[[Any], ScanNetwork]
    variants: dict[str, Change]
    tolerance: float = 1e-4
    networks: dict[str, Callable[[Any], ScanNetwork]] = field(default_factory=dict)


def swap_directions(state: State, config: Config) -> tuple[State, Config]:
    """Vim's forward parameters under the backward names, and the other way round."""

    def other(name: str) -> str:
        for plain, backward in (("A_log", "A_b_log"), ("D", "D_b"), *((p, f"{p}_b") for p in PARTS)):
            for one, two in ((plain, backward), (backward, plain)):
                head, found, tail = name.partition(f".mixer.{one}")
                if found and tail[:1] in ("", "."):
                    return f"{head}.mixer.{two}{tail}"
        return name

    return {other(name): value for name, value in state.items()}, config


PARTS = ("conv1d", "x_proj", "dt_proj")


def exchange_groups(stored: tuple[int, ...]) -> Change:
    """Group k of a GroupMamba with the parameters that are stored for group stored[k]; both counted from 1."""

    def change(state: State, config: Config) -> tuple[State, Config]:
        moved = dict(state)
        for k, other in enumerate(stored, start=1):
            mine = [name for name in state if f".mamba_g{k}." in name]
            moved |= {name: state[name.replace(f".mamba_g{k}.", f".mamba_g{other}.")] for name in mine}
        return moved, config

    return change


def flip_directions(state: State, config: Config) -> tuple[State, Config]:
    """Every direction backwards."""

    def back(name: str) -> str:
        return name.removesuffix("_flip") if name.endswith("_flip") else f"{name}_flip"

    return state, {**config, "directions": [[back(name) for name in four] for four in config["directions"]]}


def permute_groups(state: State, order: tuple[int, ...]) -> State:
    """Group k of a LocalVMamba with the parameters of group order[k]."""
    rows = list(order)
    stacked = ("x_proj_weight", "dt_projs_weight", "dt_projs_bias", "A_logs", "Ds")
    return {
        name: value.unflatten(0, (4, -1))[rows].flatten(0, 1) if name.endswith(stacked) else value
        for name, value in state.items()
    }


class UpstreamSS2D(LocalSS2D):
    """Returns from the columns of a map as upstream does, which is right on square maps alone."""

    def route(self, height: int, width: int, directions: Tensor) -> Route:
        visits, returns = super().route(height, width, directions)
        tokens = torch.arange(height * width).view(height, width).t().flatten()
        mistaken = {"v": tokens, "v_flip": height * width - 1 - tokens}
        rows = [mistaken.get(self.direction_names[int(i)], row) for i, row in zip(directions, returns, strict=True)]
        return Route(visits, torch.stack(rows))


class UpstreamLocalVMamba(LocalVMamba):
    def make_block(self, dim: int, index: int, drop_path: float) -> Block:
        return Block(dim, self.config, UpstreamSS2D(dim, self.config, self.config.directions[index]), drop_path)


FAMILIES = {
    "groupmamba": Family(
        GroupMambaConfig,
        GroupMamba,
        {"fwdbwd": exchange_groups((3, 4, 1, 2)), "cyclic": exchange_groups((2, 3, 4, 1))},
        tolerance=5e-4,
    ),
    "localvmamba": Family(
        LocalVMambaConfig,
        LocalVMamba,
        {
            "flipped": flip_directions,
            "slots_reversed": lambda state, config: (permute_groups(state, (3, 2, 1, 0)), config),
        },
        networks={"rect": UpstreamLocalVMamba},
    ),
    "localvim": Family(LocalVimConfig, LocalVim, {"flipped": flip_directions}),
    "vim": Family(
        VimConfig,
        Vim,
        {"swapped": swap_directions, "no_divide": lambda state, config: (state, {**config, "if_divide_out": False})},
    ),
}


def golden_files() -> list[str]:
    """All files of networks, wherever golden files are looked for."""
    given = os.environ.get("TRUST_TTA_GOLDEN")
    folders = [Path(given)] if given else []
    folders += [BESIDE / "golden", ROOT / "tests" / "golden"]
    names = {path.stem for folder in folders for path in (folder / "networks").glob("*.npz")}
    return sorted(name for name in names if name.split("_")[0] in FAMILIES)


def state_of(arrays: Arrays) -> State:
    marked = {name.removeprefix("param/"): value for name, value in arrays.items() if name.startswith("param/")}
    return {name: torch.from_numpy(np.array(value)) for name, value in marked.items()}


def build(family: Family, config: Config, state: State, variant: str = "") -> ScanNetwork:
    network = family.networks.get(variant, family.network)(from_official(family.config, config))
    load_state(network, state, origin="the golden file")
    return network.eval()


def logits_of(network: ScanNetwork, images: np.ndarray[Any, Any], **options: Any) -> np.ndarray[Any, Any]:
    first = next(network.parameters())
    with torch.no_grad():
        logits: np.ndarray[Any, Any] = network(torch.from_numpy(images).to(first.dtype), **options).numpy()
    return logits


def assert_close(found: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any], tolerance: float, name: str = "") -> None:
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance, err_msg=name)


def input_of(arrays: Arrays, variant: str) -> np.ndarray[Any, Any]:
    return arrays.get(f"x_{variant}", arrays["x"])


@pytest.mark.parametrize("file", golden_files())
def test_logits_are_those_of_the_original_code(file: str) -> None:
    arrays, family = load_golden(f"networks/{file}.npz"), FAMILIES[file.split("_")[0]]
    variants = {n.removeprefix("logits").removesuffix("_f64").strip("_") for n in arrays if n.startswith("logits")}
    for variant in sorted(variants):
        assert not variant or variant in family.variants or f"x_{variant}" in arrays, f"what is '{variant}'?"
        state, config = state_of(arrays), json.loads(str(arrays["config"]))
        if variant in family.variants:
            state, config = family.variants[variant](state, config)
        network, images = build(family, config, state, variant), input_of(arrays, variant)
        name = "logits" + (f"_{variant}" if variant else "")
        assert_close(logits_of(network, images), arrays[name], family.tolerance, name)
        assert_close(logits_of(network.double(), images), arrays[f"{name}_f64"], 1e-10, name)


@pytest.mark.parametrize("file", [name for name in golden_files() if name.startswith("vim")])
def test_exchanged_directions_are_an_order_of_vim(file: str) -> None:
    arrays = load_golden(f"networks/{file}.npz")
    network = build(FAMILIES["vim"], json.loads(str(arrays["config"])), state_of(arrays)).double()
    found = logits_of(network, arrays["x"], order="ca")
    assert_close(found, arrays["logits_swapped_f64"], 1e-10)


@pytest.mark.parametrize("file", [name for name in golden_files() if name.startswith("localvmamba")])
def test_reversed_groups_are_a_scan_order_of_localvmamba(file: str) -> None:
    arrays = load_golden(f"networks/{file}.npz")
    network = build(FAMILIES["localvmamba"], json.loads(str(arrays["config"])), state_of(arrays)).double()
    found = logits_of(network, arrays["x"], order="dcba")
    assert_close(found, arrays["logits_slots_reversed_f64"], 1e-10)
    # Upstream's mistake shows where a map is not square, and nowhere else.
    if "x_rect" in arrays:
        assert np.abs(logits_of(network, arrays["x_rect"]) - arrays["logits_rect_f64"]).max() > 1e-3


def test_directions_visit_the_tokens_as_upstream_does_and_return_every_one_to_its_place() -> None:
    arrays = load_golden("networks/localmamba_orders.npz")
    for name in (name for name in arrays if name.startswith("order/")):
        _, size, direction = name.split("/")
        height, width = map(int, size.split("x"))
        tokens = height * width
        visits = visit((direction,), height, width, torch.device("cpu"))
        expected = np.where(arrays[name] == -1, tokens, arrays[name])
        assert np.array_equal(visits[0].numpy(), expected), name
        route = Route.along(visits, tokens)
        places = torch.arange(tokens + 1).view(1, 1, 1, -1)
        assert torch.equal(read(read(places, route.visits), route.returns)[0, 0, 0], torch.arange(tokens)), name


@pytest.mark.parametrize("file", golden_files())
def test_features_are_those_of_the_original_code(file: str) -> None:
    arrays = load_golden(f"networks/{file}.npz")
    network = build(FAMILIES[file.split("_")[0]], json.loads(str(arrays["config"])), state_of(arrays))
    with torch.no_grad():
        features = network.forward_features(torch.from_numpy(arrays["x"]))
        assert torch.equal(network.forward_head(features), network(torch.from_numpy(arrays["x"])))
    if "features" in arrays:
        assert_close(features.numpy(), arrays["features"], 5e-4)


# The published networks.

PUBLISHED = {
    **{name: name for name in ("vim_tiny", "vim_tiny_stride8", "vim_small", "vim_small_stride8", "vim_base")},
    **{name: name for name in ("groupmamba_tiny", "groupmamba_small", "groupmamba_base")},
    "localvmamba_tiny": "local_vssm_tiny",
    "localvmamba_small": "local_vssm_small",
    "localvim_tiny": "local_vim_tiny",
    "localvim_tiny_midclstok": "local_vim_tiny_middle_cls_token",
    "localvim_small": "local_vim_small",
}


@pytest.mark.parametrize(("name", "published"), PUBLISHED.items())
def test_a_variant_has_the_published_names_shapes_and_count(name: str, published: str) -> None:
    expected = load_golden_json("networks/state_dicts.json")["models"][published]
    with torch.device("meta"):
        model = tt.create_model(name)
    assert isinstance(model, ScanNetwork)
    shapes = {key: list(value.shape) for key, value in model.state_dict().items()}
    assert shapes == {**expected["parameters"], **expected["buffers"]}
    assert sum(p.numel() for p in model.parameters()) == expected["num_parameters"]
    official = {key: value for key, value in expected["constructor"].items() if value != "default True"}
    family = FAMILIES[name.split("_")[0]]
    assert model.config.changed(drop_path=0) == from_official(family.config, official).changed(drop_path=0)


# What a traversal means.

DIRECTIONS = (("h", "v_flip", "w2", "w7_flip"), ("v", "h_flip", "w3", "w2_flip"))
TINY: dict[str, dict[str, Any]] = {
    "vim_tiny": {"image_size": (24, 32), "patch_size": 8, "stride": 8, "dim": 24, "depth": 3, "d_state": 4},
    "groupmamba_tiny": {"stem_dim": 8, "dims": (16, 32), "depths": (1, 1), "mlp_ratios": (2, 2)},
    "localvmamba_tiny": {
        "dims": (16, 24),
        "depths": (1, 1),
        "d_state": 4,
        "directions": DIRECTIONS,
    },
    "localvim_tiny": {
        "image_size": (20, 28),
        "patch_size": 4,
        "stride": 4,
        "dim": 16,
        "depth": 2,
        "d_state": 4,
        "directions": DIRECTIONS,
    },
}
TINY["localvim_tiny_midclstok"] = TINY["localvim_tiny"]


def tiny(name: str, **changes: Any) -> ScanNetwork:
    """A small network whose scans and directions matter, with a steep head."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = tt.create_model(name, num_classes=5, **{**TINY[name], **changes})
        assert isinstance(model, ScanNetwork)
        for key, parameter in model.named_parameters():
            role = model.parameter_roles()[key]
            scale = 0.4 if role.kind == "scan" else 0.2
            parameter.data += scale * torch.randn_like(parameter)
            if "head" in key:
                parameter.data *= 5
            if key.endswith("attn.fc1.bias"):
                parameter.data += 2.5  # no ReLU is dead
    return model.eval()


def pictures(model: ScanNetwork, n: int = 4) -> Tensor:
    side = getattr(model.config, "image_size", (32, 32))
    return torch.randn(n, 3, *side, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", TINY)
def test_scan_orders_give_different_logits_and_each_image_may_have_its_own(name: str) -> None:
    model = tiny(name).double()
    images = pictures(model).double()
    with torch.no_grad():
        alone = {order: model(images, order=order) for order in model.scan_orders}
        rows = torch.stack(list(alone.values())).flatten(1)
        assert torch.equal(model(images), alone[model.scan_orders[0]])
        assert torch.equal(model(images, order="abcd"), alone[model.scan_orders[0]])
        assert len(torch.unique(rows.round(decimals=6), dim=0)) == len(model.scan_orders)
        orders = [model.scan_orders[i % len(model.scan_orders)] for i in (1, 3, 0, 2)]
        mixed = model(images, order=orders)
        for i, order in enumerate(orders):
            torch.testing.assert_close(mixed[i], alone[order][i], rtol=1e-9, atol=1e-9)
        directions = model.scan_directions(orders[0], len(images))
        assert torch.equal(model(images, directions=directions), alone[orders[0]])


def test_orders_of_vim_exchange_nothing_when_both_directions_share_their_parameters() -> None:
    model = tiny("vim_tiny").double()
    state = model.state_dict()
    swapped, _ = swap_directions(state, {})
    shared = {
        name: swapped[name] if name.endswith(("_b", "_b_log")) or "_b." in name else state[name] for name in state
    }
    model.load_state_dict(shared)
    images = pictures(model).double()
    for one, other in (("ac", "ca"), ("bd", "db")):
        torch.testing.assert_close(model(images, order=one), model(images, order=other), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("order", ["bcda", "badc", "dcba", "cabd"])
@pytest.mark.parametrize("name", ["localvmamba_tiny", "localvim_tiny", "localvim_tiny_midclstok"])
def test_an_order_is_a_permutation_of_the_groups_of_parameters(name: str, order: str) -> None:
    """Group k reads direction order[k]: direction j meets the parameters of group inverse[j]."""
    model, permuted = tiny(name).double(), tiny(name).double()
    images, state = pictures(model).double(), model.state_dict()
    if name.startswith("localvmamba"):
        permuted.load_state_dict(permute_groups(state, tt.ScanOrder(order).inverse.indices))
    else:
        moved = {}
        for key, value in state.items():
            place = re.fullmatch(r"(.*\.mixer\.(?:A_log|D|conv1d|x_proj|dt_proj)_)(\d)(.*)", key)
            home = f"{place[1]}{tt.ScanOrder(order)[int(place[2])]}{place[3]}" if place else key
            moved[home] = value
        permuted.load_state_dict(moved)
    torch.testing.assert_close(permuted(images), model(images, order=order), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["localvmamba_tiny", "localvim_tiny", "localvim_tiny_midclstok"])
def test_orders_change_nothing_when_the_groups_share_their_parameters(name: str) -> None:
    model = tiny(name).double()
    state, images = model.state_dict(), pictures(model).double()
    first = {key: state[re.sub(r"_[123](\.|$)", r"_0\1", key)] for key in state}
    model.load_state_dict(permute_groups(first, (0, 0, 0, 0)))
    with torch.no_grad():
        wanted = model(images)
        for order in ("bcda", "badc", "dcba", "adbc"):
            torch.testing.assert_close(model(images, order=order), wanted, rtol=1e-9, atol=1e-9)


def test_an_order_of_groupmamba_is_a_permutation_of_its_groups_with_their_channels() -> None:
    """With groups and channels in another sequence and upstream's directions, the results come in that sequence."""
    torch.manual_seed(0)
    scan, other = GroupedScan(32).double(), GroupedScan(32).double()
    sequence = [2, 0, 3, 1]
    for place, name in zip(sequence, GROUPS, strict=True):
        other.get_submodule(name).load_state_dict(scan.get_submodule(GROUPS[place]).state_dict())
    x = torch.randn(2, 15, 32, dtype=torch.float64)
    visits = visit(("h", "v", "h_flip", "v_flip"), 3, 5, x.device)
    moved = x.unflatten(2, (4, 8))[:, :, sequence].flatten(2)
    found = other.scan(moved, 3, Route.along(visits, 15)).unflatten(2, (4, 8))
    order = tt.ScanOrder([sequence.index(k) for k in range(4)])
    wanted = scan.scan(x, 3, Route.along(visits[list(order)], 15)).unflatten(2, (4, 8))[:, :, sequence]
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def test_a_transposed_scan_order_of_vim_is_the_network_on_transposed_images() -> None:
    model, turned = (tiny("vim_tiny", image_size=(32, 32)).double() for _ in range(2))
    assert isinstance(model, Vim)
    assert isinstance(turned, Vim)
    images = pictures(model).double()
    patches = [i for i in range(model.pos_embed.shape[1]) if i != model.middle]
    order = torch.tensor(patches).view(model.config.grid).t().flatten()
    with torch.no_grad():
        turned.patch_embed.proj.weight.copy_(model.patch_embed.proj.weight.transpose(2, 3))
        turned.pos_embed[0, patches] = model.pos_embed[0, order]
    found = turned(images.transpose(2, 3))
    torch.testing.assert_close(model(images, order="bd"), found, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", TINY)
def test_gradients_reach_every_parameter(name: str) -> None:
    model = tiny(name)
    model(pictures(model), order=model.scan_orders[1]).square().sum().backward()
    silent = [key for key, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    # In the last block of a GroupMamba there is one token: no state is ever carried over.
    silent = [key for key in silent if not (key.startswith("post_network.") and key.endswith(".A_logs"))]
    assert silent == []


@pytest.mark.parametrize("name", TINY)
def test_parameters_have_roles_and_the_norms_are_adapted(name: str) -> None:
    model = tiny(name)
    roles = model.parameter_roles()
    assert set(roles) == {key for key, _ in model.named_parameters()}
    assert {role.kind for role in roles.values()} == {"norm", "scan", "projection", "other"}
    assert {role.last for role in roles.values()} == {True, False}
    assert {key for key, role in roles.items() if role.kind == "norm"} == set(tt.create_method("tent", model).adapted)
    assert all(roles[key].last for key in roles if "head" in key)


@pytest.mark.parametrize("name", TINY)
def test_stochastic_depth_is_switched_alone(name: str) -> None:
    model = tiny(name, drop_path=0.5)
    images = pictures(model)
    with torch.no_grad():
        before = model(images)
        model.set_stochastic_depth(True)
        assert not torch.equal(model(images), before)
        model.set_stochastic_depth(False)
        assert torch.equal(model(images), before)


@pytest.mark.parametrize("name", TINY)
def test_half_precision_follows_float32(name: str) -> None:
    model = tiny(name)
    images = pictures(model)
    with torch.no_grad():
        wanted = model(images)
        with torch.autocast("cpu", torch.bfloat16):
            assert (model(images).float() - wanted).norm() < 0.1 * wanted.norm()
        found = model.bfloat16()(images.bfloat16()).float()
    assert (found - wanted).norm() < 0.1 * wanted.norm()


SMALLER: dict[str, dict[str, Any]] = {
    "vim_tiny": {"image_size": (16, 24), "dim": 8, "depth": 1, "d_state": 2},
    "groupmamba_tiny": {},
    "localvmamba_tiny": {"dims": (4, 4), "d_state": 2},
    "localvim_tiny": {"image_size": (12, 12), "dim": 8, "depth": 1, "d_state": 2, "directions": DIRECTIONS[:1]},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "localvmamba_tiny" else ()) for name in SMALLER]
)
def test_the_kernels_of_a_gpu_give_the_same(name: str) -> None:
    """Triton's, in its interpreter: logits and the gradient of every parameter."""
    model = tiny(name, **SMALLER[name])
    images, results = pictures(model, 2)[:, :, :16], []
    for backend in ("reference", "cpu", "triton"):
        model.set_scan_backend(backend)
        logits = model(images, order=[model.scan_orders[1], model.scan_orders[2]])
        results.append([logits, *torch.autograd.grad(logits.square().sum(), list(model.parameters()))])
    for found in results[1:]:
        for one, other in zip(found, results[0], strict=True):
            assert (one - other).norm() <= 1e-4 * other.norm() + 1e-5


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # PyTorch's own, on loading its compiler
@pytest.mark.parametrize(
    "name", [name if name == "vim_tiny" else pytest.param(name, marks=pytest.mark.slow) for name in TINY]
)
def test_a_network_compiles_whole(name: str) -> None:
    torch._dynamo.reset()
    model = tiny(name)
    images = pictures(model, 2)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for order in (None, model.scan_orders[1]):
        torch.testing.assert_close(compiled(images, order=order), model(images, order=order), rtol=1e-4, atol=1e-4)


def test_a_mixer_of_localvim_scans_around_the_class_token() -> None:
    """Step by step: taken out, the others in their order with zeros, put back in the middle, scanned, and returned."""
    model = tiny("localvim_tiny_midclstok").double()
    assert isinstance(model, LocalVim)
    names, (height, width), middle = model.config.directions[0], model.config.grid, model.middle
    mixer = cast(LocalMixer, model.layers[0].mixer)
    tokens = height * width
    x = torch.randn(2, tokens + 1, 16, dtype=torch.float64)
    u, z = mixer.in_proj(x).chunk(2, dim=-1)
    patches = [i for i in range(tokens + 1) if i != middle]
    total = torch.zeros_like(u)
    for k, name in enumerate(names):
        order = visit((name,), height, width, x.device)[0].tolist()
        zero = torch.zeros_like(u[:, 0])
        sequence = [zero if i == tokens else u[:, patches[i]] for i in order]
        sequence.insert(middle, u[:, middle])
        conv, x_proj, dt_proj = (cast(Any, mixer.get_submodule(f"{part}_{k}")) for part in PARTS)
        steps = F.silu(conv(F.pad(torch.stack(sequence, dim=2), (3, 0))))
        low, B, C = x_proj(steps.transpose(1, 2)).transpose(1, 2).split((1, 4, 4), dim=1)
        A, D = -mixer.get_parameter(f"A_log_{k}").exp(), mixer.get_parameter(f"D_{k}")
        delta = (dt_proj.weight @ low).contiguous()
        y = tt.selective_scan(steps, delta, A, B[:, None], C[:, None], D, dt_proj.bias, backend="reference")
        places = [*order[:middle], None, *order[middle:]]
        result = torch.zeros_like(u)
        for step, place in enumerate(places):
            if place != tokens:
                token = middle if place is None else patches[place]
                result[:, token] = y[:, :, step] * F.silu(z[:, token])
        total = total + mixer.attn(result.transpose(1, 2)).transpose(1, 2)
    route = model.routes(model.scan_directions("abcd", 2))[0]
    torch.testing.assert_close(mixer(x, route), mixer.out_proj(total), rtol=1e-9, atol=1e-9)


# Methods.


@pytest.mark.parametrize("mode", ["sequential", "replicate", "split"])
@pytest.mark.parametrize("name", TINY)
def test_trust_adapts_under_the_scan_orders_of_the_network(name: str, mode: str) -> None:
    model = tiny(name)
    method = tt.create_method("trust", model, lr=1e-3, mode=mode)  # type: ignore[call-overload]
    expected = model.scan_orders if len(model.scan_orders) < 24 else ("abcd", "abdc", "adcb", "bacd", "badc", "dbca")
    assert sorted(map(str, method.orders)) == sorted(expected)
    before = method.weights.snapshot().clone()
    logits = method(pictures(model, 8))
    assert logits.isfinite().all()
    assert not torch.equal(method.weights.snapshot(), before)
    method.reset()
    assert torch.equal(method.weights.snapshot(), before)


@pytest.mark.parametrize("method", ["source", "tent", "sar", "tide", "trust_naive", "ensemble", "repetition"])
@pytest.mark.parametrize("name", TINY)
def test_methods_run(name: str, method: str) -> None:
    model = tiny(name)
    images = pictures(model, 8)
    with torch.no_grad():
        own = model(images)
    adapted = tt.create_method(method, model)
    logits = adapted(images)
    assert logits.shape == own.shape
    assert logits.isfinite().all()


@pytest.mark.parametrize("name", TINY)
def test_orders_are_ranked_and_the_ranking_serves_trust(name: str) -> None:
    model = tiny(name)
    ranking = tt.rank_orders(model, [pictures(model)])
    assert sorted(str(order) for order, _ in ranking) == sorted(model.scan_orders)
    assert [value for _, value in ranking] == sorted(value for _, value in ranking)
    method = tt.create_method("trust", model, orders=ranking, k=2)
    assert method.orders == [order for order, _ in ranking[:2]]


def test_an_order_that_a_network_does_not_have_is_refused() -> None:
    model = tiny("vim_tiny")
    with pytest.raises(tt.errors.ConfigError, match="'badc' is none of this network's; it has ac, ca, bd, db"):
        model(pictures(model), order="badc")
    with pytest.raises(tt.errors.ConfigError, match="it has ac, ca, bd, db"):
        tt.create_method("trust", model, orders=["ab"])


def test_images_of_another_size_are_refused_by_vim() -> None:
    with pytest.raises(tt.errors.ShapeError, match=r"images are 32x32 and this network has positions for 24x32"):
        tiny("vim_tiny")(torch.zeros(1, 3, 32, 32))


def test_both_heads_of_groupmamba_are_held_fixed_by_methods() -> None:
    model = tiny("groupmamba_tiny")
    adapted = tt.create_method("tent", model, parameters="all").adapted
    fixed = {name for name, _ in model.named_parameters()} - set(adapted)
    assert fixed == {"head.weight", "head.bias", "dist_head.weight", "dist_head.bias"}


@pytest.mark.parametrize("name", TINY)
def test_a_new_classifier_is_trained_on_the_frozen_network(name: str) -> None:
    model = tiny(name)
    pixels = np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(20) % 5
    side = getattr(model.config, "image_size", (32, 32))

    images = torch.from_numpy(pixels[:, : side[0], : side[1]].copy()).permute(0, 3, 1, 2) / 255
    before = {key: value.clone() for key, value in model.state_dict().items()}
    recipe = FinetuneRecipe(epochs=60, batch_size=20, lr=0.05)
    result = fit_head(model, extract_features(model, [images]), labels, recipe)
    assert result.losses[-1] < result.losses[0]
    changed = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert changed == set(model.classifier_names())


# Files.


@pytest.mark.parametrize("name", TINY)
def test_a_file_under_upstreams_names_is_loaded_strictly(name: str, tmp_path: Path) -> None:
    model = tiny(name)
    state = model.state_dict()
    torch.save({"model": {f"module.{key}": value for key, value in state.items()}}, tmp_path / "net.pth")
    loaded = tt.create_model(name, checkpoint=tmp_path / "net.pth", **TINY[name])
    assert isinstance(loaded, ScanNetwork)
    assert loaded.config.num_classes == 5
    assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in state.items())
    state.popitem()
    torch.save(state, tmp_path / "net.pth")
    with pytest.raises(tt.errors.CheckpointError, match="1 missing from the file"):
        tt.create_model(name, checkpoint=tmp_path / "net.pth", num_classes=5, **TINY[name])
