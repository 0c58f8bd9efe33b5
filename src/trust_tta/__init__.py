"""Test-time adaptation of vision state-space models: VMamba, TRUST and its baselines."""

from trust_tta.optional import lazy_exports

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_exports(  # typed in __init__.pyi
    __name__,
    {
        "models": "trust_tta",
        "corrupt": "trust_tta.data.corruptions.apply",
        "TrustError": "trust_tta.errors",
        "Guard": "trust_tta.live.guard",
        "Stream": "trust_tta.live.stream",
        "Method": "trust_tta.methods.base",
        "rank_orders": "trust_tta.methods.ranking",
        "list_methods": "trust_tta.methods.registry",
        "create_method": "trust_tta.methods.typed",
        "load_checkpoint": "trust_tta.models.checkpoint",
        "VMambaConfig": "trust_tta.models.config",
        "create_model": "trust_tta.models.typed",
        "list_models": "trust_tta.models.factory",
        "load": "trust_tta.models.factory",
        "fast": "trust_tta.models.fast",
        "VMamba": "trust_tta.models.vmamba",
        "selective_scan": "trust_tta.ops.functional",
        "ScanOrder": "trust_tta.orders",
    },
    defined=["__version__"],
)
