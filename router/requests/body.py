"""The base of every request body, its violations as messages, and the thread for long bodies."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import islice
from typing import TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from protos.client_text import check_parts
from protos.errors import RequestError

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
Result = TypeVar("Result")


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
    most = 80  # characters
    if isinstance(value, (list, str)):
        value = value[:most]
    elif isinstance(value, dict):
        value = dict(islice(value.items(), most))
    text = repr(value)
    return text if len(text) <= most else text[:most] + "..."


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


class Body(BaseModel):
    """A body whose JSON types are taken as they are; numbers must be finite, unknown names are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True, protected_namespaces=())


class BodyWork:
    """Runs work on a small body at once, and on a large one in a worker thread.

    One large body at a time: a worker thread shares the interpreter lock with the event loop, and several would make
    it wait for each.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Semaphore(1)

    async def run(self, num_bytes: int, work: Callable[[], Result]) -> Result:
        """Return the result of `work` on a body of `num_bytes`."""
        if num_bytes <= 1 << 14:  # its work takes a few milliseconds, whatever it holds
            return work()
        async with self._turn:
            with _no_collection():
                return await asyncio.to_thread(work)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector away: among a million new lists it would look for garbage again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def read_json(text: str, name: str, param: str) -> object:
    """Return the value of the JSON `text`, a schema or the arguments of a call; `name` is its name for the client.

    Raises:
        RequestError: it is not JSON, or is nested deeper than Python reads, or holds too much.
    """
    check_parts(text.encode(errors="replace"), name)
    try:
        return json.loads(text)
    except ValueError as error:
        raise RequestError(f"{name} is not valid JSON: {error}.", param=param) from None
    except RecursionError:
        raise RequestError(f"{name} is nested too deeply; send a flatter value.", param=param) from None
