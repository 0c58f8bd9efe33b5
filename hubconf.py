"""torch.hub's door: `torch.hub.load("OWNER/REPOSITORY", "vmamba_tiny_s1l8", pretrained=True)`.

There is an entry point for each network that classifies images, and `adapt` wraps one in a method.
"""

import sys as _sys
from pathlib import Path as _Path

dependencies = ["torch", "numpy", "numba", "PIL", "pydantic", "safetensors", "scipy"]

_sys.path.insert(0, str(_Path(__file__).resolve().parent / "src"))

from trust_tta import create_method as _create_method  # noqa: E402
from trust_tta import create_model as _create_model  # noqa: E402
from trust_tta.models.config import UPerNetConfig as _UPerNetConfig  # noqa: E402
from trust_tta.models.pretrained import PRETRAINED as _PRETRAINED  # noqa: E402
from trust_tta.models.variants import VARIANTS as _VARIANTS  # noqa: E402


def _entry_point(name):
    published = next((known.name for known in _PRETRAINED.values() if known.variant == name), None)

    def create(pretrained=False, **fields):
        if pretrained and published is None:
            raise ValueError(f"{name} has no published weights; give checkpoint=FILE, or omit pretrained")
        if pretrained:
            fields["checkpoint"] = published
        return _create_model(name, **fields)

    create.__name__ = name
    create.__doc__ = f"""The network '{name}'; `pretrained` loads {published or "nothing: no weights are published"}.

    `checkpoint` is a file of weights; the other keywords are fields of its configuration, as num_classes.
    """
    return create


for _name, _config in _VARIANTS.items():
    if not isinstance(_config, _UPerNetConfig):
        globals()[_name] = _entry_point(_name)


def adapt(model, method="tide", **options):
    """A method over a network: call it with a batch of images, and it adapts and predicts."""
    return _create_method(method, model, **options)
