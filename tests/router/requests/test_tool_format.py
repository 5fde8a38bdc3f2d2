"""The form of calls that a chat template shows."""

from __future__ import annotations

import pytest

from router.requests.tool_format import DEEPSEEK, DEEPSEEK_V3, HERMES, KIMI, LLAMA, MISTRAL, find_format


@pytest.mark.parametrize(
    ("template", "format_"),
    [
        ("{{ tools }}<tool_call>", HERMES),
        ('{{ tools }}{"name": n, "parameters": {}}', LLAMA),
        ("{{ tools }}<tool_call>\n<function=name>", None),
        ('{{ tools }}[AVAILABLE_TOOLS]"parameters"[TOOL_CALLS]', None),  # its older form is a list
        ("{{ tools }}[TOOL_CALLS]name[ARGS]", MISTRAL),
        ("{{ tools }}<｜tool▁call▁begin｜>name<｜tool▁sep｜>", DEEPSEEK),
        ("{{ tools }}<｜tool▁call▁begin｜>function<｜tool▁sep｜>name ```json", DEEPSEEK_V3),
        ("{{ tools }}<|tool_call_begin|>id<|tool_call_argument_begin|>", KIMI),
        ("{{ tools }}<tool_call>name<arg_key>", None),
        ("no calls", None),
    ],
)
def test_a_form_that_is_not_read_is_not_taken_for_another(template: str, format_: object) -> None:
    assert find_format(template) is format_
