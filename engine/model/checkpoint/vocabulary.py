"""Compares a tokenizer with the rows of its model: ids without a token, and tokens without a row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from tokenizers import Tokenizer

from engine.model.checkpoint.end_tokens import sample_chat
from protos.errors import ConfigError

_MAX_NAMED = 5


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
        return Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True) if file.is_file() else {}
    except Exception:  # the Rust library raises bare Exception; the frontends report it
        return {}


def _named(tokens: Mapping[str, int]) -> str:
    names = [f"{name!r} (id {token_id})" for name, token_id in sorted(tokens.items(), key=lambda each: each[1])]
    rest = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + rest
