"""JSON schemas of clients, in the form that the grammar compiler reads.

Keywords that change no answer are dropped or rewritten. Keywords that the compiler cannot enforce stay, and the
compiler refuses them by name. Schemas that would compile to an endless grammar are refused here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from protos.errors import RequestError
from protos.messages import MAX_GRAMMAR_CHARACTERS
from router.requests.body import read_json

MAX_SCHEMA_PARTS = 10_000  # fields and items; of one schema, or of all tools
# One space, or a line break and an indentation: every common layout, and no way to write white space for ever.
_WHITESPACE = {"whitespace_pattern": r"[ ]|\r?\n[ \t]{0,60}"}
_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)  # that the compiler enforces; any other is an annotation, as JSON Schema has it
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMAS = ("additionalProperties", "items", "not", "if", "then", "else", "contains", "propertyNames")
_LISTS_OF_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_APPLICATORS = frozenset(("allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas"))
# Patterns with look-around that libraries write, and those that match the same texts without.
_SAME_PATTERNS = {
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)$",  # pydantic's Decimal
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^([A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
    ),  # zod's email
}
# Parts of a pattern that may match each control character: a range from NUL, a negated class, a negated property.
# The compiler would let them match escaped quotes and backslashes too, so they leave NUL out.
_FROM_NUL = re.compile(
    r"(?P<range>(?:\\x00|\\u0000|\x00)-)|\[\^(?P<first>[\]-]?)|\\P(?P<property>\{[^}]*\}|\w)|\\.", re.S
)
_ANNOTATIONS = frozenset(("type", "title", "description"))  # of a schema of keys, which are texts

Schema = dict[str, Any]


def schema_source(param: str, schema: object) -> str:
    """Return a JSON schema as text, with the project's white space unless it has its own.

    Raises:
        RequestError: it is not a schema, nor the text of one; it holds too much, or nothing that ends matches it.
    """
    if isinstance(schema, str):
        _check_length(len(schema), param)
        schema = read_json(schema, param, param)
    if not isinstance(schema, dict | bool):
        raise RequestError(f"{param} is not a JSON schema; send an object.", param=param)
    # Bound the size first, then rewrite the schema for the compiler.
    check_schema_parts([schema], param)
    try:
        if isinstance(schema, dict):
            _refuse_repeated_keys(schema, param)
            schema = {"x-guidance": _WHITESPACE, **_for_compiler(schema, _definitions(schema))}
            _refuse_no_end(schema, param)
        source = json.dumps(schema, ensure_ascii=False)
    except RecursionError:
        raise RequestError(f"{param} is nested too deeply; send a flatter schema.", param=param) from None
    # The rewritten text is bounded too, and must be valid Unicode.
    _check_length(len(source), param)
    try:
        source.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{param} is not valid Unicode: it holds a lone surrogate.", param=param) from None
    return source


def check_schema_parts(values: list[object], param: str) -> None:
    """Raise RequestError if the values hold more fields and items than a request needs; none of the rest is visited."""
    num_parts, nodes = 0, values[:]
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict | list):
            num_parts += len(node)
            if num_parts > MAX_SCHEMA_PARTS:
                raise RequestError(
                    f"{param} holds more than {MAX_SCHEMA_PARTS} fields and items; send a smaller schema.", param=param
                )
            nodes += node.values() if isinstance(node, dict) else node


def _check_length(num_characters: int, param: str) -> None:
    if num_characters > MAX_GRAMMAR_CHARACTERS:
        raise RequestError(
            f"{param} has {num_characters} characters; at most {MAX_GRAMMAR_CHARACTERS} are compiled.", param=param
        )


def _for_compiler(node: Any, definitions: Mapping[str, Schema]) -> Any:
    """Return a schema as the compiler reads it; any other value unchanged."""
    if not isinstance(node, dict):
        return node
    read: Schema = {}
    for name, value in node.items():
        if name in _SCHEMAS_BY_NAME and isinstance(value, dict):
            read[name] = {key: _for_compiler(inner, definitions) for key, inner in value.items()}
        elif name in _LISTS_OF_SCHEMAS and isinstance(value, list):
            read[name] = [_for_compiler(inner, definitions) for inner in value]
        else:
            read[name] = _for_compiler(value, definitions) if name in _SCHEMAS else value
    _leave_out_annotations(read)
    _name_bounds(read)
    _name_required(read, node)
    _name_keys(read, definitions)
    _require_discriminator(read)
    return read


def _name_keys(node: Schema, definitions: Mapping[str, Schema]) -> None:
    """Replace `propertyNames` by properties or patterns if possible; the compiler refuses any other by name."""
    names = _resolved(node.get("propertyNames", True), definitions)
    keys, limits = [names["const"]] if "const" in names else names.get("enum"), names.keys() - _ANNOTATIONS
    kinds, rest = names.get("type", "string"), node.get("additionalProperties", True)
    if "string" not in (kinds if isinstance(kinds, list) else [kinds]):
        return
    if not limits:
        node.pop("propertyNames", None)
        return
    if "properties" in node or "patternProperties" in node:
        return
    # Names from a list are properties; names of a pattern or a length are one pattern.
    if limits in ({"enum"}, {"const"}) and isinstance(keys, list) and all(isinstance(key, str) for key in keys):
        node["properties"] = dict.fromkeys(keys, rest)
    elif limits == {"pattern"} and isinstance(names["pattern"], str):
        node["patternProperties"] = {_exact_pattern(names["pattern"]): rest}
    elif limits <= {"minLength", "maxLength"}:
        node["patternProperties"] = {rf"^[\s\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$": rest}
    else:
        return
    node["additionalProperties"] = False
    del node["propertyNames"]


def _require_discriminator(node: Schema) -> None:
    """Require the discriminator of a `oneOf`; pydantic leaves it optional if it has a default."""
    discriminator, choices = node.get("discriminator"), node.get("oneOf")
    name = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
    if isinstance(name, str) and isinstance(choices, list):
        node["oneOf"] = [{"allOf": [choice, {"required": [name]}]} for choice in choices]


def _resolved(schema: Any, definitions: Mapping[str, Schema]) -> Schema:
    """Return a schema as an object; the definition that it refers to, if it adds nothing to it."""
    if not isinstance(schema, dict):
        return {} if schema is True else {"not": {}}
    if isinstance(schema.get("$ref"), str) and schema.keys() - _ANNOTATIONS == {"$ref"}:
        return definitions.get(schema["$ref"], schema)
    return schema


def _leave_out_annotations(node: Schema) -> None:
    """Drop keywords that forbid nothing."""
    if isinstance(node.get("format"), str) and node["format"] not in _FORMATS:
        del node["format"]
    if isinstance(node.get("pattern"), str):
        node["pattern"] = _exact_pattern(node["pattern"])
    patterns = node.get("patternProperties")
    if isinstance(patterns, dict):
        node["patternProperties"] = {_exact_pattern(pattern): value for pattern, value in patterns.items()}
    most_items = node.get("maxItems")
    if node.get("uniqueItems") is False or (isinstance(most_items, int) and most_items <= 1):
        node.pop("uniqueItems", None)
    if "if" not in node:
        node.pop("then", None)
        node.pop("else", None)
    elif "then" not in node and "else" not in node:
        del node["if"]
    node.pop("$dynamicAnchor", None)  # `$dynamicRef` is refused
    if "unevaluatedProperties" in node and not _APPLICATORS & node.keys():
        rest = node.pop("unevaluatedProperties")
        node.setdefault("additionalProperties", rest)


def _name_bounds(node: Schema) -> None:
    """Write exclusive bounds as newer drafts do; in draft 4 and OpenAPI 3.0 they are true or false."""
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(node.get(exclusive), bool):
            is_exclusive = node.pop(exclusive)
            if is_exclusive and bound in node:
                node[exclusive] = node.pop(bound)


def _name_required(read: Schema, node: Schema) -> None:
    """Name the required properties as newer drafts do; in draft 3 each property has its own `required`."""
    if isinstance(read.get("required"), bool):
        del read["required"]
    known = node["properties"] if isinstance(node.get("properties"), dict) else {}
    names = [name for name, each in known.items() if isinstance(each, dict) and each.get("required") is True]
    if names:
        read["required"] = [*_listed(read, "required"), *names]


def _exact_pattern(pattern: str) -> str:
    """Return a pattern that the compiler reads exactly; see `_FROM_NUL`."""

    def without_nul(found: re.Match[str]) -> str:
        if found["range"]:
            return r"\x01-"
        if found["property"]:
            return rf"[^\x00\p{found['property']}]"
        if found["first"] is not None:
            return r"[^\x00" + (f"\\{found['first']}" if found["first"] else "")
        return found[0]

    return _FROM_NUL.sub(without_nul, _SAME_PATTERNS.get(pattern, pattern))


def _refuse_repeated_keys(schema: Schema, param: str) -> None:
    """Raise RequestError for minProperties with free keys: a key could be written twice."""
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
                    f"{param} has minProperties {least} and allows any keys, so that one could be written twice; name "
                    "the keys in properties with additionalProperties false, or require them.",
                    param=param,
                )


def _definitions(root: Schema) -> dict[str, Schema]:
    """Return what references may name, by the reference."""
    named = {"#": root}
    for place in ("$defs", "definitions"):
        inner = root.get(place)
        if isinstance(inner, dict):
            named |= {f"#/{place}/{name}": each for name, each in inner.items() if isinstance(each, dict)}
    return named


def _refuse_no_end(root: Schema, param: str) -> None:
    """Raise RequestError where each value must hold another of its own kind, so that no finite one matches."""
    definitions = _definitions(root)
    endless = set(definitions)  # as far as is known
    for _ in range(32):  # definitions that have shown no end by then count as endless
        names = [name for name in reversed(definitions) if name in endless]
        definitions = dict(reversed(definitions.items()))  # a chain of references is followed either way round
        num_before = len(endless)
        for name in names:
            if _can_end(definitions[name], endless):
                endless.discard(name)
        if len(endless) == num_before:
            break
    else:
        return
    if not _can_end(root, endless):
        raise RequestError(
            f"{param} requires values that require values of the same kind, and so on: no answer could end. Allow "
            "null, an empty list or a missing property somewhere in the circle.",
            param=param,
        )


def _can_end(node: object, endless: set[str]) -> bool:
    """True if a finite value may match, assuming that no definition in `endless` can end."""
    if not isinstance(node, dict):
        return True
    reference = node.get("$ref")
    if isinstance(reference, str) and reference in endless:
        return False
    if not all(_can_end(each, endless) for each in _listed(node, "allOf")):
        return False
    for name in ("anyOf", "oneOf"):
        choices = _listed(node, name)
        if choices and not any(_can_end(each, endless) for each in choices):
            return False
    return _can_value_end(node, endless)


def _can_value_end(node: Schema, endless: set[str]) -> bool:
    kinds = node.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "const" in node or "enum" in node or not kinds or not set(map(str, kinds)) <= {"object", "array"}:
        return True
    return ("object" in kinds and _can_object_end(node, endless)) or ("array" in kinds and _can_list_end(node, endless))


def _can_object_end(node: Schema, endless: set[str]) -> bool:
    known: Mapping[str, object] = node["properties"] if isinstance(node.get("properties"), dict) else {}
    rest = node.get("additionalProperties", True) if not node.get("patternProperties") else True
    return all(_can_end(known.get(name, rest), endless) for name in _listed(node, "required") if isinstance(name, str))


def _can_list_end(node: Schema, endless: set[str]) -> bool:
    least = node.get("minItems", 0)
    firsts = _listed(node, "prefixItems")
    if not isinstance(least, int):
        return True
    rest = [node.get("items", True)] if least > len(firsts) else []
    return all(_can_end(each, endless) for each in [*firsts[:least], *rest])


def _listed(node: Schema, name: str) -> list[Any]:
    value = node.get(name)
    return value if isinstance(value, list) else []
