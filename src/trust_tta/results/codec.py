"""Frozen dataclasses as strict JSON, exact in both directions."""

from __future__ import annotations

import base64
import json
import math
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from trust_tta.errors import DataError

SCHEMA_VERSION = 3

Record = TypeVar("Record")


def canonical_json(value: object) -> str:
    """Canonical JSON: sorted keys, no spaces, ASCII, shortest exact numbers."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def to_json(record: object) -> str:
    """A record as JSON with its kind and schema version."""
    kind = getattr(record, "STORED_KIND", type(record).__name__)  # a class may be stored under another name
    return canonical_json({"schema": SCHEMA_VERSION, "kind": kind, "data": encode(record)})


def from_json(kind: type[Record], text: str) -> Record:
    """The record of type `kind` that `to_json` wrote."""
    name: str = getattr(kind, "STORED_KIND", kind.__name__)
    try:
        envelope = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"a {name} record is not JSON ({error}); the text was cut or changed") from error
    if not isinstance(envelope, dict) or envelope.keys() != {"schema", "kind", "data"} or envelope["kind"] != name:
        raise DataError(f"the JSON is not a {name} record; give text written by to_json of a {name}")
    check_schema(envelope["schema"], what=f"a {name} record")
    record: Record = decode(kind, envelope["data"], where=name)
    return record


def check_schema(found: object, *, what: str) -> None:
    """Refuse any other schema version than this package's."""
    if found != SCHEMA_VERSION:
        raise DataError(
            f"{what} has schema version {found!r}, this package reads {SCHEMA_VERSION}; use the release that wrote it"
        )


def encode(value: object) -> Any:
    """Plain lists, dicts, strings and numbers; NaN, infinities and bytes become strings, since JSON has none."""
    if is_dataclass(value):
        return {f.metadata.get("stored", f.name): encode(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else repr(float(value))
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if value is None or isinstance(value, str | int):
        return value
    kind = type(value).__name__
    raise DataError(f"a record cannot hold {value!r} of type {kind}; give str, int, float, bytes or tuples")


def decode(kind: Any, data: Any, *, where: str) -> Any:
    """Rebuild a value of the annotated type `kind`; `where` names it in errors."""
    if is_dataclass(kind):
        record: Any = kind
        known = _stored_fields(record)
        if not isinstance(data, dict) or data.keys() != known.keys():
            found = sorted(data) if isinstance(data, dict) else type(data).__name__
            raise DataError(f"{where} has the fields {found}, expected {sorted(known)}; the record was changed")
        return record(**{known[key][0]: decode(known[key][1], data[key], where=f"{where}.{key}") for key in data})
    if get_origin(kind) in (Union, UnionType):
        if data is None and NoneType in get_args(kind):
            return None
        (kind,) = (option for option in get_args(kind) if option is not NoneType)
        return decode(kind, data, where=where)
    if get_origin(kind) is tuple and isinstance(data, list):
        return tuple(decode(get_args(kind)[0], item, where=where) for item in data)
    if kind is float and (type(data) in (int, float) or data in ("nan", "inf", "-inf")):
        return float(data)
    if kind in (int, str, bool) and type(data) is kind:
        return data
    if kind is bytes and isinstance(data, str):
        try:
            return base64.b64decode(data, validate=True)
        except ValueError:
            pass  # refused below
    raise DataError(
        f"{where} holds {str(data)[:60]!r} where {getattr(kind, '__name__', kind)} is expected; the record was changed"
    )


@cache
def _stored_fields(kind: Any) -> dict[str, tuple[str, Any]]:
    """Field name and type by stored key."""
    hints = get_type_hints(kind)
    return {f.metadata.get("stored", f.name): (f.name, hints[f.name]) for f in fields(kind)}
