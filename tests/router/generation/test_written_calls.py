"""Calls that no family writes in JSON: read the same in any pieces, and the grammars of what may be written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from engine.sampling.grammar_compiler import GrammarCompiler
from protos.messages import FinishReason, GenerateRequest, Grammar, SamplingParams
from router.generation.delta import Delta, join_deltas
from router.generation.tool_calls import ToolCallParser
from router.generation.tool_formats import find_format
from router.generation.tool_formats.named_format import FUNCTION_GEMMA, GEMMA, LFM2, OLMO, PYTHONIC
from router.generation.tool_formats.tagged_format import DSML, DSML_V32, GLM, MINIMAX, QWEN_XML, SEED
from router.generation.tool_formats.tool_format import KIMI, MISTRAL, ToolFormat
from router.generation.tool_formats.whole_format import COHERE, GRANITE, MISTRAL_LIST, NEMOTRON, TOOL_CALLS
from router.requests.tools import Tool, tool_use
from router.tokenizer import Tokenizer
from router.tokenizer.chat_template import ChatTemplate
from tests.engine.fixtures.byte_tokenizer import BYTE_VOCAB_SIZE, END_ID, write_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "deep": {"type": ["object", "null"]},
        "flag": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["text"],
}
TOOLS: dict[str, object] = {"write": SCHEMA, "now": {"type": "object", "properties": {}}}
HARD = 'a "b"\n\n<x> & \\n {y: [1, 2]}, </param é🙂\n  '
CALLS: list[tuple[str, dict[str, object]]] = [
    ("write", {"text": "Rome", "count": 3, "deep": {"a": [1, {"b": "}"}]}, "flag": True, "unit": "C"}),
    ("now", {}),
    ("write", {"text": HARD, "deep": None}),
    ("write", {"text": "", "count": -1}),
]

# Each writes calls as the model's own template does (its structure, not its text).
_LOOP = "{% for call in messages[0].tool_calls %}{% set f = call.function %}"
TEMPLATES: list[tuple[ToolFormat, str]] = [
    (
        QWEN_XML,
        "{% if tools %}{% endif %}{% for call in messages[0].tool_calls %}{% set f = call.function %}"
        "{{ '<tool_call>\n<function=' + f.name + '>\n' }}{% for k, v in f.arguments | items %}"
        "{{ '<parameter=' + k + '>\n' }}{{ v if v is string else v | tojson }}{{ '\n</parameter>\n' }}{% endfor %}"
        "{{ '</function>\n</tool_call>' }}{{ '\n' if not loop.last }}{% endfor %}",
    ),
    (
        SEED,
        "{% if tools %}{% endif %}" + _LOOP + "{{ '\n<seed:tool_call>\n<function=' + f.name + '>\n' }}"
        "{% for k, v in f.arguments | items %}{{ '<parameter=' + k + '>' }}{{ v if v is string else v | string }}"
        "{{ '</parameter>\n' }}{% endfor %}{{ '</function>\n</seed:tool_call>' }}{% endfor %}",
    ),
    (
        GLM,
        "{% if tools %}{% endif %}" + _LOOP + "{{ '\n<tool_call>' + f.name + '\n' }}"
        "{% for k, v in f.arguments | items %}{{ '<arg_key>' + k + '</arg_key>\n<arg_value>' }}"
        "{{ v if v is string else v | tojson }}{{ '</arg_value>\n' }}{% endfor %}{{ '</tool_call>' }}{% endfor %}",
    ),
    (
        MINIMAX,
        "{% if tools %}{% endif %}{{ '\n<minimax:tool_call>\n' }}"
        + _LOOP
        + """{{ '<invoke name="' + f.name + '">\n' }}"""
        """{% for k, v in f.arguments | items %}{{ '<parameter name="' + k + '">' }}"""
        "{{ v if v is string else v | tojson }}{{ '</parameter>\n' }}{% endfor %}{{ '</invoke>\n' }}{% endfor %}"
        "{{ '</minimax:tool_call>' }}",
    ),
    (
        GEMMA,
        "{% if tools %}{% endif %}{% macro w(v) %}{% if v is string %}{{ '<|\"|>' + v + '<|\"|>' }}"
        "{% elif v is mapping %}{{ '{' }}{% for k, x in v | items %}{{ k }}:{{ w(x) }}{{ ',' if not loop.last }}"
        "{% endfor %}{{ '}' }}{% elif v is none or v is boolean or v is number %}{{ v | tojson }}"
        "{% else %}{{ '[' }}{% for x in v %}{{ w(x) }}{{ ',' if not loop.last }}{% endfor %}{{ ']' }}{% endif %}"
        "{% endmacro %}" + _LOOP + "{{ '<|tool_call>call:' + f.name + w(f.arguments) + '<tool_call|>' }}{% endfor %}",
    ),
    (
        LFM2,
        "{% if tools %}{% endif %}{{ '<|tool_call_start|>' }}{{ pythonic }}{{ '<|tool_call_end|>' }}",
    ),
    (OLMO, "{% if tools %}{% endif %}{{ '<function_calls>' }}{{ pythonic }}{{ '</function_calls>' }}"),
    (PYTHONIC, "{% if tools %}{% endif %}{# [func_name1(a=1)] #}{{ pythonic }}"),
    (
        MISTRAL_LIST,
        "{% if tools %}{% endif %}{{ '[TOOL_CALLS] [' }}" + _LOOP + '{{ (f | tojson)[:-1] + \', "id": "abcdefghi"}\' }}'
        "{{ ', ' if not loop.last }}{% endfor %}{{ ']' }}",
    ),
]


def dsml_value(name: str, is_text: str, value: str) -> str:
    return f'<｜DSML｜parameter name="{name}" string="{is_text}">{value}</｜DSML｜parameter>\n'


def dsml(section: str, values: str) -> str:
    call = f'<｜DSML｜invoke name="write">\n{values}</｜DSML｜invoke>'
    return f"<｜DSML｜{section}>\n{call}\n</｜DSML｜{section}>"


def pythonic() -> str:
    written = (f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in CALLS)
    return f"[{', '.join(written)}]"


def read(format_: ToolFormat, pieces: list[str], reason: FinishReason = FinishReason.STOP) -> Delta:
    parser = ToolCallParser(format_, TOOLS)
    deltas = [each for piece in pieces for each in parser.read(Delta(0, piece))]
    return join_deltas([*deltas, *parser.read(Delta(0, "", finish_reason=reason))])


def calls_in(delta: Delta) -> list[tuple[str, str]]:
    heads = [call for call in delta.tool_calls if call.id is not None]
    return [
        (head.name or "", "".join(call.arguments for call in delta.tool_calls if call.index == head.index))
        for head in heads
    ]


@pytest.mark.parametrize(("format_", "source"), TEMPLATES, ids=lambda value: getattr(value, "name", ""))
def test_calls_that_a_template_writes_are_read_in_any_pieces(format_: ToolFormat, source: str) -> None:
    template = ChatTemplate(source, {})
    assert find_format(source) is format_
    turn = {"role": "assistant", "tool_calls": [{"function": {"name": n, "arguments": a}} for n, a in CALLS]}
    text = template.render([turn], variables={"pythonic": pythonic()})
    whole = read(format_, [text])
    wanted = [(name, arguments) for name, arguments in CALLS]
    assert [(name, json.loads(arguments)) for name, arguments in calls_in(whole)] == wanted
    assert (whole.text, whole.finish_reason) == ("", FinishReason.TOOL_CALLS)
    said = text if format_ is PYTHONIC else f"So. {text}"
    for pieces in [list(said), *([said[:cut], said[cut:]] for cut in range(0, len(said), 3))]:
        again = read(format_, pieces)
        assert calls_in(again) == calls_in(whole)
        assert again.text == ("" if format_ is PYTHONIC else "So.")


@pytest.mark.parametrize(
    ("format_", "text", "content", "calls"),
    [
        (QWEN_XML, "<function=now>\n</function>\n</tool_call>", "", [("now", "{}")]),  # its begin is left out
        (QWEN_XML, "<tool_call>\nnothing</tool_call> so", "<tool_call>\nnothing so", []),
        (QWEN_XML, "see <function= and go", "see <function= and go", []),
        (
            QWEN_XML,
            "<tool_call><function=write><parameter=text>\nx</parameter>y\n</parameter></function></tool_call>",
            "",
            [("write", '{"text": "x</parameter>y"}')],
        ),
        (
            QWEN_XML,
            "<tool_call><function=write><parameter=count>\nmany\n</parameter></function></tool_call>",
            "",
            [("write", '{"count": "many"}')],
        ),
        (GLM, "<tool_call>now</tool_call>", "", [("now", "{}")]),
        (GLM, "<tool_call>no such</tool_call>", "<tool_call>no such</tool_call>", []),
        (
            FUNCTION_GEMMA,
            "<start_function_call>call:write{text:<escape>a, {b<escape>,count:2}<end_function_call>",
            "",
            [("write", '{"text": "a, {b", "count": 2}')],
        ),
        (GEMMA, "<|tool_call>call:write{text:<tool_call|>", "<|tool_call>call:write{text:<tool_call|>", []),
        (PYTHONIC, "[1, 2] are two", "[1, 2] are two", []),
        (PYTHONIC, "[write(text='a', count=-2)]", "", [("write", '{"text": "a", "count": -2}')]),
        (PYTHONIC, "[write(text='a\nb \\n')]", "", [("write", '{"text": "a\\nb \\n"}')]),  # a line break as it is
        (PYTHONIC, "[unknown(a=1)]", "[unknown(a=1)]", []),
        (PYTHONIC, "[write(text=exit())]", "[write(text=exit())]", []),
        (LFM2, '<|tool_call_start|>[{"name": "now", "arguments": {}}]<|tool_call_end|>', "", [("now", "{}")]),
        (OLMO, "<function_calls>now()\nnow()</function_calls>", "", [("now", "{}"), ("now", "{}")]),
        (MISTRAL_LIST, '[TOOL_CALLS] {"name": 1} so', '[TOOL_CALLS] {"name": 1} so', []),
        (PYTHONIC, "[write(text='a', count='2')]", "", [("write", '{"text": "a", "count": 2}')]),  # in quotes
        (
            COHERE,
            'So.<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
            "So.",
            [("now", "{}")],
        ),
        (COHERE, "<|START_RESPONSE|>Yes.<|END_RESPONSE|>", "Yes.", []),
        (NEMOTRON, '<TOOLCALL>[{"name": "now", "arguments": {}}]</TOOLCALL>', "", [("now", "{}")]),
        (GRANITE, '<|tool_call|>[{"name": "now", "arguments": {}}]', "", [("now", "{}")]),
        (
            TOOL_CALLS,  # MiniMax M1 writes one in a line
            '<tool_calls>\n{"name": "now", "arguments": {}}\n{"name": "now", "arguments": {}}\n</tool_calls>',
            "",
            [("now", "{}"), ("now", "{}")],
        ),
        (
            DSML,  # the schema names no type, so the mark has the value's type
            dsml(
                "tool_calls",
                dsml_value("count", "true", "3")
                + dsml_value("other", "true", "4")
                + dsml_value("more", "false", "[5]"),
            ),
            "",
            [("write", '{"count": 3, "other": "4", "more": [5]}')],
        ),
        (DSML_V32, dsml("function_calls", ""), "", [("write", "{}")]),
    ],
)
def test_texts_beside_the_rule(format_: ToolFormat, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for pieces in ([text], list(text), *([text[:cut], text[cut:]] for cut in range(len(text)))):
        delta = read(format_, pieces)
        assert (delta.text, calls_in(delta)) == (content, calls)


def test_a_text_streams_before_its_call_is_complete() -> None:
    parser = ToolCallParser(QWEN_XML, TOOLS)
    [delta] = parser.read(Delta(0, "<tool_call>\n<function=write>\n<parameter=text>\nline one\nline"))
    assert calls_in(delta) == [("write", '{"text": "line one\\nline')]
    [end] = parser.read(Delta(0, "", finish_reason=FinishReason.STOP))
    assert end.finish_reason is FinishReason.STOP  # with `tool_calls` a client would parse arguments as JSON


def test_ids_of_calls_are_those_that_the_template_takes_back() -> None:
    [call] = read(MISTRAL_LIST, ['[TOOL_CALLS][{"name": "now", "arguments": {}}]']).tool_calls
    assert call.id is not None
    assert len(call.id) == 9
    assert call.id.isalnum()


def test_ids_that_the_model_writes_are_kept() -> None:
    begin = "<|tool_calls_section_begin|><|tool_call_begin|>"
    calls = read(KIMI, [f"{begin}functions.now:7<|tool_call_argument_begin|>{{}}<|tool_call_end|>"]).tool_calls
    calls += read(MISTRAL, ["[TOOL_CALLS]now[CALL_ID]abc123XYZ[ARGS]{}"]).tool_calls
    assert [call.id for call in calls if call.id] == ["functions.now:7", "abc123XYZ"]


# ---- grammars -----------------------------------------------------------------------------------------------------

MARKS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", '<|"|>', "｜DSML｜")
MARKS += ("<|START_ACTION|>", "<|END_ACTION|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>")


@pytest.fixture(scope="module", params=[False, True], ids=["spelled", "tokens"])
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A tokenizer whose marks are text, or tokens of their own, and a compiler for it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    core = write_tokenizer(folder)
    if request.param:
        core.add_tokens([AddedToken(mark, special=False) for mark in MARKS])
        core.save(str(folder / "tokenizer.json"))
    return core, GrammarCompiler(folder / "tokenizer.json", max(core.get_vocab_size(), BYTE_VOCAB_SIZE), (END_ID,))


def allows(compiled: tuple[Any, Any], grammar: Grammar, text: str) -> bool:
    core, compiler = compiled
    token_ids = (*core.encode(text, add_special_tokens=False).ids, END_ID)
    request = GenerateRequest("x", (1,), SamplingParams(grammar=grammar, stop_token_ids=(END_ID,)))
    return bool(compiler.matcher(request).num_allowed(token_ids) == len(token_ids))


def offered() -> list[Tool]:
    schema = {
        "type": "object",
        "properties": {"text": {"type": "string"}, "count": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
        "required": ["text"],
    }
    return [
        Tool.model_validate({"type": "function", "function": {"name": "write", "parameters": schema, "strict": True}}),
        Tool.model_validate({"type": "function", "function": {"name": "now"}}),
    ]


WRITTEN: list[tuple[ToolFormat, str, str, str]] = [  # a form, a good call, another, and a call that is wrong
    (
        QWEN_XML,
        "<tool_call>\n<function=write>\n<parameter=text>\na <b\n</parameter>\n<parameter=count>\n2\n</parameter>\n"
        "<parameter=unit>\nF\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "<tool_call>\n<function=write>\n<parameter=text>\na\n</parameter>\n<parameter=count>\nx\n</parameter>\n"
        "</function>\n</tool_call>",
    ),
    (
        GLM,
        "<tool_call>write\n<arg_key>text</arg_key>\n<arg_value>a</arg_value>\n<arg_key>unit</arg_key>\n"
        "<arg_value>C</arg_value>\n</tool_call>",
        "<tool_call>now\n</tool_call>",
        "<tool_call>write\n<arg_key>count</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    ),
    (
        MINIMAX,
        '<minimax:tool_call><invoke name="write">\n<parameter name="text">a</parameter>\n</invoke></minimax:tool_call>',
        '<minimax:tool_call><invoke name="now">\n</invoke></minimax:tool_call>',
        '<minimax:tool_call><invoke name="other">\n</invoke></minimax:tool_call>',
    ),
    (
        DSML,
        dsml("tool_calls", dsml_value("text", "true", "a </b") + dsml_value("count", "false", "2")),
        dsml("tool_calls", "").replace("write", "now"),
        dsml("tool_calls", dsml_value("text", "true", "a") + dsml_value("count", "false", "x")),
    ),
    (
        COHERE,
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "write", "parameters": {"text": "a"}}\n]'
        "<|END_ACTION|>",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "now", "parameters": {}},\n'
        '    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "write", "parameters": {}}\n]<|END_ACTION|>',
    ),
    (PYTHONIC, '[write(text="a",count=2)]', "[now()]", "[write(count=2)]"),
    (
        LFM2,
        '<|tool_call_start|>[write(text="a",unit="F")]<|tool_call_end|>',
        "<|tool_call_start|>[now()]<|tool_call_end|>",
        '<|tool_call_start|>[write(text="a",unit="K")]<|tool_call_end|>',
    ),
    (
        MISTRAL_LIST,
        '[TOOL_CALLS][{"name": "write", "arguments": {"text": "a"}}]',
        '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]',
        '[TOOL_CALLS][{"name": "write", "arguments": {}}]',
    ),
]


@pytest.mark.parametrize(("format_", "good", "other", "wrong"), WRITTEN, ids=lambda value: getattr(value, "name", ""))
def test_a_required_call_is_written_in_the_models_form(
    compiled: tuple[Any, Any], format_: ToolFormat, good: str, other: str, wrong: str
) -> None:
    meant = format_.with_tokens(Tokenizer(compiled[0]))
    required, free = (tool_use(offered(), choice, None) for choice in ("required", "auto"))
    assert required is not None
    assert free is not None
    grammar, strict = meant.grammar(required, None), meant.grammar(free, None)
    assert grammar is not None
    assert strict is not None
    assert [allows(compiled, grammar, text) for text in (good, other, wrong, "text")] == [True, True, False, False]
    assert [allows(compiled, strict, text) for text in (good, other, wrong, "text")] == [True, True, False, True]
    for text in (good, other):
        assert calls_in(read(format_, [text]))


def test_gemmas_calls_are_written_with_its_own_quotes(compiled: tuple[Any, Any], tmp_path: Path) -> None:
    meant = GEMMA.with_tokens(Tokenizer(compiled[0]))
    required = tool_use(offered(), "required", None)
    assert required is not None
    grammar = meant.grammar(required, None)
    assert grammar is not None
    quote = '<|"|>' if meant.token_ids else '"'
    good, wrong = (
        f"<|tool_call>call:write{{{each}}}<tool_call|>" for each in (f"text:{quote}a{quote},count:2", "count:2")
    )
    assert [allows(compiled, grammar, text) for text in (good, wrong)] == [True, False]
    assert calls_in(read(GEMMA, [good])) == [("write", '{"text": "a", "count": 2}')]


@pytest.mark.parametrize(
    ("format_", "text"),
    [
        *(
            (each, f'{each.begin}[{{"name": "now"{rest}}}]{each.end}')
            for each in (GRANITE, MISTRAL_LIST, NEMOTRON, TOOL_CALLS)
            for rest in ("", ', "arguments": null', ', "arguments": ""', ', "arguments": {}')
        ),
        *(
            (COHERE, f'{COHERE.begin}[{{"tool_call_id": "0", "tool_name": "now"{rest}}}]{COHERE.end}')
            for rest in ("", ', "parameters": null')
        ),
        (GEMMA, "<|tool_call>call:now<tool_call|>"),
        (FUNCTION_GEMMA, "<start_function_call>call:now{}<end_function_call>"),
        (PYTHONIC, "[now()]"),
        (GLM, "<tool_call>now</tool_call>"),
        (QWEN_XML, "<tool_call>\n<function=now>\n</function>\n</tool_call>"),
        (SEED, "<seed:tool_call><function=now></function></seed:tool_call>"),
        (MINIMAX, '<minimax:tool_call><invoke name="now"></invoke></minimax:tool_call>'),
        (DSML, f'{DSML.sections[0]}<｜DSML｜invoke name="now"></｜DSML｜invoke>{DSML.sections[1]}'),
    ],
)
def test_a_call_without_arguments_is_a_call(format_: ToolFormat, text: str) -> None:
    assert calls_in(read(format_, [text])) == calls_in(read(format_, list(text))) == [("now", "{}")]
