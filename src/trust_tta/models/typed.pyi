"""`create_model` with the network of every name. Written by `make typed`: do not edit."""

from os import PathLike
from typing import Any, Literal, overload

from torch import nn

from trust_tta.models.base import ScanNetwork
from trust_tta.models.upernet import UPerNet
from trust_tta.models.vmamba import VMamba
from trust_tta.preprocessing import Preprocessing

@overload
def create_model(
    name: Literal[
        "vanilla_vmamba_base",
        "vanilla_vmamba_base_bn",
        "vanilla_vmamba_small",
        "vanilla_vmamba_small_bn",
        "vanilla_vmamba_tiny",
        "vanilla_vmamba_tiny_bn",
        "vmamba_base_s1l20",
        "vmamba_base_s1l20_bn",
        "vmamba_base_s2l15",
        "vmamba_base_s2l15_bn",
        "vmamba_nano",
        "vmamba_small_s1l20",
        "vmamba_small_s1l20_bn",
        "vmamba_small_s2l15",
        "vmamba_small_s2l15_bn",
        "vmamba_tiny_s1l8",
        "vmamba_tiny_s1l8_bn",
        "vmamba_tiny_s2l5",
        "vmamba_tiny_s2l5_bn",
    ],
    *,
    num_classes: int | None = None,
    checkpoint: str | PathLike[str] | None = None,
    preprocessing: Preprocessing | str | None = None,
    **overrides: Any,
) -> VMamba: ...
@overload
def create_model(
    name: Literal[
        "efficientvmamba_base",
        "efficientvmamba_small",
        "efficientvmamba_tiny",
        "groupmamba_base",
        "groupmamba_small",
        "groupmamba_tiny",
        "localvim_small",
        "localvim_tiny",
        "localvim_tiny_midclstok",
        "localvmamba_small",
        "localvmamba_tiny",
        "mambavision_base",
        "mambavision_base_21k",
        "mambavision_large",
        "mambavision_large2",
        "mambavision_large2_512_21k",
        "mambavision_large3_256_21k",
        "mambavision_large3_512_21k",
        "mambavision_large_21k",
        "mambavision_small",
        "mambavision_tiny",
        "mambavision_tiny2",
        "msvmamba_micro",
        "msvmamba_nano",
        "msvmamba_tiny",
        "msvmambav3_base",
        "msvmambav3_small",
        "msvmambav3_tiny",
        "spatialmamba_base",
        "spatialmamba_small",
        "spatialmamba_tiny",
        "vim_base",
        "vim_small",
        "vim_small_stride8",
        "vim_tiny",
        "vim_tiny_stride8",
        "vssd_base",
        "vssd_micro",
        "vssd_small",
        "vssd_tiny",
    ],
    *,
    num_classes: int | None = None,
    checkpoint: str | PathLike[str] | None = None,
    preprocessing: Preprocessing | str | None = None,
    **overrides: Any,
) -> ScanNetwork: ...
@overload
def create_model(
    name: Literal[
        "upernet_vanilla_vmamba_base",
        "upernet_vanilla_vmamba_base_bn",
        "upernet_vanilla_vmamba_small",
        "upernet_vanilla_vmamba_small_bn",
        "upernet_vanilla_vmamba_tiny",
        "upernet_vanilla_vmamba_tiny_bn",
        "upernet_vmamba_base_s1l20",
        "upernet_vmamba_base_s1l20_bn",
        "upernet_vmamba_base_s2l15",
        "upernet_vmamba_base_s2l15_bn",
        "upernet_vmamba_nano",
        "upernet_vmamba_small_s1l20",
        "upernet_vmamba_small_s1l20_bn",
        "upernet_vmamba_small_s2l15",
        "upernet_vmamba_small_s2l15_bn",
        "upernet_vmamba_tiny_s1l8",
        "upernet_vmamba_tiny_s1l8_bn",
        "upernet_vmamba_tiny_s2l5",
        "upernet_vmamba_tiny_s2l5_bn",
    ],
    *,
    num_classes: int | None = None,
    checkpoint: str | PathLike[str] | None = None,
    preprocessing: Preprocessing | str | None = None,
    **overrides: Any,
) -> UPerNet: ...
@overload
def create_model(
    name: str | None = None,
    *,
    num_classes: int | None = None,
    checkpoint: str | PathLike[str] | None = None,
    preprocessing: Preprocessing | str | None = None,
    **overrides: Any,
) -> nn.Module: ...
