"""The form of calls that a chat template shows."""

from __future__ import annotations

import pytest

from router.generation.tool_formats import find_format
from router.generation.tool_formats.tagged_format import DSML, DSML_V32, GLM, QWEN_XML
from router.generation.tool_formats.tool_format import DEEPSEEK, DEEPSEEK_V3, HERMES, KIMI, LLAMA, MISTRAL
from router.generation.tool_formats.whole_format import COHERE, HARMONY, MISTRAL_LIST


@pytest.mark.parametrize(
    ("template", "format_"),
    [
        ("{{ tools }}<tool_call>", HERMES),
        ('{{ tools }}{"name": n, "parameters": {}}', LLAMA),
        ("{{ tools }}<tool_call>\n<function=name><parameter=key>", QWEN_XML),
        ('{{ tools }}[AVAILABLE_TOOLS]"parameters"[TOOL_CALLS]', MISTRAL_LIST),
        ("{{ tools }}[TOOL_CALLS]name[ARGS]", MISTRAL),
        ("{{ tools }}<｜tool▁call▁begin｜>name<｜tool▁sep｜>", DEEPSEEK),
        ("{{ tools }}<｜tool▁call▁begin｜>function<｜tool▁sep｜>name ```json", DEEPSEEK_V3),
        ("{{ tools }}<|tool_call_begin|>id<|tool_call_argument_begin|>", KIMI),
        ("{{ tools }}<tool_call>name<arg_key>key</arg_key><arg_value>", GLM),
        ("{{ tools }}<|channel|>commentary", None),
        ("{{ tools }}<|channel|>commentary to=functions.name<|message|>", HARMONY),
        ('{{ tools }}<|START_ACTION|>[{"tool_name": "', COHERE),
        ("{{ tools }}<|START_ACTION|>other", None),
        ("{{ tools }}<｜DSML｜tool_calls>", DSML),
        ("{{ tools }}{{ '<' + '｜DSML｜' + 'function_calls>' }}", DSML_V32),
        ('{{ tools }}{"description": d, "parameters": p} to call write Action:', None),
        ("{{ tools }}<|python_tag|>", None),
        ("no calls", None),
    ],
)
def test_a_form_that_is_not_read_is_not_taken_for_another(template: str, format_: object) -> None:
    assert find_format(template) is format_
