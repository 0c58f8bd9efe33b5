from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.results.samples import KEY, PROVENANCE, RESULT
from trust_tta.errors import ConfigError, DataError
from trust_tta.results import (
    CellKey,
    CellResult,
    History,
    Provenance,
    Reliability,
    SamplePrediction,
    from_json,
    to_json,
)
from trust_tta.results.codec import SCHEMA_VERSION

WORDS = st.text(max_size=12)
COUNTS = st.integers(0, 2**62)
FLOATS = st.floats(width=64)
OPTION_VALUES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORDS

KEYS = st.builds(
    CellKey,
    experiment=WORDS,
    dataset=WORDS,
    domain=WORDS,
    severity=st.none() | st.integers(1, 5),
    method=WORDS,
    options=st.dictionaries(WORDS, OPTION_VALUES | st.lists(OPTION_VALUES, max_size=3), max_size=4).map(json.dumps),
    setting=WORDS,
    batch_size=st.integers(1, 1000),
    seed=st.integers(),
    checkpoint=WORDS,
    fingerprint=WORDS,
    limit=st.none() | st.integers(1, 10**9),
)


@st.composite
def courses(draw: st.DrawFn) -> History:
    n = draw(st.integers(0, 9))
    column = st.lists(FLOATS, min_size=n, max_size=n).map(tuple)
    return History(
        samples=draw(st.lists(COUNTS, min_size=n, max_size=n).map(tuple)),
        accuracy=draw(column),
        accuracy_before=draw(st.none() | column),
        entropy=draw(column),
        seconds=draw(column),
    )


