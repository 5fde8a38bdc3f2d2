"""Content and tool calls are separated the same way for any cut of the text into pieces."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, grammar_from
from tokenizers import AddedToken
from tokenizers import Tokenizer as TokenizerCore

from engine.sampling.grammar_compiler import GrammarCompiler
from engine.sampling.grammar_trial import new_matcher, new_tokenizer
from protos.messages import FinishReason, GenerateRequest, Grammar, GrammarKind, SamplingParams
from router.generation.delta import Delta, join_deltas, whole_calls
from router.generation.tool_calls import ToolCallParser
from router.generation.tool_formats import FORMATS, find_format
from router.generation.tool_formats.tool_format import DEEPSEEK, DEEPSEEK_V3, HERMES, KIMI, LLAMA, MISTRAL, ToolFormat
from router.requests.tools import Tool, tool_use
from router.tokenizer import Tokenizer
from tests.engine.fixtures.byte_tokenizer import BYTE_VOCAB_SIZE, END_ID, write_tokenizer

NAMES: dict[str, object] = {"f": {}, "get.weather": {}}


@dataclass(frozen=True, slots=True)
class Read:
    """The state of a client at the end."""

    content: str
    calls: tuple[tuple[str, str], ...]
    reason: FinishReason | None


def read(format_: ToolFormat, pieces: list[str], reason: FinishReason = FinishReason.STOP) -> Read:
    parser = ToolCallParser(format_, NAMES)
    deltas = [each for piece in pieces for each in parser.read(Delta(0, piece))]
    whole = join_deltas([*deltas, *parser.read(Delta(0, "", finish_reason=reason))])
    heads = [call for call in whole.tool_calls if call.id is not None]
    calls = tuple(
        (head.name or "", "".join(call.arguments for call in whole.tool_calls if call.index == head.index))
        for head in heads
    )
    return Read(whole.text, calls, whole.finish_reason)


def call(name: str, arguments: str = '{"x": "}</tool_call>\\\\"{"}') -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def bare(name: str, arguments: str = '{"x": [{}, "}\\""]}') -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


ARGUMENTS = '{"a": {"b": "}"}}'
DONE, STOP = FinishReason.TOOL_CALLS, FinishReason.STOP

HERMES_TEXTS: dict[str, Read] = {
    "just text, < and <tool and {}": Read("just text, < and <tool and {}", (), STOP),
    "ends in <tool_ca": Read("ends in <tool_ca", (), STOP),
    "trailing space \n": Read("trailing space \n", (), STOP),
    call("f", ARGUMENTS): Read("", (("f", ARGUMENTS),), DONE),
    f"  thinking \n{call('f', ARGUMENTS)}\n": Read("  thinking", (("f", ARGUMENTS),), DONE),
    f"{call('f', ARGUMENTS)}\n{call('unknown', '{}')}": Read("", (("f", ARGUMENTS), ("unknown", "{}")), DONE),
    f"{call('f', '{}')}\n and so": Read("and so", (("f", "{}"),), DONE),
    '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>': Read("", (("f", '{"a": 1}'),), DONE),
    "<tool_call>nonsense</tool_call>": Read("<tool_call>nonsense</tool_call>", (), STOP),
    '<tool_call>{"name": 5}</tool_call>': Read('<tool_call>{"name": 5}</tool_call>', (), STOP),
    **{  # no JSON, half a character, and deeper than Python reads
        f"<tool_call>{body}</tool_call>": Read(f"<tool_call>{body}</tool_call>", (), STOP)
        for body in (
            r'{"name": "\q", "arguments": {}}',
            r'{"name": "\ud800", "arguments": {}}',
            r'{"arguments": {"a": "\ud800"}, "name": "f"}',
            '{"arguments": ' + "[" * 5000,
        )
    },
    **{  # without arguments, or with none in them
        f"<tool_call>{body}</tool_call>": Read("", (("f", "{}"),), DONE)
        for body in (
            '{"name": "f"}',
            '\n{"name": "f", "arguments": null}\n',
            '{"name": "f", "arguments": ""}',
            '{"arguments": "{}", "name": "f"}',
        )
    },
    '<tool_call>{"name": "f"}': Read("", (("f", "{}"),), DONE),  # the end mark was a token that ends the answer
    '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>': Read("", (("f", '{"a": 1}'),), DONE),
    '<tool_call>{"name": "f", "arguments": [1]}</tool_call>': Read(
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', (), STOP
    ),
    '<tool_call>\n{"name": "f", ': Read('<tool_call>\n{"name": "f", ', (), STOP),
}
LLAMA_TEXTS: dict[str, Read] = {
    "just text {": Read("just text {", (), STOP),
    bare("f", ARGUMENTS): Read("", (("f", ARGUMENTS),), DONE),
    f"\n{bare('f', ARGUMENTS)}; {bare('get.weather', '{}')}\n": Read(
        "", (("f", ARGUMENTS), ("get.weather", "{}")), DONE
    ),
    '{"parameters": {"a": 1}, "name": "f"}': Read("", (("f", '{"a": 1}'),), DONE),
    bare("unknown", "{}"): Read(bare("unknown", "{}"), (), STOP),
    '{"answer": {"name": "f"}} so': Read('{"answer": {"name": "f"}} so', (), STOP),
    '{"name": "f"': Read('{"name": "f"', (), STOP),
    '{"name": "f"}': Read("", (("f", "{}"),), DONE),
    '{"name": "f", "parameters": null}; {"name": "f", "parameters": ""}': Read("", (("f", "{}"), ("f", "{}")), DONE),
    '{"name": "f", "age": 3}': Read('{"name": "f", "age": 3}', (), STOP),  # an answer in JSON
}


def deepseek(name: str, arguments: str = ARGUMENTS) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


def fenced(name: str, arguments: str = ARGUMENTS) -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


def kimi(name: str, number: int, arguments: str = ARGUMENTS) -> str:
    argument = f"<|tool_call_argument_begin|>{arguments}"
    return f"<|tool_call_begin|>functions.{name}:{number}{argument}<|tool_call_end|>"


OPEN, CLOSE = DEEPSEEK.sections
KIMI_OPEN, KIMI_CLOSE = KIMI.sections
NAMED_TEXTS: list[tuple[ToolFormat, str, Read]] = [
    (DEEPSEEK, "just text <｜tool", Read("just text <｜tool", (), STOP)),
    (DEEPSEEK, f"so\n{OPEN}{deepseek('f')}{CLOSE}", Read("so", (("f", ARGUMENTS),), DONE)),
    (
        DEEPSEEK,
        f"{OPEN}{deepseek('f')}{deepseek('get.weather', '{}')}{CLOSE}",
        Read("", (("f", ARGUMENTS), ("get.weather", "{}")), DONE),
    ),
    (DEEPSEEK, f"{OPEN}{deepseek('f f')}{CLOSE}", Read(deepseek("f f"), (), STOP)),
    (
        DEEPSEEK_V3,
        f"so{OPEN}{fenced('f')}\n{fenced('get.weather', '{}')}{CLOSE}",
        Read("so", (("f", ARGUMENTS), ("get.weather", "{}")), DONE),
    ),
    (DEEPSEEK_V3, f"{OPEN}{fenced('f f')}{CLOSE}", Read(fenced("f f"), (), STOP)),
    (
        KIMI,
        f"{KIMI_OPEN}{kimi('get.weather', 0)}{kimi('f', 1, '{}')}{KIMI_CLOSE}",
        Read("", (("get.weather", ARGUMENTS), ("f", "{}")), DONE),
    ),
    (MISTRAL, f"[TOOL_CALLS]f[ARGS]{ARGUMENTS}", Read("", (("f", ARGUMENTS),), DONE)),
    (
        MISTRAL,
        f"so [TOOL_CALLS]f[ARGS]{ARGUMENTS}[TOOL_CALLS]get.weather[ARGS]{{}}",
        Read("so", (("f", ARGUMENTS), ("get.weather", "{}")), DONE),
    ),
    *((DEEPSEEK, f"{OPEN}{deepseek('f', body)}{CLOSE}", Read("", (("f", "{}"),), DONE)) for body in ("", "null", '""')),
    *((DEEPSEEK_V3, f"{OPEN}{fenced('f', body)}{CLOSE}", Read("", (("f", "{}"),), DONE)) for body in ("", "null")),
    (KIMI, f"{KIMI_OPEN}{kimi('f', 0, '')}{KIMI_CLOSE}", Read("", (("f", "{}"),), DONE)),
    (MISTRAL, "[TOOL_CALLS]f[ARGS]", Read("", (("f", "{}"),), DONE)),
    (
        MISTRAL,
        "[TOOL_CALLS]f[ARGS][TOOL_CALLS]get.weather[ARGS]null",
        Read("", (("f", "{}"), ("get.weather", "{}")), DONE),
    ),
    (MISTRAL, "[TOOL_CALLS]" + "x" * 600, Read("[TOOL_CALLS]" + "x" * 600, (), STOP)),
]
TEXTS = [(HERMES, text, wanted) for text, wanted in HERMES_TEXTS.items()] + [
    (LLAMA, text, wanted) for text, wanted in LLAMA_TEXTS.items()
]
TEXTS += NAMED_TEXTS


@pytest.mark.parametrize(("format_", "text", "wanted"), TEXTS, ids=lambda value: str(value)[:40])
def test_a_text_is_read_the_same_in_any_pieces(format_: ToolFormat, text: str, wanted: Read) -> None:
    assert read(format_, [text]) == wanted
    assert read(format_, list(text)) == wanted
    for cut in range(len(text)):
        assert read(format_, [text[:cut], text[cut:]]) == wanted


VALUES = st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=2), max_leaves=4)
EACH = [1] * 200  # a piece for each character


@given(st.dictionaries(st.text(), VALUES, max_size=3), st.lists(st.integers(1, 40), max_size=6))
@example({"a": "</tool_call>"}, EACH)
@example({"a": "<tool_call>{"}, [30, 5])
@example({'"': "\\", "}": '\\"}'}, EACH)
@example({"": [None, [-1]]}, [12, 3])
@example({"a": "\u2028\x00\ud7ff🙂"}, EACH)
def test_arguments_are_passed_on_to_the_letter(values: dict[str, Any], lengths: list[int]) -> None:
    arguments = json.dumps(values, ensure_ascii=False)
    text = call("f", arguments)
    cuts = [min(cut, len(text)) for cut in accumulate(lengths)]
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(HERMES, pieces).calls == (("f", arguments),)


def test_arguments_stream_before_the_call_is_complete() -> None:
    parser = ToolCallParser(HERMES, NAMES)
    [delta] = parser.read(Delta(0, '<tool_call>{"name": "f", "arguments": {"a": '))
    assert [call.name for call in delta.tool_calls] == ["f", None]
    assert delta.tool_calls[1].arguments == '{"a": '


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP])
def test_a_call_that_was_cut_short_ends_for_what_cut_it(reason: FinishReason) -> None:
    """A finish reason of tool calls makes clients parse arguments as JSON; a stop string may have cut them too."""
    cut = read(HERMES, ['<tool_call>{"name": "f", "arguments": {"a": '], reason)
    assert cut == Read("", (("f", '{"a": '),), reason)


@pytest.mark.parametrize(
    ("template", "wanted", "name"),
    [
        ("{{ tools }} <tool_call>", "auto", "hermes"),
        ('{{ tools }} {"name": x, "parameters": y}', "auto", "llama"),
        ("{{ tools }}", "auto", None),
        ("{{ tools }}", "llama", "llama"),
        ("{{ messages }}", "hermes", None),
    ],
)
def test_the_format_is_told_from_the_template(template: str, wanted: str, name: str | None) -> None:
    found = find_format(template, wanted)
    assert (found.name if found else None) == name


# ---- grammars -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return folder / "tokenizer.json"


@pytest.fixture(scope="module")
def checker(tokenizer_file: Path) -> Checker:
    return Checker(
        GrammarCompiler(tokenizer_file, BYTE_VOCAB_SIZE, (END_ID,)),
        new_tokenizer(tokenizer_file, BYTE_VOCAB_SIZE, (END_ID,)),
    )


class Checker(NamedTuple):
    """A compiler of grammars, and the tokenizer that it reads."""

    compiler: GrammarCompiler
    tokenizer: LLTokenizer


def is_allowed(checker: Checker, grammar: Grammar, text: str) -> bool:
    """True if the whole text, and its end, are in the grammar."""
    whole_ids = (*checker.tokenizer.tokenize_str(text), END_ID)
    request = GenerateRequest("x", (1,), SamplingParams(grammar=grammar, stop_token_ids=(END_ID,)))
    matcher = checker.compiler.matcher(request)
    assert matcher is not None
    return matcher.num_allowed(whole_ids) == len(whole_ids)


def offered(*, strict: bool = False) -> list[Tool]:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    return [
        Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": schema, "strict": strict}}),
        Tool.model_validate({"type": "function", "function": {"name": "g"}}),
    ]


GOOD_ARGUMENTS = '{"a": 1}'
GOOD, EMPTY, WRONG = call("f", '{"a": 1}'), call("g", "{}"), call("f", '{"a": "x"}')
ONE = f"{OPEN}{deepseek('f', GOOD_ARGUMENTS)}{CLOSE}"
TWO = f"{OPEN}{deepseek('f', GOOD_ARGUMENTS)}{deepseek('g', '{}')}{CLOSE}"
WRONG_NAMED = deepseek("f", '{"a": "x"}')
GOOD_BARE, WRONG_BARE = bare("f", '{"a": 1}'), bare("f", '{"a": "x"}')


@pytest.mark.parametrize(
    ("format_", "choice", "is_parallel", "is_strict", "allowed", "forbidden"),
    [
        (HERMES, "required", None, False, [GOOD, EMPTY, f"{GOOD}\n{EMPTY}"], ["", "text", WRONG, f"text {GOOD}"]),
        (HERMES, "required", False, False, [GOOD], [f"{GOOD}\n{EMPTY}"]),
        (HERMES, "auto", None, True, ["", "text", f"so\n{GOOD}\n", f"{GOOD}\n{EMPTY}"], [WRONG, f"text {WRONG}"]),
        (HERMES, "auto", False, False, ["text", GOOD, WRONG, f"so\n{GOOD}"], [f"{GOOD}\n{EMPTY}"]),
        (LLAMA, "required", None, False, [GOOD_BARE, f"{GOOD_BARE}; {bare('g', '{}')}"], ["text", WRONG_BARE]),
        (LLAMA, "auto", None, True, ["text {", GOOD_BARE], [WRONG_BARE, '{"x": 1}']),
        (LLAMA, "auto", False, False, [GOOD_BARE, WRONG_BARE], [f"{GOOD_BARE}; {GOOD_BARE}"]),
        (
            DEEPSEEK,
            "required",
            None,
            False,
            [ONE, TWO],
            ["text", deepseek("f", '{"a": 1}'), f"{OPEN}{WRONG_NAMED}{CLOSE}"],
        ),
        (DEEPSEEK, "auto", None, True, ["text", f"so\n{TWO}"], [f"so {OPEN}{WRONG_NAMED}{CLOSE}"]),
        (DEEPSEEK, "auto", False, False, [f"so\n{ONE}"], [TWO]),
        (
            DEEPSEEK_V3,
            "required",
            None,
            False,
            [f"{OPEN}{fenced('f', GOOD_ARGUMENTS)}\n{fenced('g', '{}')}{CLOSE}"],
            ["text", ONE, f"{OPEN}{fenced('f', '{}')}{CLOSE}"],
        ),
        (KIMI, "required", None, False, [f"{KIMI_OPEN}{kimi('g', 0, '{}')}{KIMI_CLOSE}"], [kimi("g", 0, "{}")]),
        (
            MISTRAL,
            "required",
            None,
            False,
            ['[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}'],
            ["[TOOL_CALLS]h[ARGS]{}"],
        ),
    ],
)
def test_the_grammar_allows_what_the_choice_does(
    format_: ToolFormat,
    choice: str,
    is_parallel: bool | None,
    is_strict: bool,
    allowed: list[str],
    forbidden: list[str],
    checker: Checker,
) -> None:
    use = tool_use(offered(strict=is_strict), choice, is_parallel)
    assert use is not None
    grammar = format_.grammar(use, None)
    assert grammar is not None
    assert [text for text in allowed if not is_allowed(checker, grammar, text)] == []
    assert [text for text in forbidden if is_allowed(checker, grammar, text)] == []


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"properties": {"a": {"type": "integer"}}},
        {"type": ["object", "null"]},
        {"anyOf": [{"required": ["a"]}, True]},
    ],
    ids=str,
)
def test_arguments_are_an_object_whatever_their_schema_leaves_open(parameters: object, checker: Checker) -> None:
    tool = Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": parameters}})
    use = tool_use([tool], "required", None)
    assert use is not None
    grammar = HERMES.grammar(use, None)
    assert grammar is not None
    assert is_allowed(checker, grammar, GOOD)
    assert not any(is_allowed(checker, grammar, call("f", text)) for text in ("null", '"x"', "[1]", "5"))


def test_a_free_choice_is_not_constrained() -> None:
    use = tool_use(offered(), None, None)
    assert use is not None
    assert HERMES.grammar(use, None) is None


def test_an_answer_may_stand_beside_calls(checker: Checker) -> None:
    use = tool_use(offered(), "auto", None)
    assert use is not None
    grammar = HERMES.grammar(use, Grammar(GrammarKind.JSON_SCHEMA, '{"const": 5}', "response_format"))
    assert grammar is not None
    assert is_allowed(checker, grammar, "5")
    assert is_allowed(checker, grammar, GOOD)
    assert not is_allowed(checker, grammar, "6")


def test_marks_that_are_added_tokens_are_allowed_as_tokens(tmp_path: Path) -> None:
    """Qwen's `<tool_call>` is such a token, and not a special one: a grammar that only spells it would forbid it."""
    core = write_tokenizer(tmp_path)
    core.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("</tool_call>", special=False)])
    core.save(str(tmp_path / "tokenizer.json"))
    compiler = GrammarCompiler(tmp_path / "tokenizer.json", core.get_vocab_size(), (END_ID,))
    format_ = HERMES.with_tokens(Tokenizer(core))

    def allows(grammar: Grammar | None, token_ids: list[int]) -> bool:
        matcher = compiler.matcher(
            GenerateRequest("x", (1,), SamplingParams(grammar=grammar, stop_token_ids=(END_ID,)))
        )
        assert matcher is not None
        return matcher.num_allowed((*token_ids, END_ID)) == len(token_ids) + 1

    def spelled(text: str) -> list[int]:
        return [token_id for each in text for token_id in core.encode(each).ids]

    required, strict = (tool_use(offered(strict=True), choice, None) for choice in ("required", "auto"))
    assert required is not None
    assert strict is not None
    good, wrong = (core.encode(text).ids for text in (GOOD, WRONG))
    assert core.token_to_id("<tool_call>") in good
    assert [allows(format_.grammar(required, None), ids) for ids in (good, wrong)] == [True, False]
    free = format_.grammar(strict, None)
    assert [allows(free, ids) for ids in (core.encode("so").ids, good, [*core.encode("so").ids, *good])] == [True] * 3
    assert [allows(free, ids) for ids in (wrong, spelled(WRONG))] == [False] * 2


