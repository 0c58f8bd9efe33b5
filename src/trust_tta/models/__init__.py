"""Networks and their checkpoints: VMamba, its variants as data, and networks from outside the package."""

from trust_tta.optional import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(  # typed in __init__.pyi
    __name__,
    {
        "Checkpoint": "trust_tta.models.checkpoint",
        "load_checkpoint": "trust_tta.models.checkpoint",
        "VMambaConfig": "trust_tta.models.config",
        "create_model": "trust_tta.models.typed",
        "list_models": "trust_tta.models.factory",
        "load": "trust_tta.models.factory",
        "Network": "trust_tta.models.networks",
        "PRETRAINED": "trust_tta.models.pretrained",
        "Pretrained": "trust_tta.models.pretrained",
        "slide": "trust_tta.models.upernet",
        "VMamba": "trust_tta.models.vmamba",
    },
)
