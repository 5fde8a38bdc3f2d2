"""Calls as the chat templates of published models write them: recognised, and read the same in any pieces."""

from __future__ import annotations

import json
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protos.messages import FinishReason
from router.generation.delta import Delta, join_deltas
from router.generation.tool_calls import ToolCallParser
from router.generation.tool_formats import find_format
from router.requests.chat_message import ChatMessageFields
from router.tokenizer.chat_template import ChatTemplate

FOLDER = Path(__file__).parent / "templates"
SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "a text"},
        "count": {"type": "integer", "description": "a number"},
        "deep": {"type": "object", "description": "an object"},
        "flag": {"type": "boolean", "description": "a flag"},
    },
    "required": ["text"],
}
TOOLS = {"write": SCHEMA, "now": {"type": "object", "properties": {}, "required": []}}
TEXT, HARD = "Rome, 'eternal'", 'a "b"\n\n<x> & \\n {y: [1, 2]}, </param é🙂\n  '
Call = tuple[str, dict[str, Any]]
DEEP: Call = ("write", {"text": HARD, "count": 3, "deep": {"a": [1, {"b": "}"}]}, "flag": True})
NOW: Call = ("now", {})
PLAIN: Call = ("write", {"text": TEXT, "count": -1})

# A template, the form of its calls, the texts before and after them in an answer, and the calls that it can write.
PUBLISHED: list[tuple[str, str, str, str, list[Call]]] = [
    ("qwen2.5", "hermes", "<|im_start|>assistant\n", "<|im_end|>", [DEEP, NOW, PLAIN]),
    ("qwen3", "hermes", "</think>", "<|im_end|>", [DEEP, NOW, PLAIN]),
    ("hermes", "hermes", "<|im_start|>assistant\n", "<|im_end|>", [DEEP, NOW, PLAIN]),
    ("qwen3_coder", "qwen_xml", "<|im_start|>assistant\n", "<|im_end|>", [DEEP, NOW, PLAIN]),
    ("qwen3.5", "qwen_xml", "</think>", "<|im_end|>", [DEEP, NOW, PLAIN]),
    ("seed_oss", "seed", "<seed:bos>assistant\n", "<seed:eos>", [DEEP, NOW, PLAIN]),
    ("glm_4.6", "glm", "</think>", "<|user|>", [DEEP, NOW, PLAIN]),
    ("glm_4.7", "glm", "</think>", "<|user|>", [DEEP, NOW, PLAIN]),
    ("minimax_m2", "minimax", "]~b]ai\n", "[e~[", [DEEP, NOW, PLAIN]),
    ("llama3.1", "llama", "<|end_header_id|>", "<|eot_id|>", [DEEP]),
    ("llama4_json", "llama", "<|header_end|>", "<|eot|>", [DEEP, NOW, PLAIN]),
    ("llama4_pythonic", "pythonic", "<|header_end|>", "<|eot|>", [PLAIN, NOW]),
    ("mistral_nemo", "mistral_list", "[/INST]", "</s>", [DEEP, NOW, PLAIN]),
    ("mistral_small_3.2", "mistral", "[/INST]", "</s>", [DEEP, NOW, PLAIN]),
    ("ministral_3", "mistral", "[/INST]", "</s>", [DEEP, NOW, PLAIN]),
    ("deepseek_v3", "deepseek_v3", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", [DEEP, NOW, PLAIN]),
    ("deepseek_v3.1", "deepseek", "</think>", "<｜end▁of▁sentence｜>", [DEEP, NOW, PLAIN]),
    ("deepseek_v3.2", "dsml_v32", "</think>", "<｜end▁of▁sentence｜>", [DEEP, NOW, PLAIN]),
    ("deepseek_v4", "dsml", "</think>", "<｜end▁of▁sentence｜>", [DEEP, NOW, PLAIN]),
    ("kimi_k2", "kimi", "<|im_middle|>", "<|im_end|>", [DEEP, NOW, PLAIN]),
    ("gemma_4", "gemma", "<channel|>", "<|tool_response>", [DEEP, NOW, PLAIN]),
    ("function_gemma", "function_gemma", "<start_of_turn>model", "<end_of_turn>", [PLAIN, NOW]),
    ("granite_3", "granite", "assistant<|end_of_role|>", "<|end_of_text|>", [DEEP, NOW, PLAIN]),
    ("hunyuan", "tool_calls", "<|extra_0|>", "<|eos|>", [DEEP, NOW, PLAIN]),
]


def source(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def written(name: str, calls: list[Call]) -> str:
    """A chat whose last turn is these calls, as a client replays it."""
    replayed = [
        {"id": f"abcdefgh{rank}", "type": "function", "function": {"name": called, "arguments": json.dumps(arguments)}}
        for rank, (called, arguments) in enumerate(calls)
    ]
    messages = [
        ChatMessageFields.model_validate({"role": "user", "content": "hi"}),
        ChatMessageFields.model_validate({"role": "assistant", "content": None, "tool_calls": replayed}),
    ]
    tools = [
        {"type": "function", "function": {"name": n, "description": "d", "parameters": s}} for n, s in TOOLS.items()
    ]
    template = ChatTemplate(source(name), {"bos_token": "<s>", "eos_token": "</s>"})
    turns = [message.for_template() for message in messages]
    return template.render(turns, add_generation_prompt=False, variables={"tools": tools})


@cache
def answer(name: str) -> str:
    """The part of such a chat that the model writes."""
    before, behind, calls = next(row[2:] for row in PUBLISHED if row[0] == name)
    return written(name, calls).rpartition(before)[2].partition(behind)[0]


def read(format_: Any, pieces: list[str]) -> tuple[str, list[tuple[str, str]], FinishReason | None]:
    parser = ToolCallParser(format_, TOOLS)
    deltas = [each for piece in pieces for each in parser.read(Delta(0, piece))]
    whole = join_deltas([*deltas, *parser.read(Delta(0, "", finish_reason=FinishReason.STOP))])
    calls = [
        (head.name or "", "".join(call.arguments for call in whole.tool_calls if call.index == head.index))
        for head in whole.tool_calls
        if head.id is not None
    ]
    return whole.text, calls, whole.finish_reason


@pytest.mark.parametrize(("name", "form", "calls"), [(row[0], row[1], row[4]) for row in PUBLISHED])
def test_calls_of_a_published_template_are_read_in_any_pieces(name: str, form: str, calls: list[Call]) -> None:
    format_ = find_format(source(name))
    assert format_ is not None
    assert format_.name == form
    text = answer(name)
    whole = read(format_, [text])
    assert [(called, json.loads(arguments)) for called, arguments in whole[1]] == calls
    assert (whole[0].strip(), whole[2]) == ("", FinishReason.TOOL_CALLS)
    for pieces in (list(text), *([text[:cut], text[cut:]] for cut in range(0, len(text), 7))):
        assert read(format_, pieces) == whole


@given(st.sampled_from([row[0] for row in PUBLISHED]), st.lists(st.integers(1, 200), max_size=8))
@settings(max_examples=60, deadline=None)
@example("gemma_4", [1] * 600)  # a piece for each character, in forms that quote in a way of their own
@example("deepseek_v4", [1] * 900)
@example("qwen3_coder", [1] * 600)
@example("llama4_pythonic", [4, 1, 1, 1])  # text that may begin a call
@example("mistral_nemo", [4, 12, 1])
@example("kimi_k2", [4, 29, 24])  # between two marks
@example("glm_4.6", [3, 2, 11, 6])
def test_pieces_of_any_lengths_read_the_same(name: str, lengths: list[int]) -> None:
    text = "So. " + answer(name)
    cuts = [min(cut, len(text)) for cut in accumulate(lengths)]
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    format_ = find_format(source(name))
    assert read(format_, pieces) == read(format_, [text])


@pytest.mark.parametrize("name", [file.stem for file in sorted(FOLDER.glob("*.jinja"))])
def test_every_template_here_is_tested(name: str) -> None:
    assert name in {row[0] for row in PUBLISHED} | {"gpt_oss"}
