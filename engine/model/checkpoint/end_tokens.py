"""Finds the tokens that end a text. Each file of a checkpoint may name only some, so all are read.

Sources: generation_config.json, config.json, the tokenizer, and the token that the chat template writes after an
assistant's answer. Engines and the checks before a start call this; frontends get the result from the engines.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

from tokenizers import Tokenizer

from protos.errors import ConfigError
from protos.token_bytes import shared_tokenizer

_RENDER_LIMIT_S = 5.0
_QUESTION, _ANSWER, _REPLY = "Which apples", "Crimson ones", "Thank you"  # texts that no template writes itself
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_PARTS = ("text_config", "llm_config", "language_config")


def find_end_tokens(
    folder: Path, vocab_size: int | None = None, assumed: object = None, template: str | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens that end a text of the model in `folder`, the usual one first.

    Also returns named ids that the model has no row for.

    Args:
        folder: the checkpoint's folder; missing files are skipped.
        vocab_size: rows of the model's embedding; None if unknown.
        assumed: ids of the model's family, used if no file names any.
        template: the chat template; None for the model's own.

    Raises:
        ConfigError: a file names something that is not an id, its generation_config.json cannot be read, or its chat
            template does not end.
    """
    tokenizer = _read_tokenizer(folder)
    ids = list(dict.fromkeys(_stated(folder, tokenizer, template))) or list(_ids_of(assumed, "the model's family"))
    known = tuple(each for each in ids if vocab_size is None or each < vocab_size)
    return known, tuple(each for each in ids if each not in known)


def _stated(folder: Path, tokenizer: Tokenizer | None, template: str | None) -> Iterator[int]:
    for name, content in (
        ("generation_config.json", read_generation_config(folder)),
        ("config.json", _read_json(folder / "config.json")),
    ):
        for part in (content, *(content.get(part) for part in _PARTS)):
            if isinstance(part, dict):
                yield from _ids_of(part.get("eos_token_id"), str(folder / name))
    if tokenizer is None:
        return
    special_tokens = dict(_special_tokens(_read_tokenizer_config(folder)))
    names = [special_tokens.get("eos_token")]
    if (template := template or read_template(folder)) is not None:
        names.append(_turn_end(template, special_tokens, tokenizer))
    for token in names:
        if token is not None and (token_id := tokenizer.token_to_id(token)) is not None:
            yield token_id


def _ids_of(value: object, source: str) -> Iterator[int]:
    for each in value if isinstance(value, list | tuple) else [] if value is None else [value]:
        if isinstance(each, bool) or not isinstance(each, int):
            raise ConfigError(f"{source} has eos_token_id {value!r}; it must be a token id or a list of token ids")
        if each >= 0:  # -1 means none
            yield each


def _turn_end(template: str, special_tokens: Mapping[str, str], tokenizer: Tokenizer) -> str | None:
    """Return the special token that ends an assistant's turn, in the last turn and in earlier ones.

    A token written in only one of the two begins the next turn or ends a whole conversation. A text that stops at such
    a token (gpt-oss's channels) may not be the whole answer.
    """
    turns = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
    render = partial(_rendered, template, special_tokens)
    last, inner = render(turns), render([*turns, {"role": "user", "content": _REPLY}])
    if last is None or inner is None or _ANSWER not in last or _ANSWER not in inner:
        return None
    follows = inner.rpartition(_ANSWER)[2].partition(_REPLY)[0]
    names = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    both = [name for name in _tokens_in(last.rpartition(_ANSWER)[2], names) if name in _tokens_in(follows, names)]
    return both[-1] if both else None


def _tokens_in(text: str, names: Iterable[str]) -> list[str]:
    """Return the tokens named `names` in a text, first to last."""
    return sorted((name for name in names if name and name in text), key=text.find)


