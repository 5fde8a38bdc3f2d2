"""History is accepted leniently: every API passes it to the template as far as it has a text."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from protos import outrider_pb2 as pb2
from router.generation.generation_service import GenerationService
from tests.router.conftest import chat_template
from tests.router.fixtures.fake_backend import FakeBackend, say
from tests.router.fixtures.grpc_channel import grpc_channel
from tests.router.openai.test_messages import prompt_of

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<{{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}>{% endfor %}"
    "{% if m.role == 'tool' %}({{ m.tool_call_id }}){% endif %}{% endfor %}"
)
HI, MORE = {"role": "user", "content": "hi"}, {"role": "user", "content": "more"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
INPUT_IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


@pytest.fixture
def service(service: GenerationService, backend: FakeBackend) -> GenerationService:
    backend.card, backend.next_token = replace(backend.card, max_model_len=4000), say(0)
    files = replace(service.files, chat_template=chat_template(TEMPLATE))
    return GenerationService(backend, files, service.config, service.metrics)


async def rendered(http: httpx.AsyncClient, backend: FakeBackend, path: str, body: dict[str, Any]) -> tuple[str, str]:
    """The prompt, and the header that names its ignored parts."""
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    answer = await http.post(path, json={limit: 3, **body})
    assert answer.status_code == 200, answer.text
    return prompt_of(backend), answer.headers.get("x-ignored-fields", "")


def called(arguments: object, **more: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": function, **more}]}


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ('{"x": 1}', '{"x": 1}'),
        ({"x": 1}, '{"x": 1}'),
        ("{", '"{"'),
        ('{"x": "half', r'"{\"x\": \"half"'),
        ("[1]", '"[1]"'),
        ("5", '"5"'),
        (5, '"5"'),
        ('"text"', r'"\"text\""'),
        ("null", "{}"),
        (None, "{}"),
        ("", "{}"),
        (" \n", "{}"),
        (r'{"x": "\ud800"}', r'"{\"x\": \"\\ud800\"}"'),
    ],
)
async def test_arguments_of_any_kind_are_shown(
    http: httpx.AsyncClient, backend: FakeBackend, arguments: object, wanted: str
) -> None:
    messages = [HI, called(arguments), {"role": "tool", "tool_call_id": "c", "content": "r"}, MORE]
    text, _ = await rendered(http, backend, "/v1/chat/completions", {"messages": messages})
    assert text == f"[user]hi[assistant]<c f {wanted}>[tool]r(c)[user]more"


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        ({"role": "assistant", "function_call": {"name": "f", "arguments": '{"x": 1}'}}, '[assistant]< f {"x": 1}>'),
        ({"role": "function", "name": "f", "content": "r"}, "[tool]r()"),
        ({"role": "tool", "content": None}, "[tool]()"),
        ({"role": "tool", "tool_call_id": "c", "content": {"a": 1}}, '[tool]{"a": 1}(c)'),
        ({"role": "tool", "tool_call_id": "c", "content": ["a", {"type": "text", "text": "b"}]}, "[tool]ab(c)"),
        ({"role": "assistant", "content": None, "refusal": "no"}, "[assistant]no"),
        ({"role": "assistant", "content": "x", "audio": {"id": "a"}}, "[assistant]x"),
        ({"role": "assistant", "content": "x", "tool_calls": []}, "[assistant]x"),
        ({"role": "assistant", "tool_calls": [{"type": "function"}]}, "[assistant]< unknown {}>"),
        (
            {"role": "assistant", "tool_calls": [{"id": 7, "name": "g", "arguments": {"x": 1}}]},
            '[assistant]<7 g {"x": 1}>',
        ),
        (
            {
                "role": "assistant",
                "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "g", "input": "a b"}}],
            },
            '[assistant]<c g {"input": "a b"}>',
        ),
        ({"role": "user", "content": None}, "[user]"),
        ({"role": "assistant", "content": "x", "tool_calls": {}}, "[assistant]x"),
        ({"role": "assistant", "content": "x", "tool_calls": [None]}, "[assistant]x"),
        ({"role": "assistant", "content": "x", "refusal": False}, "[assistant]x"),
        ({"role": "assistant", "content": "x", "reasoning": {"summary": []}, "name": ["n"]}, "[assistant]x"),
        ({"role": "assistant", "content": "x", "thinking_blocks": {}, "function_call": "f"}, "[assistant]x"),
        ({"role": "tool", "tool_call_id": 7, "content": "r"}, "[tool]r(7)"),
        ({"role": "ipython", "content": {"a": 1}}, '[tool]{"a": 1}()'),
        ({"role": "assistant", "content": {"a": 1}}, '[assistant]{"a": 1}'),
        ({"role": "assistant", "content": 5}, "[assistant]5"),
        ({"role": "tool", "content": [{"type": "resource", "resource": {"uri": "u", "text": "r"}}]}, "[tool]r()"),
    ],
)
async def test_older_and_other_spellings_are_read(
    http: httpx.AsyncClient, backend: FakeBackend, message: dict, wanted: str
) -> None:
    text, _ = await rendered(http, backend, "/v1/chat/completions", {"messages": [HI, message, MORE]})
    assert text == f"[user]hi{wanted}[user]more"


@pytest.mark.parametrize("role", ["user", "assistant", "tool"])
@pytest.mark.parametrize(
    ("part", "note"),
    [
        (IMAGE, "[image omitted]"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "[audio omitted]"),
        ({"type": "file", "file": {"file_id": "f"}}, "[file omitted]"),
        ({"type": "hologram"}, "[content omitted]"),
    ],
)
async def test_a_note_stands_in_for_a_picture_of_before(
    http: httpx.AsyncClient, backend: FakeBackend, role: str, part: dict, note: str
) -> None:
    messages = [HI, {"role": role, "content": [{"type": "text", "text": "see"}, part]}, MORE]
    text, ignored = await rendered(http, backend, "/v1/chat/completions", {"messages": messages})
    assert f"[{role}]see\n{note}" in text
    assert ignored == "messages.1"


@pytest.mark.parametrize(
    ("path", "body", "param", "kind"),
    [
        (
            "/v1/chat/completions",
            {"messages": [HI, {"role": "user", "content": [IMAGE]}]},
            "messages.1.content.0",
            "image_url",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "system", "content": [IMAGE]}, HI]},
            "messages.0.content.0",
            "image_url",
        ),
        (
            "/v1/responses",
            {"input": [HI, {"role": "user", "content": [INPUT_IMAGE]}]},
            "input[1].content.0",
            "input_image",
        ),
        ("/v1/messages", {"max_tokens": 3, "messages": [{"role": "user", "content": [BLOCK]}]}, None, "'image'"),
        (
            "/v1/messages",
            {"max_tokens": 3, "system": [BLOCK], "messages": [HI]},
            None,
            "system.content.0 is of type 'image'",
        ),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages.0.content.0",
            "has no text",
        ),
        ("/tokenize", {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0", "image_url"),
    ],
)
async def test_a_picture_in_what_is_asked_is_refused_by_name(
    http: httpx.AsyncClient, path: str, body: dict, param: str | None, kind: str
) -> None:
    answer = await http.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"].get("param") == param
    assert kind in answer.json()["error"]["message"]


async def test_a_screenshot_that_a_tool_has_just_returned_is_a_note(
    http: httpx.AsyncClient, backend: FakeBackend
) -> None:
    call = {"type": "tool_use", "id": "t", "name": "Read", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [BLOCK, {"type": "text", "text": "done"}]}
    messages = [HI, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    text, ignored = await rendered(http, backend, "/v1/messages", {"messages": messages})
    assert (text, ignored) == ("[user]hi[assistant]<t Read {}>[tool][image omitted]\ndone(t)", "messages.2")


@pytest.mark.parametrize(
    ("given", "read"),
    [({"x": 1}, '{"x": 1}'), ('{"x": 1}', '{"x": 1}'), ('{"x": ', '"{\\"x\\": "'), (None, "{}"), ([1], '"[1]"')],
)
async def test_a_call_of_a_messages_history_may_have_a_text_as_input(
    http: httpx.AsyncClient, backend: FakeBackend, given: object, read: str
) -> None:
    call = {"type": "tool_use", "id": "t", "name": "f", "input": given}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "r"}
    messages = [HI, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    text, _ = await rendered(http, backend, "/v1/messages", {"messages": messages})
    assert text == f"[user]hi[assistant]<t f {read}>[tool]r(t)"


@pytest.mark.parametrize("block", [BLOCK, {"type": "text", "text": "see"}])
async def test_a_screenshot_beside_a_tool_s_result_is_a_note_by_every_api(
    http: httpx.AsyncClient, backend: FakeBackend, block: dict[str, Any]
) -> None:
    """Agents send it in the turn of the result, and cannot take it back."""
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "r"}
    turns = [HI, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result, block, BLOCK]}]
    text, ignored = await rendered(http, backend, "/v1/messages", {"messages": turns})
    assert text.startswith("[user]hi[assistant]<c f {}>[tool]r(c)[user]")
    assert text.endswith("[image omitted]")
    assert ignored == "messages.2"
    picture = {"role": "user", "content": [IMAGE]}
    chat = [HI, called("{}"), {"role": "tool", "tool_call_id": "c", "content": "r"}, picture]
    text, ignored = await rendered(http, backend, "/v1/chat/completions", {"messages": chat})
    assert (text, ignored) == ("[user]hi[assistant]<c f {}>[tool]r(c)[user][image omitted]", "messages.3")
    items = [
        HI,
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "r"},
        {"role": "user", "content": [INPUT_IMAGE]},
    ]
    text, ignored = await rendered(http, backend, "/v1/responses", {"input": items})
    assert (text, ignored) == ("[user]hi[assistant]<c f {}>[tool]r(c)[user][image omitted]", "input%5B3%5D")


@pytest.mark.parametrize("role", ["nobody", "model", "User", ""])
async def test_a_role_that_templates_do_not_know_is_refused_by_name(http: httpx.AsyncClient, role: str) -> None:
    messages = [{"role": role, "content": "x"}, HI]
    answer = await http.post("/v1/chat/completions", json={"messages": messages})
    assert answer.status_code == 400
    assert "'assistant', 'tool'" in answer.json()["error"]["message"]


async def test_items_of_openai_s_own_tools_are_read_as_far_as_they_have_a_text(
    http: httpx.AsyncClient, backend: FakeBackend
) -> None:
    action = {"type": "exec", "command": ["ls"]}
    items = [
        HI,
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"},
        {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search", "query": "q"}},
        {"type": "file_search_call", "id": "fs", "queries": ["q"], "results": [{"file_id": "f", "text": "found"}]},
        {"type": "image_generation_call", "id": "ig", "result": "AAAA"},
        {"type": "mcp_call", "id": "m", "name": "ask", "arguments": "{}", "output": "found"},
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "ok"},
        {"type": "local_shell_call", "id": "l", "call_id": "c2", "status": "completed", "action": action},
        {"type": "local_shell_call_output", "id": "c2", "output": "a.py"},
        {"type": "computer_call", "id": "k", "call_id": "c3", "action": {"type": "screenshot"}},
        {"type": "computer_call_output", "call_id": "c3", "output": {"type": "computer_screenshot", "image_url": "d"}},
        {"type": "compaction", "encrypted_content": "gAAA"},
        MORE,
    ]
    text, ignored = await rendered(http, backend, "/v1/responses", {"input": items})
    assert text == (
        '[user]hi[assistant]found[assistant]found<c1 apply_patch {"input": "*** Begin"}>[tool]ok(c1)'
        f"[assistant]<c2 local_shell {json.dumps({'action': action})}>[tool]a.py(c2)"
        '[assistant]<c3 computer {"action": {"type": "screenshot"}}>[tool][image omitted](c3)[user]more'
    )
    assert ignored == "input%5B2%5D, input%5B4%5D, input%5B12%5D, input%5B11%5D"


@pytest.mark.parametrize(
    ("content", "thought"),
    [(5, ""), (True, ""), ("hm", "hm"), ({"text": "hm"}, "hm"), ([None, {"text": 5}, "hm"], "hm")],
)
async def test_a_thought_of_any_form_is_read_as_far_as_it_is_a_text(
    http: httpx.AsyncClient, backend: FakeBackend, service: GenerationService, content: object, thought: str
) -> None:
    template = "{% for m in messages %}({{ m.thinking }}){{ m.content }}{% endfor %}"
    service.files = replace(service.files, chat_template=chat_template(template))
    text, _ = await rendered(
        http, backend, "/v1/responses", {"input": [{"type": "reasoning", "content": content}, MORE]}
    )
    assert text == (f"({thought})()more" if thought else "()more")


async def test_an_output_without_its_call_and_a_call_without_its_output_are_taken(
    http: httpx.AsyncClient, backend: FakeBackend
) -> None:
    items = [
        {"type": "function_call_output", "call_id": "gone", "output": "r"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"x": '},
        MORE,
    ]
    text, _ = await rendered(http, backend, "/v1/responses", {"input": items})
    assert text == r'[tool]r(gone)[assistant]<c f "{\"x\":">[user]more'.replace('{\\"x\\":"', '{\\"x\\": "')


async def test_blocks_of_anthropic_s_servers_are_read_as_far_as_they_have_a_text(
    http: httpx.AsyncClient, backend: FakeBackend
) -> None:
    found = {"type": "web_search_result", "title": "A title", "url": "http://a", "encrypted_content": "gAAA"}
    document = {
        "type": "document",
        "title": "Notes",
        "source": {"type": "text", "media_type": "text/plain", "data": "d"},
    }
    answer = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": [found]},
        {"type": "redacted_thinking", "data": "AAAA"},
        {"type": "text", "text": "so"},
        {"type": "code_execution_tool_result", "tool_use_id": "x", "content": {"type": "error", "error_code": "e"}},
    ]
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}}
    messages = [
        {"role": "user", "content": [document, pdf, {"type": "text", "text": "read"}]},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": [{"type": "search_result", "title": "t", "source": "s", "content": [found]}]},
    ]
    text, ignored = await rendered(http, backend, "/v1/messages", {"messages": messages})
    assert text == ("[user]Notes\nd\n[file omitted]\nread[assistant]A title\nhttp://a\nso[user]t\nA title\nhttp://a\ns")
    assert ignored.split(", ") == [
        "messages.1.server_tool_use",
        "messages.1.code_execution_tool_result",
        "messages.0",
    ]


async def test_a_reference_to_an_item_is_refused_since_nothing_is_kept(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/responses", json={"input": [HI, {"type": "item_reference", "id": "msg_1"}]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
    alone = await http.post("/v1/responses", json={"input": [{"type": "web_search_call", "id": "ws"}]})
    assert "no item that has a text" in alone.json()["error"]["message"]


async def test_grpc_takes_a_call_that_was_cut(service: GenerationService, backend: FakeBackend) -> None:
    messages = [
        pb2.ChatMessage(role="user", content="hi"),
        pb2.ChatMessage(role="assistant", tool_calls=[pb2.ToolCall(id="c", name="f", arguments="{")]),
        pb2.ChatMessage(role="tool", tool_call_id="c"),
    ]
    async with grpc_channel(service) as channel:
        from protos import outrider_pb2_grpc

        stub = outrider_pb2_grpc.GenerationStub(channel)
        await stub.Generate(pb2.GenerateRequest(messages=messages, max_tokens=2))
    assert prompt_of(backend) == '[user]hi[assistant]<c f "{">[tool](c)'
