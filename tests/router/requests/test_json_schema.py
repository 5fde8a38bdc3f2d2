"""JSON schemas as libraries write them: compiled, or refused by the name of what cannot be enforced."""

from __future__ import annotations

import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import re
import uuid
from typing import Annotated, Any, Literal, NamedTuple, Optional

import jsonschema
import pydantic
import pytest
from llguidance import LLTokenizer
from pydantic import BaseModel, Field, TypeAdapter, conint, conlist, constr

from engine.sampling.grammar_trial import _library_source, new_matcher, new_tokenizer
from protos.errors import RequestError
from router.requests.json_schema import MAX_SCHEMA_PARTS, schema_source
from tests.engine.fixtures.byte_tokenizer import BYTE_VOCAB_SIZE, END_ID, write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    folder = tmp_path_factory.mktemp("schemas")
    write_tokenizer(folder)
    return new_tokenizer(folder / "tokenizer.json", BYTE_VOCAB_SIZE, [END_ID])


class Color(enum.Enum):
    RED = "r"
    GREEN = "g"


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    name: str


class Pet(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


class Node(BaseModel):
    value: int
    next: Optional[Node] = None  # noqa: UP045


class Tree(BaseModel):
    children: list[Tree]


class Pair(NamedTuple):
    a: int
    b: str


TYPES: list[Any] = [
    *(Literal["a", 1, None], Color, decimal.Decimal, bytes, re.Pattern, pathlib.Path, Pair, Node, Tree, Pet, Any),
    *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta, uuid.UUID, bool | None, list[Node]),
    *(pydantic.UUID1, pydantic.UUID4, pydantic.UUID7, pydantic.AnyUrl, pydantic.HttpUrl, pydantic.SecretStr),
    *(pydantic.FilePath, pydantic.DirectoryPath, pydantic.NewPath, pydantic.Base64Bytes, pydantic.Base64UrlStr),
    *(pydantic.IPvAnyAddress, pydantic.IPvAnyInterface, pydantic.IPvAnyNetwork, pydantic.Json, pydantic.JsonValue),
    *(ipaddress.IPv4Address, ipaddress.IPv6Address, ipaddress.IPv4Network, ipaddress.IPv6Interface),
    *(pydantic.ByteSize, pydantic.ImportString, pydantic.AwareDatetime, pydantic.PastDate, pydantic.PositiveInt),
    *(conint(gt=1, le=9, multiple_of=2), constr(pattern="^a+$", min_length=2), conlist(int, min_length=1)),
    *(tuple[int, str], tuple[int, ...], dict[str, int], dict[int, str], dict[Literal["a", "b"], int]),
    *(dict[Color, int], dict[constr(pattern="^[a-z]{2}$"), int], dict[constr(min_length=1), int]),
]
OTHERS: dict[str, Any] = {
    "zod record": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}},
    "zod email": {
        "type": "string",
        "format": "email",
        "pattern": r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
    },
    "OpenAPI 3.0": {"type": "number", "minimum": 0, "exclusiveMinimum": True, "nullable": True, "example": 1},
    "TypeBox": {"type": "object", "properties": {"a": {"type": "null"}}, "unevaluatedProperties": False},
    "TypeScript": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "string",
        "$comment": "x",
        "tsType": "",
    },
    "names that are keywords": {
        "type": "object",
        "properties": {"format": {"type": "string", "format": "odd"}, "if": {}, "propertyNames": {}, "uniqueItems": {}},
        "required": ["format"],
    },
    "inert": {"uniqueItems": False, "if": {}, "$dynamicAnchor": "x", "readOnly": True, "deprecated": True},
    "one unique item": {"type": "array", "uniqueItems": True, "maxItems": 1},
}


@pytest.mark.parametrize("kind", TYPES, ids=str)
@pytest.mark.parametrize("mode", ["validation", "serialization"])
def test_the_schema_of_every_type_of_pydantic_s_is_compiled(kind: Any, mode: Any, tokenizer: LLTokenizer) -> None:
    schema = TypeAdapter(kind).json_schema(mode=mode)
    new_matcher(tokenizer, _library_source("json_schema", schema_source("response_format", schema)))


