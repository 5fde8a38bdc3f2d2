"""Tokenizer, chat template and special tokens of a model, read from a local folder or the Hub."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from huggingface_hub import snapshot_download

from protos.errors import ConfigError
from protos.served_model import digest
from protos.token_bytes import shared_tokenizer
from router.tokenizer import TokenIdsOnly, Tokenizer
from router.tokenizer.chat_template import ChatTemplate

logger = logging.getLogger(__name__)

_HUB_PATTERNS = ["tokenizer*", "vocab.*", "merges.txt", "chat_template*", "special_tokens_map.json"]
_UNCONVERTED = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tokenizer.tiktoken")
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """Everything that the frontends read from a checkpoint; `chat_template` is None where the model has none.

    `response_template` describes the model's answers, for transformers' `ResponseParser`; few tokenizers have one.
    """

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None = None
    digest: str = ""  # of both
    tokenizer_digest: str = ""  # SHA-256 of the tokenizer alone
    response_template: Mapping[str, object] | None = None


def load_tokenizer_files(path: str, chat_template: str | None = None) -> TokenizerFiles:
    """Read the tokenizer of the model at `path`, a local folder or a Hub id.

    The text `chat_template`, if it is given, takes the place of the model's own template.

    Raises:
        ConfigError: the folder holds a tokenizer that was never converted to tokenizer.json, a file cannot be read or
            its content contradicts its name, or the Hub id cannot be fetched.
    """
    folder = _folder(path)
    config = _read_json(folder / "tokenizer_config.json")
    special_tokens = _read_special_tokens(folder, config)
    template = chat_template or _read_template(folder, config)
    text, specials = _text(folder / "tokenizer.json"), repr(sorted(special_tokens.items()))
    return TokenizerFiles(
        tokenizer=_load_tokenizer(folder),
        chat_template=ChatTemplate(template, special_tokens) if template else None,
        digest=digest(text, template or "", specials),
        tokenizer_digest=sha256(f"{text}\0{specials}".encode(errors="surrogatepass")).hexdigest(),
        response_template=answers if isinstance(answers := config.get("response_template"), dict) else None,
    )


def load_chat_template(folder: Path) -> ChatTemplate | None:
    """Read the chat template of the model in a folder; None where it has none. Raises ConfigError."""
    config = _read_json(folder / "tokenizer_config.json")
    template = _read_template(folder, config)
    return ChatTemplate(template, _read_special_tokens(folder, config)) if template else None


def _read_special_tokens(folder: Path, config: dict[str, object]) -> dict[str, str]:
    return _special_tokens(_read_json(folder / "special_tokens_map.json") | config)


def _folder(path: str) -> Path:
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(path, allow_patterns=_HUB_PATTERNS))
    except (OSError, ValueError) as error:  # the Hub client's errors are children of these two
        raise ConfigError(
            f"model path {path!r} is neither a local folder nor a Hub id that can be fetched: {error}"
        ) from error


def _load_tokenizer(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if _is_there(file):
        try:
            core = shared_tokenizer(file)
        except Exception as error:  # the Rust library raises bare Exception
            raise ConfigError(f"{file} cannot be read as a tokenizer: {error}; fetch it again") from error
        core.no_truncation()
        core.no_padding()
        return Tokenizer(core)
    if old := [name for name in _UNCONVERTED if (folder / name).exists()]:
        raise ConfigError(
            f"{folder} holds {old[0]} but no tokenizer.json; convert it once with "
            "transformers' AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    logger.warning("%s has no tokenizer.json: prompts must be token ids, and answers hold no text", folder)
    return TokenIdsOnly()


def _read_template(folder: Path, config: dict[str, object]) -> str | None:
    """Return the model's chat template: its own file in newer checkpoints, or an entry of tokenizer_config.json."""
    text = _read_text(folder / "chat_template.jinja")
    if text is not None:
        return text
    template = _read_json(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(template, list) and template:
        return _default_template(template, folder)
    return template if isinstance(template, str) else None


def _default_template(entries: list[object], folder: Path) -> str:
    """Return the template named "default" of several, or else the first."""
    named = {}
    for entry in entries:
        match entry:
            case {"name": str(name), "template": str(template)}:
                named[name] = template
    if not named:
        raise ConfigError(
            f"chat_template in {str(folder)!r} is a list, and none of its entries has the texts 'name' and 'template'; "
            "mend it, or remove it from tokenizer_config.json or chat_template.json"
        )
    return named.get("default") or next(iter(named.values()))


def _special_tokens(config: dict[str, object]) -> dict[str, str]:
    tokens = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        if isinstance(value, dict):  # an AddedToken written out
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="surrogateescape") if file.is_file() else ""


def _is_there(file: Path) -> bool:
    """Return whether there is such a file; raise ConfigError for a folder of its name, or a link that leads nowhere."""
    if os.path.lexists(file) and not os.path.isfile(file):
        raise ConfigError(f"{str(file)!r} is no file, but a folder or a link to none; fetch it again, or remove it")
    return os.path.isfile(file)


def _read_text(file: Path) -> str | None:
    """Return the text of a file; None if it does not exist."""
    try:
        return file.read_text(encoding="utf-8") if _is_there(file) else None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{str(file)!r} cannot be read: {error}; make it readable UTF-8, or fetch it again"
        ) from error


def _read_json(file: Path) -> dict[str, object]:
    """Return the mapping in a file, an empty one where there is no file."""
    text = _read_text(file)
    try:
        content = {} if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{str(file)!r} is not valid JSON: {error}; mend it, or fetch it again") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{str(file)!r} holds no mapping in JSON; mend it, or fetch it again")
    return content
