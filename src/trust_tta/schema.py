"""`Schema`, the base of every configuration, option set and recipe: a frozen, strict pydantic model.

TOML files, command-line flags and Python keywords go through `parse`, which reports every mistake at once.
"""

from __future__ import annotations

import difflib
import math
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, TypeVar, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from trust_tta.config_io import MAX_DEPTH, is_too_deep
from trust_tta.errors import ConfigError

_MAX_INTEGER = 2**63 - 1  # the largest integer of arrays, files and databases

Count = Annotated[int, Field(ge=1, le=_MAX_INTEGER)]
Natural = Annotated[int, Field(ge=0, le=_MAX_INTEGER)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Name = Annotated[str, Field(min_length=1)]


def _without_controls(text: str) -> str:
    if any(unicodedata.category(character) == "Cc" for character in text):
        raise ValueError(f"{show(text)} has control characters, which a terminal would obey; omit them")
    return text


Title = Annotated[str, AfterValidator(_without_controls)]  # a name that is shown: no escape sequences, no line breaks

_WANTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "string_too_short": "a string that is not empty",
    "finite_number": "a finite number",
    "greater_than": "a value > {gt}",
    "greater_than_equal": "a value >= {ge}",
    "less_than": "a value < {lt}",
    "less_than_equal": "a value <= {le}",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a table",
    "mapping_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
    "too_short": "at least {min_length} of them",
    "too_long": "at most {max_length} of them",
}
_MAX_SHOWN = 80  # characters of a wrong value in a message


class Schema(BaseModel):
    """A frozen record whose fields are checked when it is created; integers are accepted as floats."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", validate_default=False)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError("; ".join(_mistakes(error, type(self)))) from None

    # Pydantic's own marker: inner models are validated together with the outer one.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @model_validator(mode="before")
    @classmethod
    def _lists_are_tuples(cls, values: Any) -> Any:
        if is_too_deep(values):
            raise ValueError(f"is nested deeper than {MAX_DEPTH} levels; make it flatter")
        return {name: _tuples(value) for name, value in values.items()} if isinstance(values, dict) else values

    def changed(self: S, **changes: Any) -> S:
        """A checked copy with some fields changed."""
        return type(self)(**{name: getattr(self, name) for name in type(self).model_fields} | changes)

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The defaults of all fields that have one."""
        return {n: f.get_default(call_default_factory=True) for n, f in cls.model_fields.items() if not f.is_required()}


S = TypeVar("S", bound=Schema)


def parse(schema: type[S], values: Mapping[str, Any], *, where: str = "") -> S:
    """`values` as a `schema`; one ConfigError names every key that is wrong, and `where` it was written."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where or 'the configuration'} is {show(values)}; give a table of names and values")
    made, mistakes = validate(schema, values)
    if made is None:
        raise ConfigError((f"{where}: " if where else "") + "; ".join(mistakes))
    return made


def validate(
    schema: type[S], values: Mapping[str, Any], *, flags: Mapping[str, str] | None = None
) -> tuple[S | None, list[str]]:
    """`values` as a `schema`, or None and every mistake in them, for a caller that collects more.

    `flags`: the command-line flag of a dotted key, which messages then name in its place.
    """
    try:
        return schema.model_validate({str(key): value for key, value in values.items()}), []
    except ValidationError as error:
        return None, _mistakes(error, schema, flags or {})


def schema_fields(schema: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Dotted key, default (`...` if required) and description of each field, for flags and documentation."""
    for name, field in schema.model_fields.items():
        inner = field.annotation if isinstance(field.annotation, type) else None
        if inner is not None and issubclass(inner, BaseModel):
            yield from schema_fields(inner, f"{prefix}{name}.")
        else:
            default = ... if field.is_required() else field.get_default(call_default_factory=True)
            yield f"{prefix}{name}", default, field.description or ""


def flag_of(key: str) -> str:
    """The command-line flag of a key: `model.name` is --model, `stream.batch_size` is --batch-size."""
    table, _, name = key.rpartition(".")
    return f"--{table if name == 'name' else name}".replace("_", "-")


