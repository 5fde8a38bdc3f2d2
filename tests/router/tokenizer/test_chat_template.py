"""Templates as model repositories write them."""

from __future__ import annotations

import pytest

from protos.errors import ConfigError, RequestError
from router.tokenizer import chat_template
from router.tokenizer.chat_template import ChatTemplate

USER = [{"role": "user", "content": "<b>hi</b>"}]


def render(source: str, **arguments: object) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(USER, **arguments)


def test_special_tokens_and_the_generation_prompt_are_at_hand() -> None:
    source = "{{ bos_token }}{{ messages[0].content }}{% if add_generation_prompt %}[go]{% endif %}"
    assert render(source) == "<s><b>hi</b>[go]"
    assert render(source, add_generation_prompt=False) == "<s><b>hi</b>"


def test_blocks_leave_no_blank_lines() -> None:
    assert render("{% for m in messages %}\n  {% if true %}\nx\n  {% endif %}\n{% endfor %}") == "x\n"


def test_json_is_not_escaped_for_html() -> None:
    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "<b>hi</b>"}'
    assert render("{{ {'a': 1} | tojson(indent=2) }}") == '{\n  "a": 1\n}'


def test_loops_can_be_left_and_generation_blocks_are_plain() -> None:
    assert render("{% for i in range(9) %}{% if i > 1 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{% generation %}a{{ 1 }}{% endgeneration %}b") == "a1b"


def test_variables_of_the_request_are_seen_but_do_not_replace_the_messages() -> None:
    source = "{{ enable_thinking }}{{ messages | length }}"
    assert render(source, variables={"enable_thinking": 7, "messages": []}) == "71"


def test_today_can_be_written() -> None:
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10


@pytest.mark.parametrize(
    "source", ["{{ raise_exception('roles must alternate') }}", "{{ messages[5].content.x }}", "{{ 1 / 0 }}"]
)
def test_a_refusal_is_the_client_s_to_know(source: str) -> None:
    with pytest.raises(RequestError) as caught:
        render(source)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__ }}"]
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    with pytest.raises(RequestError):
        render(source)


def test_a_template_that_is_not_jinja_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="line 1"):
        ChatTemplate("{% for %}", {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{% for i in m %}" * 25 + "{% endfor %}" * 25,
        "{% if m %}" * 150 + "{% endif %}" * 150,
        "{{ " + "9" * 5000 + " }}",
        "{% break %}",
    ],
)
def test_a_template_that_python_cannot_compile_is_refused_at_start(source: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be compiled: .*give another as ingress\.chat_template"):
        ChatTemplate(source, {})


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_a_template_that_does_not_end_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_RENDER_LIMIT_S", 0.05)
    with pytest.raises(RequestError, match="chat template"):
        ChatTemplate(source, {}).render([{"role": "user", "content": "hi"}])
