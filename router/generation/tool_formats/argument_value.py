"""Arguments that a model has written as text, as the values that a function's schema wants."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping
from keyword import iskeyword

from router.requests.tools import NAME_PATTERN

# A text in quotes. Models write raw line breaks in it, as their training data did.
_LINES_IN_TEXTS = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
_LINE_END = re.compile(r"\\.|[\n\r]", re.DOTALL)


def _on_one_line(quoted: re.Match[str]) -> str:
    return _LINE_END.sub(lambda found: {"\n": "\\n", "\r": "\\r"}.get(found[0], found[0]), quoted[0])


# A text in quotes, or the name of a call: tools may have names that Python does not allow.
_NAMES = re.compile(rf"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|({NAME_PATTERN})\(""", re.DOTALL)
_STAND_IN = "_outrider_tool_"


def read_python(text: str) -> list[tuple[str, Mapping[str, object]]]:
    """Return the calls in Python's syntax: in a list, or one in a line."""
    names: list[str] = []
    calls = _calls(_NAMES.sub(lambda found: _as_python(found, names), text))
    return [
        (names[int(name.removeprefix(_STAND_IN))] if name.startswith(_STAND_IN) else name, arguments)
        for name, arguments in calls
    ]


def _as_python(found: re.Match[str], names: list[str]) -> str:
    """Return a valid Python name: an invalid one is added to `names` and replaced by its rank there."""
    name = found[1]
    if name is None or all(part.isidentifier() and not iskeyword(part) for part in name.split(".")):
        return found[0]
    names.append(name)
    return f"{_STAND_IN}{len(names) - 1}("


def _calls(text: str) -> list[tuple[str, Mapping[str, object]]]:
    nodes: list[ast.expr] = []
    for statement in _parse(text):
        if not isinstance(statement, ast.Expr):
            raise ValueError("it is no expression")
        nodes += statement.value.elts if isinstance(statement.value, ast.List) else [statement.value]
    return [_python_call(node) for node in nodes]


def read_python_value(text: str) -> object:
    """Return the value of a literal in Python's syntax. Raises ValueError for anything else."""
    statements = _parse(text)
    if len(statements) != 1 or not isinstance(statements[0], ast.Expr):
        raise ValueError("it is no expression")
    return _python_value(statements[0].value)


def _parse(text: str) -> list[ast.stmt]:
    with warnings.catch_warnings():  # of escapes that Python does not know
        warnings.simplefilter("ignore")
        try:
            return ast.parse(_LINES_IN_TEXTS.sub(_on_one_line, text.strip()), mode="exec").body
        except SyntaxError as error:
            raise ValueError(str(error)) from error


def _python_call(node: ast.expr) -> tuple[str, Mapping[str, object]]:
    if not isinstance(node, ast.Call) or node.args or not all(keyword.arg for keyword in node.keywords):
        raise ValueError("it is no call with named arguments")
    return _dotted(node.func), {str(keyword.arg): _python_value(keyword.value) for keyword in node.keywords}


def _dotted(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=outer, attr=name):
            return f"{_dotted(outer)}.{name}"
    raise ValueError("it is no name")


def _python_value(node: ast.expr) -> object:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Name(id="true" | "false" | "null" as name):  # as JSON spells them
            return {"true": True, "false": False, "null": None}[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_python_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_text_key(key): _python_value(value) for key, value in zip(keys, values, strict=True)}
    raise ValueError("it is no literal")


def _text_key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("a key is no text")


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
    if value is None or (isinstance(value, str) and not value.strip()):
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
    if not isinstance(schema, Mapping) or num_unions > 8:  # unions within each other
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
    readers: tuple[Callable[[str], object], ...] = (json.loads, read_python_value)
    for read in readers:
        try:
            value = read(text.strip())
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, RecursionError, MemoryError):
            continue
        return value
    return text
