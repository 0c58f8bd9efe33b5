"""Records of benchmark runs and the results store; without torch."""

from trust_tta.results.codec import canonical_json as canonical_json
from trust_tta.results.codec import from_json as from_json
from trust_tta.results.codec import to_json as to_json
from trust_tta.results.display import format_gain as format_gain
from trust_tta.results.display import format_number as format_number
from trust_tta.results.display import format_percent as format_percent
from trust_tta.results.display import make_label as make_label
from trust_tta.results.export import write_csv as write_csv
from trust_tta.results.export import write_parquet as write_parquet
from trust_tta.results.record import Cell as Cell
from trust_tta.results.record import CellKey as CellKey
from trust_tta.results.record import CellResult as CellResult
from trust_tta.results.record import History as History
from trust_tta.results.record import Provenance as Provenance
from trust_tta.results.record import Reliability as Reliability
from trust_tta.results.record import SamplePrediction as SamplePrediction
from trust_tta.results.record import discordant as discordant
from trust_tta.results.store import Counts as Counts
from trust_tta.results.store import Failure as Failure
from trust_tta.results.store import PlannedCell as PlannedCell
from trust_tta.results.store import ResultStore as ResultStore
