"""Schema violations as messages: the parameter, its value and the limit; for an unknown name, the nearest valid one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from itertools import islice
from typing import get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from protos.errors import RequestError

_MAX_VALUE_CHARACTERS = 80
_LIMITS = {
    "greater_than": "greater than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "finite_number": "a finite number",
    "string_too_short": "at least {min_length} characters long",
    "string_too_long": "at most {max_length} characters long",
    "too_short": "at least {min_length} items long",
    "too_long": "at most {max_length} items long",
    "bool_type": "true or false",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "none_required": "left out or null",
    "literal_error": "one of {expected}",
    "enum": "one of {expected}",
}


def as_request_error(error: ValidationError, schema: type[BaseModel]) -> RequestError:
    """Return the first violation that pydantic found, as an error for the client."""
    details = error.errors(include_url=False)[0]
    path = list(details["loc"])
    param = ".".join(map(str, path)) or None
    return RequestError(_message(details, param, path, schema), param=param)


def _message(details: ErrorDetails, param: str | None, path: list[str | int], schema: type[BaseModel]) -> str:
    kind = details["type"]
    if kind == "json_invalid":
        return f"The body is not valid JSON: {details['ctx']['error']}."
    if param is None:
        return "The body must be a JSON object."
    if kind == "missing":
        return f"Missing required parameter: {param}."
    if kind == "extra_forbidden":
        return f"Unknown parameter: {param}." + _suggestion(str(path[-1]), _names_at(schema, path[:-1]))
    limit = _LIMITS.get(kind)
    if limit is None:
        return f"{param} is {_shown(details['input'])}: {details['msg']}."
    return f"{param} is {_shown(details['input'])}; it must be {limit.format(**details.get('ctx', {}))}."


def _shown(value: object) -> str:
    """Return the beginning of a value, which may have a million items."""
    if isinstance(value, (list, str)):
        value = value[:_MAX_VALUE_CHARACTERS]
    elif isinstance(value, dict):
        value = dict(islice(value.items(), _MAX_VALUE_CHARACTERS))
    text = repr(value)
    return text if len(text) <= _MAX_VALUE_CHARACTERS else text[:_MAX_VALUE_CHARACTERS] + "..."


def _suggestion(name: str, valid: Iterable[str]) -> str:
    nearest = get_close_matches(name, list(valid), n=1)
    return f" Did you mean {nearest[0]}?" if nearest else ""


def _names_at(schema: type[BaseModel], path: list[str | int]) -> Iterable[str]:
    """Return the fields of the schema at `path`, so that a nested unknown name is compared with its own level."""
    for part in path:
        field = schema.model_fields.get(str(part))
        if field is None:
            continue  # the rank in a list
        nested = [kind for kind in _types_in(field.annotation) if issubclass(kind, BaseModel)]
        if not nested:
            return ()
        schema = nested[0]
    return schema.model_fields


def _types_in(annotation: object) -> Iterable[type]:
    if isinstance(annotation, type):
        yield annotation
    for argument in get_args(annotation):
        yield from _types_in(argument)
