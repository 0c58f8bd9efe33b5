"""VMambaConfig: upstream's keyword names, overrides, and refusals that list every mistake at once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError

import trust_tta as tt
from trust_tta.errors import ConfigError
from trust_tta.models.variants import VARIANTS

# Upstream's keywords of its first network with MLPs, and of its first network of all.
OFFICIAL: dict[str, Any] = {
    "depths": [2, 2, 8, 2], "dims": 96, "drop_path_rate": 0.2, "patch_size": 4, "in_chans": 3, "num_classes": 1000,
    "ssm_d_state": 1, "ssm_ratio": 1.0, "ssm_dt_rank": "auto", "ssm_act_layer": "silu", "ssm_conv": 3,
    "ssm_conv_bias": False, "ssm_drop_rate": 0.0, "ssm_init": "v0", "forward_type": "v05_noz", "mlp_ratio": 4.0,
    "mlp_act_layer": "gelu", "mlp_drop_rate": 0.0, "gmlp": False, "patch_norm": True, "norm_layer": "ln2d",
    "downsample_version": "v3", "patchembed_version": "v2", "use_checkpoint": False, "posembed": False, "imgsize": 224,
}  # fmt: skip
VANILLA = OFFICIAL | {
    "depths": [2, 2, 9, 2], "drop_path_rate": 0.1, "ssm_d_state": 16, "ssm_ratio": 2.0, "ssm_conv_bias": True,
    "forward_type": "v0", "mlp_ratio": 0.0, "norm_layer": "ln", "downsample_version": "v1", "patchembed_version": "v1",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "variant"),
    [
        ({}, "vmamba_tiny_s1l8"),
        ({"norm_layer": "bn"}, "vmamba_tiny_s1l8_bn"),
        ({"depths": [2, 2, 5, 2], "ssm_ratio": 2.0}, "vmamba_tiny_s2l5"),
        ({"dims": [128, 256, 512, 1024], "depths": (2, 2, 20, 2), "drop_path_rate": 0.5}, "vmamba_base_s1l20"),
        (VANILLA, "vanilla_vmamba_tiny"),
        (VANILLA | {"norm_layer": "LN"}, "vanilla_vmamba_tiny"),  # upstream does not mind the case
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_upstream_keywords_give_the_variant(changes: dict[str, Any], variant: str) -> None:
    assert tt.VMambaConfig.from_official(OFFICIAL | changes) == VARIANTS[variant]


def test_missing_keywords_take_the_defaults() -> None:
    assert tt.VMambaConfig.from_official({}) == tt.VMambaConfig()


def test_every_refusal_is_listed_at_once() -> None:
    wrong = {
        "ssm_act_layer": "relu",
        "forward_type": "v05_ondwconv3",
        "norm_layer": "gn",
        "downsample_version": "v2",
        "gmlp": True,
        "experiment": "x",
        "ssm_dt_rank": "large",
        "patchembed_version": ["v2"],
    }
    with pytest.raises(ConfigError) as caught:
        tt.VMambaConfig.from_official(OFFICIAL | wrong)
    message = str(caught.value)
    assert "\n" not in message
    for key in wrong:
        assert key in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"depths": (2, 2), "dims": (8,)}, "2 depths and 1 dims"),
        ({"depths": (), "dims": ()}, "depths is .*give at least 1 of them.*; dims is"),
        ({"depths": (0, 1, 1, 1)}, "depths.0 is 0; give a value >= 1"),
        ({"num_classes": 0}, "num_classes"),
        ({"norm": "group"}, "norm is 'group'; choose one of layer, batch"),
        ({"drop_path": 1.0}, "drop_path"),
        ({"conv_size": 2}, "conv_size: 2 is even; give an odd number"),
        ({"patch_size": 3}, "an overlapping stem needs an even one"),
        ({"dt_rank": 0}, "dt_rank"),
        ({"depths": 3}, "depths is 3; give a list"),
        ({"dims": "96"}, "dims is '96'; give a list"),
        ({"num_classes": "ten"}, "num_classes is 'ten'; give an integer"),
        ({"ssm_ratio": "2"}, "ssm_ratio is '2'; give a number"),
        ({"gate": 1}, "gate is 1; give true or false"),
        ({"ssm_ratio": math.nan}, "ssm_ratio is nan"),
        ({"ssm_ratio": 1e9}, "ssm_ratio is 1000000000.0; give a value <= 16"),
        ({"ssm_ratio": 1e-9}, "a scan would have no channels"),
        ({"mlp_ratio": math.inf}, "mlp_ratio is inf"),
        ({"drop_path": math.nan}, "drop_path is nan"),
        ({"d_state": 10**5000}, "d_state is an integer of 5001 digits"),
        ({"dims": (10**9,) * 4}, "dims.0 is 1000000000; give a value <= 16384"),
        ({"depths": (1,) * 10**6}, "depths is .*; give at most 16 of them"),
        ({"depths": (256,) * 4, "dims": (16384,) * 4}, r"about 2\..e\+12 parameters; at most 1e\+09"),
        ({"num_classes": 10**6, "dims": (96, 192, 384, 16384)}, r"about 2\..e\+10 parameters"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_impossible_values_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        tt.VMambaConfig().override(changes)
    assert "\n" not in str(caught.value)


def test_several_mistakes_are_told_together() -> None:
    with pytest.raises(ConfigError, match="drop_path.*|conv_size.*") as caught:
        tt.VMambaConfig(drop_path=2.0, conv_size=4)
    assert "drop_path" in str(caught.value)
    assert "conv_size" in str(caught.value)


def test_an_unknown_field_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="ssm_ration: there is no such option; did you mean 'ssm_ratio'"):
        tt.VMambaConfig().override({"ssm_ration": 3})


def test_a_config_is_frozen_hashable_and_takes_lists() -> None:
    config = tt.VMambaConfig(depths=[1, 1], dims=[8, 16])  # type: ignore[arg-type]
    assert hash(config) == hash(tt.VMambaConfig(depths=(1, 1), dims=(8, 16)))
    with pytest.raises(ValidationError):
        config.d_state = 2  # type: ignore[misc]


@pytest.mark.parametrize("name", sorted(name for name in VARIANTS if not name.startswith("upernet_")))
def test_the_rough_size_of_a_network_is_within_a_factor_of_three(name: str) -> None:
    with torch.device("meta"):
        parameters = sum(p.numel() for p in tt.create_model(name).parameters())
    assert parameters / 3 < VARIANTS[name].rough_size() < 3 * parameters
