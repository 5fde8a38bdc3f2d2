"""A chat as the text that the model was trained on, by the Jinja template that comes with its tokenizer.

Templates come from model repositories, so they run in Jinja's immutable sandbox, with the functions that the
transformers library documents for template authors: `raise_exception`, `strftime_now`, a `tojson` that leaves HTML
alone, `break` and `continue`, and `{% generation %}` blocks, which only matter for training; their content is
rendered.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from protos.errors import ConfigError, RequestError

ChatMessage = Mapping[str, object]
_RENDER_LIMIT_S = 5.0  # of processor time; 1,000 messages take some milliseconds
_TICK = "_outrider_tick"
_END = "\ue0f0end\ue0f0"  # marks the end of the content that is continued; no text or template has it
_REFUSAL = "The model's chat template refuses these messages"
# A macro that calls itself for ever ends in a RecursionError, `"x" * 10**12` in a MemoryError.
_FAILURES = (
    TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
    MemoryError,
)


class TemplateTimeError(RequestError):
    """The template works too long on these messages."""


class ChatTemplate:
    """One model's template, compiled once.

    Raises:
        ConfigError: the template is not valid Jinja, or nested too deeply.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        try:
            self._template = _environment().from_string(source)
        except TemplateSyntaxError as error:
            raise ConfigError(f"the model's chat template is not valid Jinja, line {error.lineno}: {error}") from error
        except (*_FAILURES, SyntaxError) as error:  # Jinja writes Python, which has limits and rules of its own
            raise ConfigError(
                f"the model's chat template cannot be compiled: {error}; mend it, or give another as "
                "ingress.chat_template"
            ) from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, object] | None = None,
        limit_s: float | None = None,
    ) -> str:
        """Return the prompt for `messages`, ready for encoding without further special tokens.

        Args:
            messages: role and content of each, and what else the template reads of it.
            add_generation_prompt: whether the text ends where the assistant's answer begins.
            continue_final_message: the text ends with the last message's content, for the model to go on with it.
            variables: further names that the template may read, as `chat_template_kwargs` of a request.
            limit_s: processor time that it may take; defaults to some seconds.

        Raises:
            RequestError: the template refuses these messages (for example, roles out of order), or fails on them.
            TemplateTimeError: it takes too long.
        """
        shown = messages
        if continue_final_message:
            shown = [*messages[:-1], {**messages[-1], "content": _marked(messages[-1].get("content"))}]
        names = {
            "tools": None,
            "documents": None,
            **self._special_tokens,
            **(variables or {}),
            _TICK: _deadline(_RENDER_LIMIT_S if limit_s is None else limit_s),
            "messages": [dict(message) for message in shown],
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        try:
            text = self._template.render(names)
        except _FAILURES as error:
            raise RequestError(f"{_REFUSAL}: {error}", param="messages") from error
        return _cut_after(text, messages[-1].get("content")) if continue_final_message else text


def _deadline(limit_s: float) -> Callable[[], None]:
    """Return a function that fails once this thread has worked for `limit_s` since now."""
    end_s = time.thread_time() + limit_s

    def tick() -> None:
        if time.thread_time() > end_s:
            raise TemplateTimeError(
                f"{_REFUSAL}: it has worked for {limit_s:g} s of processor time; send less, or mend its loops",
                param="messages",
            )

    return tick


def _marked(content: object) -> object:
    """Return a content with a mark at its end; a tab after it shows if the template strips white space."""
    if isinstance(content, list):
        return [*content[:-1], {**content[-1], "text": f"{content[-1]['text']}{_END}\t"}]
    return f"{content or ''}{_END}\t"


def _cut_after(text: str, content: object) -> str:
    """Return the prompt up to the end of the last message's content; a template may have stripped its white space."""
    parts = content if isinstance(content, list) else [{"text": content or ""}]
    final = "".join(str(part["text"]) for part in parts).strip()
    before, _, after = text.rpartition(_END)
    if not final or not before.rstrip().endswith(final):
        raise RequestError(
            "continue_final_message needs a last message whose content the model's chat template shows as it is.",
            param="continue_final_message",
        )
    return before if after.startswith("\t") else before.rstrip()


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a look at the clock in each turn of a loop and each call of a macro."""

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        turns: list[nodes.For | nodes.Macro] = [*tree.find_all(nodes.For), *tree.find_all(nodes.Macro)]
        for turn in turns:
            call = nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None)
            turn.body.insert(0, nodes.ExprStmt(call).set_lineno(turn.lineno))
        return tree


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlocks(Extension):
    """`{% generation %} ... {% endgeneration %}` renders its content."""

    tags = {"generation"}  # noqa: RUF012 -- Jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