LONG_NAME = "mcp__a-server.of/tools:read-file_" + "x" * (128 - 33)


NO_PARAMETERS: dict[str, object] = {"type": "object", "properties": {}, "additionalProperties": False}
TEXT_FORMATS = {name: each for name, each in FORMATS.items() if name != "harmony"}  # whose marks are tokens


@pytest.mark.parametrize("format_", TEXT_FORMATS.values(), ids=TEXT_FORMATS)
def test_every_form_of_calls_takes_the_names_that_mcp_servers_give(format_: ToolFormat, tmp_path: Path) -> None:
    """The text that the grammar of a required call allows is read as a call of that name."""
    assert len(LONG_NAME) == 128
    core = write_tokenizer(tmp_path)
    tokenizer = new_tokenizer(tmp_path / "tokenizer.json", BYTE_VOCAB_SIZE, [END_ID])
    for name in (LONG_NAME, "a-b", "a/b", "a:b", "class", "1st"):
        tool = Tool.model_validate({"type": "function", "function": {"name": name, "parameters": NO_PARAMETERS}})
        grammar = format_.grammar(tool_use([tool], "required", False), None)
        assert grammar is not None
        matcher = new_matcher(tokenizer, grammar_from("grammar", grammar.source))
        token_ids: list[int] = []
        while (token_id := shortest_way(matcher, core)) != END_ID:
            assert matcher.consume_token(token_id)
            token_ids.append(token_id)
        text = core.decode(token_ids)
        parser = ToolCallParser(format_, {name: NO_PARAMETERS})
        whole = join_deltas([*parser.read(Delta(0, text)), *parser.read(Delta(0, "", finish_reason=STOP))])
        assert [(call.name, call.arguments) for call in whole_calls(whole.tool_calls)] == [(name, "{}")], text


def shortest_way(matcher: LLMatcher, core: TokenizerCore) -> int:
    """Return an allowed token that keeps the text short: the end, or the first that is no white space."""
    mask = matcher.compute_bitmask()
    allowed = [each for each in range(BYTE_VOCAB_SIZE) if mask[each // 8] >> (each % 8) & 1]
    if END_ID in allowed:
        return END_ID
    return next((each for each in allowed if core.decode([each]).strip()), allowed[0])
