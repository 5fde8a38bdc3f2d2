"""Constraints of a request on its whole output, as one grammar for the engine."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, model_validator

from protos.errors import RequestError
from protos.messages import Grammar, GrammarKind
from router.requests.body import Body, read_json

# One space, or a line break and an indentation: every common layout, and no way to write white space for ever.
_WHITESPACE = {"whitespace_pattern": r"[ ]|\r?\n[ \t]{0,60}"}
_ANY_OBJECT = {"type": "object"}

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Choices = Annotated[list[Annotated[str, Field(max_length=4096)]], Field(min_length=1)]


class ResponseFormatType(StrEnum):
    """`response_format.type`."""

    TEXT = "text"
    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"


class JsonSchemaFormat(Body):
    """`response_format.json_schema`. The schema always holds to the letter, whatever `strict` says."""

    name: str
    description: str | None = None
    schema_: Any = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """`response_format`, as OpenAI has it."""

    type: Annotated[ResponseFormatType, Field(strict=False)]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _schema_belongs_to_its_type(self) -> ResponseFormat:
        if (self.type is ResponseFormatType.JSON_SCHEMA) != (self.json_schema is not None):
            raise RequestError(
                f"response_format.type is {self.type.value!r}; json_schema belongs to the type 'json_schema' alone.",
                param="response_format",
            )
        return self

    def schema_or_none(self) -> object | None:
        """Return the JSON schema that the answer must follow; None if any text will do."""
        if self.type is ResponseFormatType.TEXT:
            return None
        schema = self.json_schema.schema_ if self.json_schema else None
        return _ANY_OBJECT if schema is None else schema


class StructuredOutputs(Body):
    """`structured_outputs`, vLLM's newer name of its guided decoding; one of the fields is set."""

    json_: Any = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None


class Constraints(Body):
    """The fields of a body that constrain its output; at most one may."""

    response_format: ResponseFormat | None = None
    guided_json: Any = None  # a JSON schema, as an object or as its text
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None  # Lark or GBNF
    structured_outputs: StructuredOutputs | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=65_536)] | None = None  # or the end

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Constraints:
        params = [grammar.param for grammar in self._grammars()]
        if len(params) > 1:
            raise RequestError(
                f"{params[0]} and {params[1]} both constrain the output; send one of them.", param=params[1]
            )
        return self

    @property
    def grammar(self) -> Grammar | None:
        """The grammar of the output; None where any text will do."""
        return next(iter(self._grammars()), None)

    def _grammars(self) -> list[Grammar]:
        outer = self.structured_outputs or StructuredOutputs()
        format_ = self.response_format.schema_or_none() if self.response_format else None
        candidates = [
            _json("response_format", format_),
            _json("guided_json", self.guided_json),
            _json("structured_outputs.json", outer.json_),
            _json("structured_outputs.json_object", _ANY_OBJECT if outer.json_object else None),
            _text(GrammarKind.REGEX, "guided_regex", self.guided_regex),
            _text(GrammarKind.REGEX, "structured_outputs.regex", outer.regex),
            _text(GrammarKind.GRAMMAR, "guided_grammar", self.guided_grammar),
            _text(GrammarKind.GRAMMAR, "structured_outputs.grammar", outer.grammar),
            _choice("guided_choice", self.guided_choice),
            _choice("structured_outputs.choice", outer.choice),
            _allowed_tokens(self.allowed_token_ids),
        ]
        return [grammar for grammar in candidates if grammar is not None]


def schema_source(param: str, schema: object) -> str:
    """Return a JSON schema as text, with the project's white space unless it has its own.

    Raises:
        RequestError: it is not a schema, nor the text of one.
    """
    if isinstance(schema, str):
        schema = read_json(schema, param, param)
    if not isinstance(schema, dict | bool):
        raise RequestError(f"{param} is not a JSON schema; send an object.", param=param)
    if isinstance(schema, dict):
        _refuse_repeated_keys(schema, param)
        schema = {"x-guidance": _WHITESPACE, **schema}
    source = json.dumps(schema, ensure_ascii=False)
    try:
        source.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{param} is not valid Unicode: it holds a lone surrogate.", param=param) from None
    return source


def _refuse_repeated_keys(schema: dict[str, Any], param: str) -> None:
    """Raise RequestError where a number of properties is asked for and keys are free: one could be written twice."""
    nodes: list[object] = [schema]
    while nodes:
        node = nodes.pop()
        if isinstance(node, list):
            nodes += node
        elif isinstance(node, dict):
            nodes += node.values()
            least, required = node.get("minProperties"), node.get("required")
            num_required = len(required) if isinstance(required, list) else 0
            has_free_keys = node.get("additionalProperties") is not False or node.get("patternProperties")
            if isinstance(least, int) and least > max(1, num_required) and has_free_keys:
                raise RequestError(
                    f"{param} has minProperties {least} beside keys that are free, of which one could be written "
                    "twice; name them in properties with additionalProperties false, or require them.",
                    param=param,
                )


def _json(param: str, schema: object | None) -> Grammar | None:
    return None if schema is None else Grammar(GrammarKind.JSON_SCHEMA, schema_source(param, schema), param)


def _text(kind: GrammarKind, param: str, source: str | None) -> Grammar | None:
    return None if source is None else Grammar(kind, source, param)


def _choice(param: str, choices: list[str] | None) -> Grammar | None:
    return None if choices is None else Grammar(GrammarKind.CHOICE, json.dumps(choices), param)


def _allowed_tokens(token_ids: list[int] | None) -> Grammar | None:
    if token_ids is None:
        return None
    source = f"%llguidance {{}}\nstart: (<[{','.join(map(str, sorted(set(token_ids))))}]>)*\n"
    return Grammar(GrammarKind.GRAMMAR, source, "allowed_token_ids")
