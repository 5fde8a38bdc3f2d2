"""Every chat template of the tests, by name: published models' templates, and structures of others."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from router.tokenizer.chat_prompt import ChatPrompt
from router.tokenizer.chat_template import ChatTemplate
from tests.router.tokenizer.template_structures import STRUCTURES

_FOLDER = Path(__file__).parents[1] / "generation" / "templates"
PUBLISHED = {file.stem: file.read_text(encoding="utf-8") for file in sorted(_FOLDER.glob("*.jinja"))}
TEMPLATES = {**PUBLISHED, **STRUCTURES}


@cache
def template(name: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[name], {"bos_token": "<s>", "eos_token": "</s>"})


@cache
def prompt(name: str) -> ChatPrompt:
    return ChatPrompt(template(name))
