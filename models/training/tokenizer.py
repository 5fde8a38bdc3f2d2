"""The demo pair's tokenizer: a byte-level BPE of 4,096 entries with a chat template.

Trains, saves and loads it; the saved folder serves both `tokenizers.Tokenizer.from_file` and `AutoTokenizer`.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import jinja2
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|end|>"
SPECIAL_TOKENS = (END_OF_TEXT, "<|system|>", "<|user|>", "<|assistant|>", END_OF_TURN)
MAX_CONTEXT_TOKENS = 8192
# Tools and their calls have Hermes's format; a tool's answer is a user's turn, as in Qwen.
CHAT_TEMPLATE = (
    "{% if tools %}<|system|>"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}\n\n{% endif %}"
    "You may call one or more of these functions to answer the user:\n<tools>\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "</tools>\nFor each call write a JSON object with its name and arguments between these tags:\n"
    '<tool_call>\n{"name": <name>, "arguments": <arguments>}\n</tool_call><|end|>'
    "{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}"
    "<|user|><tool_response>\n{{ message['content'] }}\n</tool_response><|end|>"
    "{% elif not (tools and loop.first and message['role'] == 'system') %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    '\n<tool_call>\n{"name": {{ call["function"]["name"] | tojson }}, '
    '"arguments": {{ call["function"]["arguments"] | tojson }}}\n</tool_call>'
    "{% endfor %}<|end|>"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Runs of spaces stay with their line break, so one token is an indentation; at most three digits are one token.
SPLIT_PATTERN = r"\n[ ]*| ?[A-Za-z]+|\d{1,3}| ?[^\sA-Za-z\d]+|[^\S\n]+(?=\S)|\s+|[^\s]"


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Return a byte-level BPE learned from `texts`: any text round-trips, special tokens take the first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _byte_level_splitter()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _byte_level_splitter() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "model_max_length": MAX_CONTEXT_TOKENS,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer saved in `folder`."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def render_chat(messages: list[dict[str, str]], add_generation_prompt: bool = False) -> str:
    """Return the text of a chat under the tokenizer's template."""
    return str(jinja2.Template(CHAT_TEMPLATE).render(messages=messages, add_generation_prompt=add_generation_prompt))
