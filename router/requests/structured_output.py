"""Constraints of a request on its whole output, as one grammar for the engine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from protos.errors import RequestError
from protos.messages import Grammar, GrammarKind
from router.requests.body import Body
from router.requests.json_schema import schema_source

_ANY_OBJECT = {"type": "object"}

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
# Of `response_format`: OpenAI's, and two of other servers.
FormatType = Literal["text", "json_object", "json_schema", "regex", "grammar"]
Choices = Annotated[list[Annotated[str, Field(max_length=4096)]], Field(min_length=1)]


class JsonSchemaFormat(Body):
    """`response_format.json_schema`. The schema is always enforced exactly, with or without `strict`."""

    name: str
    description: str | None = None
    schema_: Any = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's `response_format`, with the fields of other servers for the same: `schema`, `pattern`, `grammar`."""

    type: FormatType
    json_schema: JsonSchemaFormat | None = None
    schema_: Any = Field(default=None, alias="schema")  # with json_object or json_schema: llama.cpp, Together
    pattern: str | None = None  # with type regex: Together
    grammar: str | None = None  # with type grammar: Fireworks

    @model_validator(mode="after")
    def _values_belong_to_their_types(self) -> ResponseFormat:
        allowed: dict[str, tuple[FormatType, ...]] = {
            "json_schema": ("json_schema",),
            "schema_": ("json_schema", "json_object"),
            "pattern": ("regex",),
            "grammar": ("grammar",),
        }
        present = [name for name in allowed if getattr(self, name) is not None]
        wanted = [name for name, owners in allowed.items() if self.type in owners]
        is_missing = self.type not in ("text", "json_object") and not present
        if is_missing or len(present) > 1 or not set(present) <= set(wanted):
            names = " or ".join(name.rstrip("_") for name in wanted) or "nothing else"
            raise RequestError(
                f"response_format.type is {self.type!r}, which takes {names}; "
                f"it came with {' and '.join(name.rstrip('_') for name in present) or 'none'}.",
                param="response_format",
            )
        return self

    def constraint(self) -> Constraint | None:
        """Return the constraint of the answer; None if it is free text."""
        param = "response_format"
        match self.type:
            case "text":
                return None
            case "regex":
                return Constraint(param, GrammarKind.REGEX, self.pattern)
            case "grammar":
                return Constraint(param, GrammarKind.GRAMMAR, self.grammar)
        schema = self.json_schema.schema_ if self.json_schema else self.schema_
        return Constraint(param, GrammarKind.JSON_SCHEMA, _ANY_OBJECT if schema is None else schema)


class StructuredOutputs(Body):
    """`structured_outputs`, vLLM's newer name of its guided decoding; one of the fields is set."""

    json_: Any = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint as the client has sent it; `param` is its field."""

    param: str
    kind: GrammarKind
    value: Any

    def grammar(self) -> Grammar:
        """Return the engine's grammar; a large schema takes some milliseconds. Raises RequestError."""
        return Grammar(self.kind, self._source(), self.param)

    def _source(self) -> str:
        if self.kind is GrammarKind.JSON_SCHEMA:
            return schema_source(self.param, self.value)
        if self.param == "allowed_token_ids":
            token_ids = ",".join(map(str, sorted(set(self.value))))
            return f"%llguidance {{}}\nstart: (<[{token_ids}]>)*\n"
        return json.dumps(self.value) if self.kind is GrammarKind.CHOICE else str(self.value)


class Constraints(Body):
    """The fields that constrain an output; at most one may be set, or several with the same value.

    Guidance's client sends a grammar by vLLM's older and newer name.
    """

    response_format: ResponseFormat | None = None
    guided_json: Any = None  # a JSON schema, as an object or as its text
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None  # Lark or GBNF
    structured_outputs: StructuredOutputs | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=65_536)] | None = None  # and the end

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Constraints:
        found = self._constraints()
        others = [each for each in found if (each.kind, each.value) != (found[0].kind, found[0].value)]
        if others:
            raise RequestError(
                f"{found[0].param} and {others[0].param} both constrain the output; send one of them.",
                param=others[0].param,
            )
        return self

    @property
    def constraint(self) -> Constraint | None:
        """The constraint of the output; None where any text will do."""
        return next(iter(self._constraints()), None)

    def _constraints(self) -> list[Constraint]:
        outer = self.structured_outputs or StructuredOutputs()
        candidates = [
            self.response_format.constraint() if self.response_format else None,
            Constraint("guided_json", GrammarKind.JSON_SCHEMA, self.guided_json),
            Constraint("structured_outputs.json", GrammarKind.JSON_SCHEMA, outer.json_),
            Constraint(
                "structured_outputs.json_object", GrammarKind.JSON_SCHEMA, _ANY_OBJECT if outer.json_object else None
            ),
            Constraint("guided_regex", GrammarKind.REGEX, self.guided_regex),
            Constraint("structured_outputs.regex", GrammarKind.REGEX, outer.regex),
            Constraint("guided_grammar", GrammarKind.GRAMMAR, self.guided_grammar),
            Constraint("structured_outputs.grammar", GrammarKind.GRAMMAR, outer.grammar),
            Constraint("guided_choice", GrammarKind.CHOICE, self.guided_choice),
            Constraint("structured_outputs.choice", GrammarKind.CHOICE, outer.choice),
            Constraint("allowed_token_ids", GrammarKind.GRAMMAR, self.allowed_token_ids),
        ]
        return [each for each in candidates if each is not None and each.value is not None]