@pytest.mark.parametrize("name", OTHERS)
def test_what_other_libraries_write_is_compiled(name: str, tokenizer: LLTokenizer) -> None:
    new_matcher(tokenizer, _library_source("json_schema", schema_source("response_format", OTHERS[name])))


@pytest.mark.parametrize("format_", ["uuid4", "path", "password", "binary", "base64", "json-string", "int32", "x"])
def test_an_unknown_format_is_an_annotation_wherever_it_stands(format_: str, tokenizer: LLTokenizer) -> None:
    text = {"type": "string", "format": format_}
    nested = {
        "type": "object",
        "properties": {"a": {"anyOf": [{"type": "array", "items": text}, {"$ref": "#/$defs/b"}]}},
    }
    for schema in (text, {**nested, "$defs": {"b": {"allOf": [text]}}}):
        new_matcher(tokenizer, _library_source("json_schema", schema_source("response_format", schema)))


@pytest.mark.parametrize("keyword", ["uniqueItems", "not", "if", "contains", "dependentRequired", "propertyNames"])
def test_a_constraint_that_cannot_be_enforced_is_refused_by_name(keyword: str, tokenizer: LLTokenizer) -> None:
    values: dict[str, Any] = {
        "uniqueItems": True,
        "not": {"type": "null"},
        "if": {"type": "string"},
        "contains": {"type": "null"},
        "dependentRequired": {"a": ["b"]},
        "propertyNames": {"format": "uuid"},
    }
    schema = {keyword: values[keyword], **({"then": False} if keyword == "if" else {})}
    with pytest.raises(ValueError, match=keyword):
        new_matcher(tokenizer, _library_source("json_schema", schema_source("response_format", schema)))


@pytest.mark.parametrize(
    ("ours", "theirs", "texts"),
    [
        (
            r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)$",
            r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$",
            ["1", "-1.5", ".5", "5.", "+0", "", "-", ".", "+.", "1.2.3", "a"],
        ),
        (
            json.loads(schema_source("p", OTHERS["zod email"]))["pattern"],
            OTHERS["zod email"]["pattern"],
            ["a@b.de", "a.b@c.de", ".a@b.de", "a..b@c.de", "a.@b.de", "'@b.de", "'+a@b-c.de", "a@b", "a@b.d", "@b.de"],
        ),
    ],
)
def test_a_pattern_said_without_look_around_matches_the_same_texts(ours: str, theirs: str, texts: list[str]) -> None:
    assert [bool(re.search(ours, text)) for text in texts] == [bool(re.search(theirs, text)) for text in texts]
    assert json.loads(schema_source("p", {"pattern": theirs}))["pattern"] == ours


def test_keys_that_are_named_otherwise_are_the_same_keys() -> None:
    for names in ({"enum": ["a", "b"]}, {"const": "a"}, {"pattern": "^a"}, {"minLength": 2, "maxLength": 3}):
        schema = {"type": "object", "propertyNames": names, "additionalProperties": {"type": "integer"}}
        read = json.loads(schema_source("p", schema))
        assert "propertyNames" not in read
        for key in ("a", "b", "c", "aa", "abcd"):
            value = {key: 1}
            validity = [jsonschema.Draft202012Validator(each).is_valid(value) for each in (schema, read)]
            assert validity[0] == validity[1], (names, key)


def test_keys_that_cannot_be_named_otherwise_are_refused(tokenizer: LLTokenizer) -> None:
    for names in (
        False,
        {"type": "integer"},
        {"enum": ["a", "bbb"], "maxLength": 1},
        {"$ref": "#/$defs/a", "minLength": 2},
    ):
        schema = {"type": "object", "propertyNames": names, "$defs": {"a": {"enum": ["a", "bb"]}}}
        with pytest.raises(ValueError, match="propertyNames"):
            new_matcher(tokenizer, _library_source("json_schema", schema_source("response_format", schema)))


