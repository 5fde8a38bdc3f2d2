"""Chats that agents send reach every template whole, and ordinary ones as they came."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protos.errors import RequestError
from router.requests.chat_message import ChatMessageFields
from router.tokenizer import chat_template
from router.tokenizer.chat_prompt import ChatPrompt
from router.tokenizer.chat_template import ChatTemplate
from router.tokenizer.template_rules import PLAINEST, Rule, adapt
from tests.router.tokenizer.published import TEMPLATES, prompt, template

Chat = list[dict[str, Any]]
WORD = re.compile("w[0-9]+w")
TOOL = {"type": "function", "function": {"name": "read", "description": "reads", "parameters": {"type": "object"}}}
WHOLE_TOOL = json.loads(json.dumps(TOOL))
WHOLE_TOOL["function"]["parameters"] |= {"properties": {"x": {"type": "string", "description": "d"}}, "required": ["x"]}
HI, YES = {"role": "user", "content": "w1w"}, {"role": "assistant", "content": "w2w"}
SYSTEM, MORE = {"role": "system", "content": "w3w"}, {"role": "user", "content": "w4w"}


def call(id_: str | None = "abcdefgh1", arguments: object = '{"x": "w5w"}', name: str = "w6w") -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def calls(*each: dict[str, Any], content: str | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(each or [call()])}


LONG_ID = "call_0123456789abcdef01234567"
RESULT = {"role": "tool", "tool_call_id": "abcdefgh1", "content": "w7w"}
RESULT_B, NO_ID = {**RESULT, "tool_call_id": "b", "content": "w9w"}, {"role": "tool", "content": "w9w"}
HARMONY = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>"


def turns(chat: Chat) -> list[dict[str, Any]]:
    return [ChatMessageFields.model_validate(message).for_template() for message in chat]


def words(chat: Chat) -> list[str]:
    return [word for message in turns(chat) for word in WORD.findall(json.dumps(message))]


def assert_shown(name: str, chat: Chat, tools: list[dict[str, Any]] | None = None) -> str:
    text = prompt(name).render(turns(chat), variables={"tools": tools} if tools else None)
    missing = [word for word in words(chat) if word not in text]
    assert not missing, (name, chat, text)
    return text


@st.composite
def histories(draw: st.DrawFn) -> Chat:
    """Anything that a client may call a chat: each text in it is a word of its own."""
    counter = iter(range(10, 1000))
    said = st.sampled_from([True, True, True, False])

    def text() -> str:
        return f"w{next(counter)}w" if draw(said) else ""

    def one_call() -> dict[str, Any]:
        word = f"w{next(counter)}w"
        made = call(
            draw(st.sampled_from(["abcdefgh1", LONG_ID, "toolu_1", "x", "functions.f:0", None])),
            draw(st.sampled_from([f'{{"x": "{word}"}}', f'{{"x": "{word}', word, "", None, "[1]", {"x": word}])),
            name=f"w{next(counter)}w",
        )
        return {key: value for key, value in made.items() if key != "type" or draw(said)}

    chat: Chat = []
    for role in draw(st.lists(st.sampled_from("SDUUAACCTTL"), min_size=1, max_size=9)):
        match role:
            case "S" | "D" | "U":
                names = {"S": "system", "D": "developer", "U": "user"}
                chat.append({"role": names[role], "content": text()})
            case "A":
                content = text() or draw(st.sampled_from([None, list[Any]()]))
                chat.append({"role": "assistant"} | ({"content": content} if draw(said) else {}))
            case "C":
                each = [one_call() for _ in range(draw(st.integers(0, 3)))]
                chat.append({"role": "assistant", "content": text() or None, "tool_calls": each})
            case "T":
                id_ = draw(st.sampled_from(["abcdefgh1", "toolu_1", "other", None]))
                chat.append({"role": "tool", "tool_call_id": id_, "content": text()})
            case "L":
                chat.append({"role": "assistant", "function_call": {"name": f"w{next(counter)}w", "arguments": "{}"}})
                chat.append({"role": "function", "name": "f", "content": text()})
    return chat


@given(st.sampled_from(list(TEMPLATES)), histories(), st.sampled_from([None, [TOOL], [WHOLE_TOOL]]))
@settings(max_examples=400, deadline=None)
@example("qwen3.5", [SYSTEM, {"role": "developer", "content": "w8w"}, HI], None)
@example("mistral_nemo", [SYSTEM, HI, calls(call("call_1"), content="w8w"), RESULT, MORE, YES], [TOOL])
@example("llama3.1", [calls(call(), call("b")), RESULT, HI], [TOOL])
@example("gpt_oss", [HI, calls(call(), call("b"), content="w8w"), RESULT, YES, SYSTEM], None)
@example("gpt_oss", [HI, {"role": "assistant", "content": HARMONY + "w8w<|return|>"}, MORE], None)
@example("command_r7b", [HI, calls(call(), call("b")), RESULT, RESULT_B, YES, MORE, calls(call("b")), RESULT_B], None)
@example("command_r7b", [YES, NO_ID, NO_ID, YES, SYSTEM, NO_ID, MORE], [TOOL])
@example("kimi_k2_ids", [HI, calls(call(None), call("a")), RESULT, calls(call("a")), RESULT], None)
@example("exaone_4", [HI, RESULT, calls(call(arguments="[1")), RESULT], [TOOL])
@example("pedant", [RESULT, calls(call(), call("b")), HI, RESULT, YES], None)
@example("deepseek_r1", [SYSTEM, calls(call(), content="w8w"), RESULT, HI, YES], None)
@example("qwen3.5", [SYSTEM, HI, {"role": "assistant", "content": []}, {"role": "user", "content": []}, MORE], None)
@example("mistral_nemo", [HI, {**calls(), "content": []}, {**RESULT, "content": []}, YES, MORE], [TOOL])
@example("gemma_2", [{"role": "assistant"}, SYSTEM, RESULT, {"role": "user", "content": ""}], None)
def test_no_history_is_refused_and_no_text_of_it_is_lost(
    name: str, chat: Chat, tools: list[dict[str, Any]] | None
) -> None:
    assert_shown(name, chat, tools)


ORDINARY: list[Chat] = [
    [HI],
    [HI, YES, MORE],
    [SYSTEM, HI, YES, MORE],
    [HI, calls(), RESULT],
    [SYSTEM, HI, calls(), RESULT, YES, MORE],
    [HI, {"role": "assistant", "content": "w2w", "reasoning": "hm"}, MORE],
]


@pytest.mark.parametrize("tools", [None, [WHOLE_TOOL]], ids=["plain", "tools"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_that_a_template_takes_and_shows_is_rendered_as_it_came(name: str, tools: Any) -> None:
    num_kept = 0
    for chat in ORDINARY:
        try:
            text = template(name).render(turns(chat), variables={"tools": tools} if tools else None)
        except RequestError:
            continue
        if all(word in text for word in words(chat)) and (tools is None or "read" in text):
            assert prompt(name).render(turns(chat), variables={"tools": tools} if tools else None) == text
            num_kept += 1
    assert num_kept or name in ("content_in_parts", "function_gemma", "defined_tools") or tools


@pytest.mark.parametrize(
    ("name", "chat", "wanted"),
    [
        ("qwen3.5", [SYSTEM, HI, {"role": "system", "content": "w8w"}], "user\nw1w<|im_end|>\n<|im_start|>user\nw8w"),
        ("qwen3.5", [SYSTEM, {"role": "developer", "content": "w8w"}, HI], "system\nw3w\n\nw8w<|im_end|>"),
        ("gemma_2", [SYSTEM, HI], "<start_of_turn>user\nw3w\n\nw1w<end_of_turn>"),
        ("gemma_2", [SYSTEM, HI, MORE], "user\nw3w\n\nw1w\n\nw4w<end_of_turn>"),
        ("gemma_2", [YES], "<start_of_turn>user\nContinue.<end_of_turn>\n<start_of_turn>model\nw2w"),
        ("mistral_nemo", [SYSTEM, HI, calls(), RESULT], "[INST]w3w\n\nw1w[/INST][TOOL_CALLS]"),
        ("mistral_nemo", [HI, calls(), RESULT, MORE], "[/TOOL_RESULTS]OK.</s>[INST]w4w[/INST]"),
        ("llama3.1", [HI, calls(content="w8w"), RESULT], "assistant<|end_header_id|>\n\nw8w<|eot_id|>"),
        ("chatml", [HI, calls(), RESULT], '<tool_call>\n{"name": "w6w", "arguments": {"x": "w5w"}}\n</tool_call>'),
        ("chatml", [HI, calls(), RESULT], "user\n<tool_response>\nw7w\n</tool_response><|im_end|>"),
        ("phi_3", [HI, RESULT], "<|user|>\n<tool_response>\nw7w\n</tool_response><|end|>"),
        ("deepseek_r1", [HI, calls(content="w8w"), RESULT], "<｜Assistant｜>w8w<｜end▁of▁sentence｜><｜Assistant｜>"),
        ("qwen3", [HI, calls(call(arguments='{"x": "w5w')), RESULT], '"arguments": {"x": "w5w}'),
        ("glm_4.6", [HI, calls(call(arguments='{"x": "w5w')), RESULT], '<arg_value>{"x": "w5w</arg_value>'),
        ("smollm", [HI, {"role": "assistant"}, MORE], "assistant\n<|im_end|>\n<|im_start|>user\nw4w"),
    ],
)
def test_changes_are_the_least_that_help(name: str, chat: Chat, wanted: str) -> None:
    assert wanted in assert_shown("chatml" if name == "smollm" else name, chat)


def test_ids_stay_the_same_in_every_turn_and_name_call_and_result_alike() -> None:
    chat = [
        HI,
        calls(call(LONG_ID)),
        {**RESULT, "tool_call_id": LONG_ID},
    ]
    first = assert_shown("mistral_small_3.2", chat)
    [called] = re.findall(r"\[CALL_ID\](\w{9})\[ARGS\]", first)
    assert f"[TOOL_RESULTS]{called}[TOOL_CONTENT]" in first
    assert assert_shown("mistral_small_3.2", [*chat, YES, MORE]).startswith(first)


def test_nine_letters_are_kept() -> None:
    assert "[CALL_ID]abcdefgh1[ARGS]" in assert_shown("mistral_small_3.2", [HI, calls(), RESULT, MORE])


@pytest.mark.parametrize("id_", ["b", None])
def test_a_result_is_shown_whose_id_an_earlier_one_had(id_: str | None) -> None:
    first = [HI, calls(call(id_), call(id_)), {**RESULT, "tool_call_id": id_}, {**RESULT_B, "tool_call_id": id_}, YES]
    last = {"role": "tool", "tool_call_id": id_, "content": "w99w"}
    assert "<results>w99w</results>" in assert_shown("command_r7b", [*first, MORE, calls(call(id_)), last])
    assert "<results>w99w</results>" in assert_shown("command_r7b", [*first, MORE, YES, last])


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        ({"content": f"{HARMONY}w8w<|return|>"}, "final<|message|>w8w<|end|>"),
        ({"content": f"{HARMONY}w8w"}, "final<|message|>w8w<|end|>"),
        ({"content": "<|channel|>final<|message|>w8w<|end|>"}, "final<|message|>w8w<|end|>"),
        (
            {"content": "w8w<|channel|>commentary<|message|>w9w<|end|><|start|>assistant<|channel|>final<|message|>"},
            "final<|message|>w8w\n\nw9w<|end|>",
        ),
        ({"content": "w8w", "reasoning": f"{HARMONY}hm"}, "final<|message|>w8w<|end|>"),
    ],
)
def test_harmony_s_own_marks_in_an_answer_are_read(message: dict[str, str], wanted: str) -> None:
    text = prompt("gpt_oss").render(turns([HI, {"role": "assistant", **message}, MORE]))
    assert wanted in text
    assert "analysis<|message|>" not in text
    thought = {"content": f"{HARMONY}<|end|>", "tool_calls": [call()]}
    text = prompt("gpt_oss").render(turns([HI, {"role": "assistant", **thought}, RESULT]))
    assert "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.w6w" in text


@pytest.mark.parametrize("id_", ["call_1", None])
def test_ids_name_their_functions_where_a_template_shows_nothing_else_of_them(id_: str | None) -> None:
    first, second = call(id_, name="w8w"), call("b", name="w9w")
    results = [{**RESULT, "tool_call_id": each} for each in ("b", id_)]
    chat = [HI, calls(first, second), *results, calls(call(id_)), {**RESULT, "tool_call_id": id_, "name": "n"}]
    text = assert_shown("kimi_k2_ids", chat)
    assert re.findall("<.call.>([^<]*)", text) == ["functions.w8w:0", "functions.w9w:1", "functions.w6w:2"]
    assert re.findall("Return of (.*)", text) == ["functions.w9w:1", "functions.w8w:0", "functions.w6w:2"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_text_of_a_user_or_a_tool_becomes_the_system_s(name: str) -> None:
    chat = [HI, SYSTEM, MORE, calls(call("b")), RESULT, RESULT, YES, HI]
    for rules in (frozenset(prompt(name).rules), PLAINEST):
        adapted = adapt(rules, turns(chat))
        system = " ".join(str(message["content"]) for message in adapted if message["role"] == "system")
        assert not {"w1w", "w4w", "w7w", "w2w"} & set(WORD.findall(system))


def test_an_answer_that_is_continued_stays_last() -> None:
    chat = [HI, HI, YES, {"role": "assistant", "content": "w9w so"}]
    for name in TEMPLATES.keys() - {"pedant"}:  # which takes no answer at the end
        text = prompt(name).render(turns(chat), continue_final_message=True)
        assert text.endswith("w9w so"), name
        assert all(word in text for word in words(chat))


@pytest.mark.parametrize("begun", ["<", "<|", "e", "nd", "s", "[", '{"', "a  b"])
def test_an_answer_is_continued_at_its_end_and_not_where_a_mark_of_the_template_spells_it(begun: str) -> None:
    for name in TEMPLATES.keys() - {"pedant"}:
        text, known = (
            prompt(name).render(turns([HI, {"role": "assistant", "content": each}]), continue_final_message=True)
            for each in (begun, "w9w")
        )
        assert text == known.removesuffix("w9w") + begun, name


def test_white_space_at_the_end_of_a_continued_answer_is_the_template_s_to_keep() -> None:
    chat = turns([HI, {"role": "assistant", "content": "w9w: "}])
    for name, end in (("hermes", "w9w: "), ("llama3.1", "w9w:")):
        assert prompt(name).render(chat, continue_final_message=True).endswith(end), name


def test_a_chat_that_no_change_makes_good_is_refused_with_the_template_s_words() -> None:
    pedant = ChatPrompt(ChatTemplate("{{ raise_exception('never') }}", {}))
    with pytest.raises(RequestError, match="refuses these messages: never"):
        pedant.render(turns([HI]))


def test_a_template_that_does_not_end_is_probed_and_tried_but_for_a_moment(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(chat_template, "_RENDER_LIMIT_S", 0.05)
    monkeypatch.setattr("router.tokenizer.chat_prompt._LIMIT_S", 0.1)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with caplog.at_level(logging.WARNING):
        slow = ChatPrompt(ChatTemplate(endless, {}))
    assert "not all of its rules were learnt" in caplog.text
    with pytest.raises(RequestError, match="processor time"):
        slow.render(turns([HI]))


def test_rules_are_said_once_in_words() -> None:
    assert prompt("chatml").rules == [Rule.CONTENT, Rule.CALLS_AS_TEXT]
    assert prompt("granite_4").rules == []
    assert all((len(rule) < 120 and ":" in rule) or "must be" in rule or "must have" in rule for rule in Rule)


def test_results_of_several_calls_are_no_orphans_and_ids_are_never_empty() -> None:
    chat = turns([HI, calls(call(""), call("b")), {**RESULT, "tool_call_id": ""}, RESULT_B])
    assert adapt({Rule.ORPHANS_AS_TEXT}, chat) == chat
    _, called, *results = adapt({Rule.UNIQUE_IDS}, chat)
    ids = [each["id"] for each in called["tool_calls"]]
    assert ids == [result["tool_call_id"] for result in results]
    assert all(ids)


def repaired(rule: Rule, *chat: dict[str, Any]) -> Chat:
    return adapt({rule}, turns(list(chat)))


def test_a_result_belongs_to_the_last_calls_and_not_to_earlier_ones_without_a_result() -> None:
    chat = [HI, calls(call("b", name="w8w")), MORE, calls(call("b", name="w9w")), RESULT_B]
    assert repaired(Rule.IDS_OF_FUNCTIONS, *chat)[-1]["tool_call_id"] == "functions.w9w:1"
    chat = [HI, calls(call("call_1")), NO_ID, calls(call("call_2")), NO_ID]
    _, _, first, _, second = repaired(Rule.SHORT_IDS, *chat)
    for called, result in ((chat[1], first), (chat[3], second)):
        [short] = repaired(Rule.SHORT_IDS, called)[0]["tool_calls"]
        assert result["tool_call_id"] == short["id"]


def test_the_text_before_several_calls_stays_with_the_first() -> None:
    split = repaired(Rule.ONE_CALL, HI, calls(call(), call("b"), content="w8w"), RESULT, RESULT_B)
    assert [message["content"] for message in split] == ["w1w", "w8w", "w7w", "", "w9w"]


def test_a_result_of_an_unknown_call_gets_the_name_of_the_last_function() -> None:
    results = repaired(Rule.RESULT_NAMES, HI, calls(call(name="w8w"), call("b", name="w9w")), RESULT, NO_ID)[2:]
    assert [result["name"] for result in results] == ["w8w", "w9w"]


def test_no_note_is_added_where_there_are_as_many_results_as_calls() -> None:
    chat = turns([HI, calls(), {**RESULT, "tool_call_id": "other"}])
    assert repaired(Rule.RESULTS_FOR_CALLS, *chat) == chat
    assert len(repaired(Rule.RESULTS_FOR_CALLS, HI, calls(call("a"), call("b"), call("c")), RESULT_B)) == 5


def test_a_long_chat_is_adapted_in_no_time() -> None:
    many = calls(*(call(f"id{rank}") for rank in range(3000)))
    results = [{**RESULT, "tool_call_id": f"id{rank}"} for rank in reversed(range(3000))]
    adapted = adapt({Rule.ONE_CALL, Rule.RESULTS_AFTER_CALLS, Rule.SHORT_IDS}, turns([HI, many, *results]))
    assert len(adapted) == 6001
    assert all(
        called["tool_calls"][0]["id"] == result["tool_call_id"]
        for called, result in zip(adapted[1::2], adapted[2::2], strict=True)
    )
