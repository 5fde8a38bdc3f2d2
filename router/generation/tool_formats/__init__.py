"""The forms of tool calls that models write: detection in the chat template, grammars, and translation to JSON."""

from __future__ import annotations

import re

from router.generation.tool_formats.named_format import FUNCTION_GEMMA, GEMMA, LFM2, OLMO, PYTHONIC
from router.generation.tool_formats.tagged_format import DSML, DSML_V32, GLM, MINIMAX, QWEN_XML, SEED
from router.generation.tool_formats.tool_format import DEEPSEEK, DEEPSEEK_V3, HERMES, KIMI, LLAMA, MISTRAL, ToolFormat
from router.generation.tool_formats.whole_format import COHERE, GRANITE, HARMONY, MISTRAL_LIST, NEMOTRON, TOOL_CALLS

_LLAMAS_CALL = re.compile(r'\{"name": [^"{}+]{1,40}, "parameters": ')  # as its instructions show it
# Each form with texts that its templates all contain, the more special ones first. None marks forms that are not
# parsed here: their calls would be returned as text.
_SIGNS: tuple[tuple[ToolFormat | None, tuple[str | re.Pattern[str], ...]], ...] = (
    (MISTRAL, ("[TOOL_CALLS]", "[ARGS]")),
    (MISTRAL_LIST, ("[TOOL_CALLS]",)),
    (DEEPSEEK_V3, ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json")),
    (DEEPSEEK, ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>")),
    (KIMI, ("<|tool_call_begin|>", "<|tool_call_argument_begin|>")),
    (SEED, ("<seed:tool_call>", "<function=", "<parameter=")),
    (QWEN_XML, ("<tool_call>", "<function=", "<parameter=")),
    (None, ("<function=",)),
    (GLM, ("<tool_call>", "<arg_key>", "<arg_value>")),
    (MINIMAX, ("<minimax:tool_call>", '<invoke name="', '<parameter name="')),
    (GEMMA, ("<|tool_call>", "<tool_call|>")),
    (FUNCTION_GEMMA, ("<start_function_call>",)),
    (LFM2, ("<|tool_call_start|>",)),
    (LFM2, ("<|tool_list_start|>",)),
    (OLMO, ("<function_calls>",)),
    (HARMONY, ("<|channel|>", "<|message|>", "functions.")),
    (DSML, ("｜DSML｜", "tool_calls>")),
    (DSML_V32, ("｜DSML｜", "function_calls>")),
    (COHERE, ("<|START_ACTION|>", '"tool_name"')),
    (NEMOTRON, ("<TOOLCALL>",)),
    (TOOL_CALLS, ("<tool_calls>", '"arguments"')),
    (GRANITE, ("<|tool_call|>", "JSON list")),
    (None, ("<|channel|>",)),
    (None, ("<arg_key>",)),
    (None, ("<invoke",)),
    (None, ("｜DSML｜",)),
    (None, ("tool_calls_begin",)),
    (None, ("tool▁calls▁begin",)),
    (None, ("tool_calls_section_begin",)),
    (None, ("<|START_ACTION|>",)),
    (HERMES, ("<tool_call>",)),
    (PYTHONIC, ("func_name1(",)),
    (LLAMA, (_LLAMAS_CALL,)),
)
FORMATS = {format_.name: format_ for format_, _ in _SIGNS if format_ is not None}
PROMPTED = "prompted"  # HERMES, described in the system message if the template has no tools


def find_format(template: str, wanted: str = "auto") -> ToolFormat | None:
    """Return the `wanted` format, or the one found in a chat template; None if no format matches."""
    if "tools" not in template:
        return HERMES if wanted == PROMPTED else None
    if wanted not in ("auto", PROMPTED):
        return FORMATS[wanted]
    return next((format_ for format_, signs in _SIGNS if all(_is_in(template, sign) for sign in signs)), None)


def _is_in(template: str, sign: str | re.Pattern[str]) -> bool:
    return sign in template if isinstance(sign, str) else sign.search(template) is not None
