"""Records of benchmark runs and the results store; without torch."""

from trust_tta.results.codec import canonical_json, from_json, to_json
from trust_tta.results.display import format_gain, format_percent, format_value, make_label
from trust_tta.results.export import write_csv, write_parquet
from trust_tta.results.record import (
    Cell,
    CellKey,
    CellResult,
    History,
    Provenance,
    Reliability,
    SamplePrediction,
    discordant,
)
from trust_tta.results.store import Counts, Failure, ResultStore

__all__ = [
    "Cell",
    "CellKey",
    "CellResult",
    "Counts",
    "Failure",
    "History",
    "Provenance",
    "Reliability",
    "ResultStore",
    "SamplePrediction",
    "canonical_json",
    "discordant",
    "format_gain",
    "format_percent",
    "format_value",
    "from_json",
    "make_label",
    "to_json",
    "write_csv",
    "write_parquet",
]
