"""Random JSON schemas of the keywords that requests use, with short instances only, so that any model ends them."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]
_COMPACT = {"whitespace_flexible": False}  # llguidance's own keyword; a random model would write white space for ever


def random_schema(seed: int) -> Schema:
    dice = random.Random(seed)
    return {**_object(dice, depth=2), "x-guidance": _COMPACT}


def _value(dice: random.Random, depth: int) -> Schema:
    kinds = [_string, _integer, _number, _enum, _constant, _boolean, _any_of, _pattern]
    if depth > 0:
        kinds += [_object, _array, _array]
    return dice.choice(kinds)(dice, depth)


def _object(dice: random.Random, depth: int) -> Schema:
    names = dice.sample(["name", "value", "tags", "is", "none", "é", 'a "b"', "x-1"], dice.randint(0, 4))
    return {
        "type": "object",
        "properties": {name: _value(dice, depth - 1) for name in names},
        "required": [name for name in names if dice.random() < 0.7],
        "additionalProperties": False,
    }


def _array(dice: random.Random, depth: int) -> Schema:
    least = dice.randint(0, 2)
    return {
        "type": "array",
        "items": _value(dice, depth - 1),
        "minItems": least,
        "maxItems": least + dice.randint(0, 2),
    }


def _string(dice: random.Random, depth: int) -> Schema:
    least = dice.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + dice.randint(0, 4)}


def _pattern(dice: random.Random, depth: int) -> Schema:
    return {"type": "string", "pattern": dice.choice(["^[a-z]{2,5}$", "^(yes|no)$", "^[0-9]{3}-[0-9]{2}$", "^ä?ö$"])}


def _integer(dice: random.Random, depth: int) -> Schema:
    least = dice.randint(-200, 200)
    return {"type": "integer", "minimum": least, "maximum": least + dice.choice([0, 7, 1000])}


def _number(dice: random.Random, depth: int) -> Schema:
    return {"enum": [dice.randint(0, 99) / 4 for _ in range(3)]}


def _enum(dice: random.Random, depth: int) -> Schema:
    return {"enum": dice.sample(["red", "green", "blue", 1, 2.5, None, True], 3)}


def _constant(dice: random.Random, depth: int) -> Schema:
    return {"const": dice.choice(["on", 7, None, False])}


def _boolean(dice: random.Random, depth: int) -> Schema:
    return {"type": "boolean"}


def _any_of(dice: random.Random, depth: int) -> Schema:
    return {"anyOf": [_integer(dice, 0), _string(dice, 0), {"type": "null"}]}
