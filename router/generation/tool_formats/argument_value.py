"""Arguments that a model has written as text, as the values that a function's schema wants."""

from __future__ import annotations

import json
from collections.abc import Mapping

from router.generation.tool_formats.python_calls import read_python_value

_MAX_UNIONS = 8  # within each other
_TYPES: dict[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    str: ("string",),
    dict: ("object",),
    list: ("array",),
    type(None): ("null",),
}


def arguments_in(value: object) -> dict[str, object] | None:
    """Return the arguments of a call: an empty object if they are missing or null; None for any other value."""
    if isinstance(value, str) and value.strip():
        value = _value_in(value)
    if value is None or value == "" or (isinstance(value, str) and not value.strip()):
        return {}
    return value if isinstance(value, dict) else None


def properties(schema: object) -> Mapping[str, object]:
    """Return the schemas of a function's parameters by name."""
    found = schema.get("properties") if isinstance(schema, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def with_definitions(schema: object, outer: Mapping[str, object]) -> object:
    """Return a parameter's schema with the definitions that its references name."""
    definitions = {key: outer[key] for key in ("$defs", "definitions") if key in outer}
    return {**definitions, **schema} if isinstance(schema, Mapping) else schema


def types_of(schema: object, num_unions: int = 0) -> frozenset[str]:
    """Return the JSON types that a schema allows at its top; empty if it names no type or nests too many unions."""
    if not isinstance(schema, Mapping) or num_unions > _MAX_UNIONS:
        return frozenset()
    named = schema.get("type")
    types = {named} if isinstance(named, str) else set(named) if isinstance(named, list) else set()
    for union in ("anyOf", "oneOf"):
        for choice in schema.get(union) or ():
            types |= types_of(choice, num_unions + 1)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not types and isinstance(values, list):
        types = {_TYPES[type(value)][0] for value in values}
    return frozenset(each for each in types if isinstance(each, str))


def is_text(schema: object) -> bool:
    """True if a parameter takes any text as it is written, or its schema names no type."""
    return types_of(schema) <= {"string"} and not (isinstance(schema, Mapping) and "$ref" in schema)


def argument_value(text: str, schema: object) -> object:
    """Return the value that `text` means for a parameter: the text itself where no other type fits."""
    if is_text(schema):
        return text
    value = _value_in(text)
    wanted = types_of(schema)
    if wanted and "string" in wanted and not wanted.intersection(_TYPES[type(value)]):
        return text
    return value


def _value_in(text: str) -> object:
    """Return the value of a text in JSON, or as Python writes it; the text itself if it is in neither."""
    for read in (_read_json, read_python_value):
        try:
            value = read(text.strip())
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, RecursionError, MemoryError):
            continue
        return value
    return text


def _read_json(text: str) -> object:
    value: object = json.loads(text)
    return value