def bins(numbers: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(numbers, min_size=15, max_size=15).map(tuple)


PREDICTIONS = st.builds(
    SamplePrediction,
    index=COUNTS,
    label=COUNTS,
    before=st.none() | COUNTS,
    after=st.integers(-1, 9),
    confidence=FLOATS,
    confidence_before=st.none() | FLOATS,
)
RESULTS = st.builds(
    replace,
    st.just(RESULT),
    accuracy=FLOATS,
    accuracy_before=st.none() | FLOATS,
    nll=FLOATS,
    seconds_total=FLOATS,
    peak_memory=st.none() | COUNTS,
    history=courses(),
    reliability=st.builds(Reliability, count=bins(COUNTS), confidence=bins(FLOATS), correct=bins(COUNTS)),
    confusion=st.none() | st.lists(st.lists(COUNTS, max_size=3).map(tuple), max_size=3).map(tuple),
    predictions=st.lists(PREDICTIONS, max_size=3).map(tuple),
)


def exact(value: object) -> Any:
    """A form in which records are equal only when every number has the same bits (up to the payload of a NaN)."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else value.hex()
    if isinstance(value, tuple):
        return tuple(exact(item) for item in value)
    if hasattr(value, "__dataclass_fields__"):
        return {f.name: exact(getattr(value, f.name)) for f in fields(value)}  # type: ignore[arg-type]
    return (type(value).__name__, value)


def strict_loads(text: str) -> Any:
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@given(key=KEYS)
@settings(deadline=None, max_examples=100)
def test_key_round_trip_keeps_equality_and_digest(key: CellKey) -> None:
    again = from_json(CellKey, to_json(key))
    assert again == key
    assert again.digest == key.digest


@given(result=RESULTS)
@settings(deadline=None, max_examples=100)
def test_result_round_trip_is_bit_exact_strict_json(result: CellResult) -> None:
    text = to_json(result)
    strict_loads(text)
    assert exact(from_json(CellResult, text)) == exact(result)


def test_provenance_round_trip() -> None:
    assert from_json(Provenance, to_json(PROVENANCE)) == PROVENANCE


def test_digest_is_sha256_of_the_sorted_compact_json_of_the_fields() -> None:
    names = [f.name for f in fields(CellKey)]
    plain = {name: getattr(KEY, name) for name in names}
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    assert KEY.digest == hashlib.sha256(text.encode()).hexdigest()
    # Pinned: a change of this number orphans every cell in existing stores.
    assert KEY.digest[:16] == "35f96167ee5c9b10"


@pytest.mark.parametrize("name", [f.name for f in fields(CellKey)])
def test_every_field_of_the_key_changes_the_digest(name: str) -> None:
    other: dict[str, Any] = {"severity": 3, "batch_size": 64, "seed": 1, "limit": 10, "options": '{"k":2}'}
    assert replace(KEY, **{name: other.get(name, "other")}).digest != KEY.digest


def test_spelling_of_options_does_not_matter() -> None:
    one = replace(KEY, options='{"lr": 1e-4, "k": 6}')
    two = replace(KEY, options='{ "k":6,"lr":0.0001 }')
    assert one == two
    assert one.digest == two.digest
    assert one.option_values == {"k": 6, "lr": 1e-4}


@pytest.mark.parametrize("options", ["", "[]", "6", '{"k": NaN}', '{"k": 1e999}', "{"])
def test_options_that_are_no_json_object_are_refused(options: str) -> None:
    with pytest.raises(ConfigError, match="JSON object"):
        replace(KEY, options=options)


@pytest.mark.parametrize(("field", "value"), [("batch_size", 0), ("limit", 0), ("limit", -1)])
def test_nonsense_sizes_are_refused(field: str, value: int) -> None:
    changes: dict[str, Any] = {field: value}
    with pytest.raises(ConfigError, match=str(value)):
        replace(KEY, **changes)


def changed(**changes: object) -> str:
    envelope = json.loads(to_json(KEY))
    return json.dumps(envelope | changes)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "not JSON"),
        ("[]", "not a CellKey"),
        (to_json(PROVENANCE), "not a CellKey"),
        (changed(schema=SCHEMA_VERSION + 1), "use the release that wrote it"),
        (changed(schema="1"), "schema version '1'"),
        (changed(data={}), "has the fields"),
        (changed(data=json.loads(to_json(KEY))["data"] | {"seed": "0"}), "CellKey.seed holds '0'"),
        (changed(data=json.loads(to_json(KEY))["data"] | {"seed": True}), "CellKey.seed"),
        (changed(data=json.loads(to_json(KEY))["data"] | {"extra": 1}), "extra"),
    ],
    ids=["cut", "list", "other-kind", "newer", "odd-version", "empty", "string-for-int", "bool-for-int", "unknown"],
)
def test_foreign_json_is_refused_in_one_line(text: str, match: str) -> None:
    with pytest.raises(DataError, match=match) as caught:
        from_json(CellKey, text)
    assert "\n" not in str(caught.value)


def test_records_keep_the_stored_names_of_version_0_1_0() -> None:
    """Renamed classes and fields are stored under their first names, so that all stores can be read."""
    assert json.loads(to_json(PROVENANCE))["kind"] == "Facts"
    stored = json.loads(to_json(RESULT))
    assert stored["data"]["course"]["samples"] == list(RESULT.history.samples)
    assert "history" not in stored["data"]
    assert from_json(CellResult, json.dumps(stored)) == RESULT


def test_no_field_may_be_missing() -> None:
    envelope = json.loads(to_json(SamplePrediction(index=1, label=2, before=3, after=4, confidence=0.5)))
    del envelope["data"]["confidence_before"]
    with pytest.raises(DataError, match="has the fields"):
        from_json(SamplePrediction, json.dumps(envelope))


def test_what_json_cannot_hold_is_refused_when_written() -> None:
    import numpy as np

    with pytest.raises(DataError, match="float32"):
        to_json(replace(RESULT, accuracy=np.float32(0.5)))  # type: ignore[arg-type]


def test_histories_and_bins_of_uneven_length_are_refused() -> None:
    with pytest.raises(DataError, match=r"\[1, 2\]"):
        History(samples=(1, 2), accuracy=(0.5,), entropy=(0.1, 0.2), seconds=(0.1, 0.2))
    with pytest.raises(DataError, match="15"):
        Reliability(count=(1,))


def test_bins_add_up() -> None:
    one = Reliability(count=(4,) + (0,) * 14, confidence=(1.0,) + (0.0,) * 14, correct=(1,) + (0,) * 14)
    total = Reliability.total([one] * 3)
    assert (total.count[0], total.confidence[0], total.correct[0]) == (12, 3.0, 3)
    assert Reliability.total([]) == Reliability()


def test_results_import_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import trust_tta.results, trust_tta.report.tables\n"
        "assert 'scipy' not in sys.modules and 'pyarrow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