@pytest.mark.parametrize(
    "pattern",
    [
        *('^[^"]*$', r"^[^\\]$", r'^[^-"]*$', r'^[^]"]*$', r'^[^\x00-\x1f"\\]+$', r"^[\x00-\x1f]$", r"^[\u0000- ]$"),
        *(r'^\[[^"\]]$', r'[^"]$', r"^\\[^a]?$"),
    ],
)
def test_a_pattern_without_quotes_matches_no_escaped_quote(pattern: str, tokenizer: LLTokenizer) -> None:
    """Nothing matches that Python's pattern does not match; U+0000 alone may be left out."""
    text = {"type": "string", "pattern": pattern}
    keys = {"type": "object", "patternProperties": {pattern: {"const": 1}}, "additionalProperties": False}
    others = {"type": "object", "propertyNames": {"$ref": "#/$defs/a"}, "$defs": {"a": {"pattern": pattern}}}
    said = ["", '"', "\\", "\n", "\x01", "a", " ", 'a"', "a\\", "-", "]", "é", "[]", "\\b"]
    for schema, value in ((text, "%s"), (keys, "{%s:1}"), (others, "{%s:1}")):
        matcher = new_matcher(tokenizer, _library_source("json_schema", schema_source("response_format", schema)))
        for each in said:
            ids = tokenizer.tokenize_str(value % json.dumps(each, ensure_ascii=False))
            is_matched = matcher.deep_copy().validate_tokens([*ids, END_ID]) > len(ids)
            assert is_matched == bool(re.search(pattern.replace("$", r"\Z"), each)), (schema, each)


def test_a_property_may_say_of_itself_that_it_is_required() -> None:
    inner = {"type": "object", "required": True, "properties": {"b": {"type": "integer", "required": True}, "c": {}}}
    schema = {"type": "object", "properties": {"a": inner, "d": {"required": False}}, "required": ["d"]}
    read = json.loads(schema_source("p", schema))
    assert read["required"] == ["d", "a"]
    assert read["properties"]["a"]["required"] == ["b"]
    assert "required" not in read["properties"]["d"]


def test_no_type_at_all_is_no_circle(tokenizer: LLTokenizer) -> None:
    with pytest.raises(ValueError, match="Unsatisfiable"):
        new_matcher(tokenizer, _library_source("json_schema", schema_source("response_format", {"type": []})))


def chain(length: int, *, ends: bool, is_reversed: bool) -> dict[str, Any]:
    """Definitions that each require the next; the last allows null, or requires the first."""
    names = [f"d{rank}" for rank in range(length)]
    definitions: dict[str, Any] = {
        name: {"type": "object", "properties": {"a": {"$ref": f"#/$defs/{following}"}}, "required": ["a"]}
        for name, following in zip(names, [*names[1:], names[0]], strict=True)
    }
    if ends:
        definitions[names[-1]]["type"] = ["object", "null"]
    ordered = dict(reversed(definitions.items())) if is_reversed else definitions
    return {"$ref": "#/$defs/d0", "$defs": ordered}


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("length", [1, 2, 100])
def test_values_that_must_hold_their_own_kind_are_refused(length: int, is_reversed: bool) -> None:
    with pytest.raises(RequestError, match="no answer could end"):
        schema_source("response_format", chain(length, ends=False, is_reversed=is_reversed))
    assert schema_source("response_format", chain(length, ends=True, is_reversed=is_reversed))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1},
        {"type": "object", "additionalProperties": {"$ref": "#"}, "required": ["a"]},
        {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}},
    ],
)
def test_every_way_to_have_no_end_is_seen(schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="no answer could end"):
        schema_source("response_format", schema)


def test_a_schema_is_bounded_by_its_parts() -> None:
    schema_source("guided_json", {"enum": list(range(MAX_SCHEMA_PARTS - 1))})
    for large in (
        {"enum": list(range(MAX_SCHEMA_PARTS))},
        {"enum": [[]] * 340_000},
        json.dumps({"enum": [[]] * 20_000}),
    ):
        with pytest.raises(RequestError, match=f"more than {MAX_SCHEMA_PARTS} fields and items") as error:
            schema_source("guided_json", large)
        assert error.value.param == "guided_json"
