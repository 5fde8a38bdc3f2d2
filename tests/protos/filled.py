"""Messages of every kind with a distinct value in every field, so that a mapping's mistakes show."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from enum import Enum
from itertools import count
from typing import Any, TypeVar

import msgspec

Message = TypeVar("Message")


def filled(kind: type[Message], numbers: Iterator[int] | None = None) -> Message:
    """Return a message of a kind whose fields, theirs included, hold no default and no value twice."""
    numbers = count(3) if numbers is None else numbers
    hints = typing.get_type_hints(kind)
    defaults = {each.name: _default(each) for each in _fields(kind)}
    return kind(**{name: _value(hints[name], numbers, default) for name, default in defaults.items()})


def at_default(message: object) -> set[str]:
    """Return the fields of a message that hold their default."""
    return {each.name for each in _fields(type(message)) if getattr(message, each.name) == _default(each)}


def names(kind: type) -> set[str]:
    """Return the names of a kind's fields."""
    return {each.name for each in _fields(kind)}


def _fields(kind: Any) -> tuple[Any, ...]:
    return dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else msgspec.structs.fields(kind)


def _default(field: Any) -> object:
    factory = field.default_factory
    return field.default if factory in (dataclasses.MISSING, msgspec.NODEFAULT) else factory()


def _value(hint: Any, numbers: Iterator[int], default: object = None) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _value(next(each for each in args if each is not type(None)), numbers, default)
    if origin is dict:
        return {_value(args[0], numbers): _value(args[1], numbers)}
    if origin in (tuple, list):
        items = args[:1] * 2 if args[-1] is Ellipsis else args
        return origin(_value(each, numbers) for each in items)
    if issubclass(hint, tuple):  # a named one
        return hint(*(_value(each, numbers) for each in typing.get_type_hints(hint).values()))
    is_message = dataclasses.is_dataclass(hint) or issubclass(hint, msgspec.Struct)
    return filled(hint, numbers) if is_message else _plain(hint, next(numbers), default)


def _plain(hint: type, number: int, default: object) -> object:
    if hint is bool:
        return not default
    if issubclass(hint, Enum):
        return next(member for member in reversed(list(hint)) if member != default)
    if hint is bytes:
        return str(number).encode()
    return hint(number + 0.5) if hint is float else hint(number)  # type: ignore[call-arg]