def _mistakes(error: ValidationError, schema: type[BaseModel], flags: Mapping[str, str] | None = None) -> list[str]:
    """One message per wrong key: the value and what is allowed; alternatives of a union are joined by "or"."""
    mistakes: dict[str, list[str]] = {}
    for details in error.errors(include_url=False):
        problem, wanted = _mistake(details, schema, flags or {})
        mistakes.setdefault(problem, []).extend([wanted] if wanted not in mistakes.get(problem, ()) else [])
    return [f"{problem}; {' or '.join(wanted)}" if any(wanted) else problem for problem, wanted in mistakes.items()]


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """The nearest known name as a question, or all of them."""
    names = list(known)
    close = difflib.get_close_matches(str(name).lower(), [n.lower() for n in names], n=1, cutoff=0.6)
    if close:
        return f"did you mean '{next(n for n in names if n.lower() == close[0])}'?"
    return f"choose one of {', '.join(names)}" if names else "there is none to choose from"


def show(value: object) -> str:
    """A wrong value, short enough for one line."""
    try:
        text = repr(value)
    except ValueError:  # integers of thousands of digits have no repr
        text = f"an integer of {int(math.log10(abs(value))) + 1} digits" if isinstance(value, int) else "a value"
    except RecursionError:
        text = f"a {type(value).__name__} nested too deep"
    if "\n" in text:  # a network, a tensor or an array: show its type
        text = f"a {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def _mistake(details: ErrorDetails, schema: type[BaseModel], flags: Mapping[str, str]) -> tuple[str, str]:
    """The problem and its remedy."""
    kind, value = details["type"], details["input"]
    path, siblings = _walk(schema, details["loc"])
    key = ".".join(path) or "value"
    whole = key.rstrip("0123456789").removesuffix(".")  # an entry of a list belongs to the list's flag
    key = flags.get(whole if path and path[-1].isdigit() else key, key)
    if kind == "extra_forbidden":
        return f"{key}: there is no such option", did_you_mean(path[-1], siblings)
    if kind == "missing":
        return f"{key} is missing, and it has no default", ""
    if kind == "value_error":  # from a validator of ours, whose message is complete
        message = details["msg"].removeprefix("Value error, ")
        return (f"{key}: {message}" if path else message), ""
    context = details.get("ctx", {})
    if kind == "literal_error":
        names = [name.strip("'") for name in context["expected"].replace(" or ", ", ").split(", ")]
        return f"{key} is {show(value)}", did_you_mean(value if isinstance(value, str) else "", names)
    wanted = _WANTED.get(kind, "a value of another kind ({msg})").format(msg=details["msg"], **context)
    return f"{key} is {show(value)}", f"give {wanted}"


def _walk(schema: type[BaseModel], location: tuple[int | str, ...]) -> tuple[list[str], list[str]]:
    """The keys of a location as the user wrote them, and the names allowed at the last level.

    Pydantic's locations also contain the branches of a union, which are skipped.
    """
    path: list[str] = []
    fields, inside, keyed = schema.model_fields, True, False
    for i, step in enumerate(location):
        last = i == len(location) - 1
        if isinstance(step, int) or keyed:
            path.append(str(step))
            keyed = False
        elif inside and (step in fields or last):
            path.append(step)
            annotation = fields[step].annotation if step in fields else None
            inner = _inner_model(annotation)
            if inner is not None and not last:
                fields = inner.model_fields
            inside, keyed = inner is not None, get_origin(annotation) is dict
    return path, list(fields)


def _inner_model(annotation: Any) -> type[BaseModel] | None:
    """The model inside `Model | None`, `tuple[Model, ...]` and the like."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_inner_model(part) for part in getattr(annotation, "__args__", ()))
    return next((model for model in found if model is not None), None)


def _tuples(value: Any) -> Any:
    """Lists as tuples: files and JSON know no other sequence."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
