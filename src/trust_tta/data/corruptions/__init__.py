"""The 15 common corruptions of CIFAR-10-C and ImageNet-C and the four held-out ones, at five severities."""

from trust_tta.data.corruptions.apply import corrupt
from trust_tta.data.corruptions.table import ALL_CORRUPTIONS, CORRUPTIONS, EXTRA_CORRUPTIONS, SEVERITIES, TABLES

__all__ = ["ALL_CORRUPTIONS", "CORRUPTIONS", "EXTRA_CORRUPTIONS", "SEVERITIES", "TABLES", "corrupt"]