def _rendered(
    template: str, special_tokens: Mapping[str, str], messages: list[dict[str, str]], *, is_open: bool = False
) -> str | None:
    """Render in a thread, so that an endless template cannot hang the caller; None if it refuses the messages.

    With `is_open` the text ends where an answer begins.
    """
    # Imported here: only models with a template need it, and the import takes seconds.
    from transformers.utils.chat_template_utils import render_jinja_template

    found: list[str] = []

    def render() -> None:
        try:
            texts: Any = render_jinja_template(
                [messages], chat_template=template, add_generation_prompt=is_open, **special_tokens
            )
        except Exception:  # a template may raise anything; the frontends report it
            return
        found.extend(texts[0])

    thread = Thread(target=render, name="chat-template", daemon=True)
    thread.start()
    thread.join(_RENDER_LIMIT_S)
    if thread.is_alive():
        raise ConfigError(f"the model's chat template ran for {_RENDER_LIMIT_S:g} s on two messages; fix its loops")
    return found[0] if found else None


def sample_chat(folder: Path, template: str | None = None) -> str | None:
    """Return a short chat as the template writes it, from the first token to the place of an answer.

    None without a template, and if the template refuses the chat. `template` replaces the model's own.
    """
    template = template or read_template(folder)
    if template is None:
        return None
    special_tokens = dict(_special_tokens(_read_tokenizer_config(folder)))
    return _rendered(template, special_tokens, [{"role": "user", "content": _QUESTION}], is_open=True)


def read_template(folder: Path) -> str | None:
    """Return the chat template of the model in `folder`, or None."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8", errors="replace")
    template = _read_json(folder / "chat_template.json").get("chat_template")
    template = template or _read_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = named.get("default") or next(iter(named.values()), None)
    return template if isinstance(template, str) else None


def _special_tokens(config: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            yield name, content


def _read_tokenizer(folder: Path) -> Tokenizer | None:
    file = folder / "tokenizer.json"
    try:
        return shared_tokenizer(file) if file.is_file() else None
    except Exception:  # the Rust library raises bare Exception; the frontends report it
        return None


def _read_tokenizer_config(folder: Path) -> dict[str, Any]:
    return _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Return the mapping in generation_config.json, empty without the file; transformers ignores an unreadable one.

    Raises:
        ConfigError: the file holds no mapping.
    """
    file = folder / "generation_config.json"
    content = _read_json(file)
    if not content and file.is_file() and b"".join(file.read_bytes().split()) != b"{}":
        raise ConfigError(
            f"{str(file)!r} holds no mapping in JSON, so its end tokens are unknown; mend it, or fetch it again"
        )
    return content


def _read_json(file: Path) -> dict[str, Any]:
    """Return the mapping in a file, or an empty one; unreadable files are refused by other checks."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def refuse_tokens_without_rows(folder: Path, vocab_size: int, template: str | None = None) -> str | None:
    """Return a warning about tokens that the model in `folder` has no row for, or None.

    Frontends refuse a text with such a token. `template` replaces the model's own chat template.

    Raises:
        ConfigError: the chat template writes such a token, so every chat would be refused.
    """
    rowless = {name: token_id for name, token_id in _tokens(folder).items() if token_id >= vocab_size}
    if not rowless:
        return None
    chat = sample_chat(folder, template) or ""
    written = {name: token_id for name, token_id in rowless.items() if name in chat}
    if written:
        raise ConfigError(
            f"the chat template of {str(folder)!r} writes {_named(written)}, but the model has {vocab_size} rows: "
            "every chat would be refused. Use the tokenizer that the weights were saved with, or resize the embeddings"
        )
    return f"the tokenizer has {_named(rowless)}, but the model has {vocab_size} rows: texts with them are refused"


def ids_without_token(folder: Path, vocab_size: int, end_ids: Iterable[int] = ()) -> list[int]:
    """Return the ids of rows without a token, mostly padding; empty without a tokenizer.

    The end tokens `end_ids` count as tokens: some tokenizers leave them out, and their text is never shown.
    """
    ids = set(_tokens(folder).values())
    if ids:
        ids.update(end_ids)
    return [token_id for token_id in range(vocab_size) if token_id not in ids] if ids else []


def _tokens(folder: Path) -> Mapping[str, int]:
    file = folder / "tokenizer.json"
    try:
        return shared_tokenizer(file).get_vocab(with_added_tokens=True) if file.is_file() else {}
    except Exception:  # the Rust library raises bare Exception; the frontends report it
        return {}


def _named(tokens: Mapping[str, int]) -> str:
    names = [f"{name!r} (id {token_id})" for name, token_id in sorted(tokens.items(), key=lambda each: each[1])]
    rest = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + rest
