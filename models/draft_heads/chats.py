"""Chats to train a head on: prompts from a file or made here, and the target's own answers from our engine.

This module is independent of heads. It works with every model that Outrider serves and that has a chat template.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.config import CacheConfig, EngineConfig, ModelConfig
from engine.engine_core.loading import load_engine
from models.training.tokens import RolloutPool
from protos.errors import ConfigError
from protos.messages import GenerateRequest, SamplingParams
from router.tokenizer.tokenizer_files import load_tokenizer_files

HELD_OUT_EVERY = 16  # one of so many chats is held out for measurement
TEMPERATURES = (0.0, 0.7)  # used in turn for the answers
MEASURED_PROMPT_TOKENS = 64  # of a held-out chat; the target continues them
_FORMS = (
    "Explain {} to a child.",
    "Explain {} in a few sentences.",
    "What are the benefits of {}?",
    "What are common mistakes with {}?",
    "Give me five tips about {}.",
    "Write a short story about {}.",
    "Write a poem about {}.",
    "Write an email to a colleague about {}.",
    "Write a blog post about {}.",
    "Summarize the history of {}.",
    "Compare {} with its alternatives.",
    "Write a Python function that has to do with {}.",
    "How do I begin with {}?",
    "Why does {} matter today?",
    "List the main parts of {}.",
    "Describe a day in the life of an expert in {}.",
)
_TOPICS = (
    "gardening",
    "photosynthesis",
    "black holes",
    "the Roman Empire",
    "public transport",
    "cooking pasta",
    "machine learning",
    "sorting algorithms",
    "healthy sleep",
    "saving money",
    "electric cars",
    "chess",
    "learning a language",
    "the human heart",
    "volcanoes",
    "recycling",
    "classical music",
    "job interviews",
    "time management",
    "dogs",
    "the Renaissance",
    "databases",
    "hash tables",
    "remote work",
    "coffee",
    "vaccines",
    "solar power",
    "football",
    "the ocean",
    "poetry",
    "taxes",
    "friendship",
    "earthquakes",
    "prime numbers",
    "photography",
    "bread",
    "camping",
    "the French Revolution",
    "dinosaurs",
    "meditation",
    "online shopping",
    "painting",
    "bicycles",
    "unit testing",
    "climate",
    "genetics",
    "negotiation",
    "the moon",
    "bees",
    "philosophy",
)


def made_prompts(seed: int) -> list[str]:
    """Return every form with every topic, in a random order."""
    prompts = [form.format(topic) for form, topic in itertools.product(_FORMS, _TOPICS)]
    random.Random(seed).shuffle(prompts)
    return prompts


def read_prompts(file: Path) -> list[str]:
    """Return the prompts of a file: one per line, or JSON lines with `prompt` or `turns` (the first turn).

    Raises:
        ConfigError: the file has no prompt, or a line of JSON has neither key.
    """
    lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise ConfigError(f"{file} has no prompts; give one per line")
    return [_prompt_of(line, file) for line in lines]


def _prompt_of(line: str, file: Path) -> str:
    if not line.startswith("{"):
        return line
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"prompts of {file}: {line[:60]!r} is not JSON: {error}") from error
    prompt = fields.get("prompt") or next(iter(fields.get("turns") or ()), None)
    if not isinstance(prompt, str):
        raise ConfigError(f"prompts of {file}: {line[:60]!r} has neither `prompt` nor `turns`")
    return prompt


@dataclass(frozen=True, slots=True)
class Chats:
    """Token ids of chats, prompts and answers together, in the order of their prompts."""

    texts: list[list[int]]

    def windows(self, num_tokens: int, seed: int) -> RolloutPool:
        """Return windows [N, num_tokens + 1] of the concatenated training chats."""
        kept = [text for index, text in enumerate(self.texts) if index % HELD_OUT_EVERY]
        stream = torch.tensor(list(itertools.chain.from_iterable(kept)))
        num_windows = len(stream) // (num_tokens + 1)
        if num_windows == 0:
            raise ConfigError(f"{len(kept)} chats have {len(stream)} tokens, less than a window; ask for more --chats")
        return RolloutPool(stream[: num_windows * (num_tokens + 1)].view(num_windows, -1), seed)

    def held_out(self, num_prompts: int) -> Tensor:
        """Beginnings of held-out chats, [up to `num_prompts`, MEASURED_PROMPT_TOKENS]."""
        texts = [text for text in self.texts[::HELD_OUT_EVERY] if len(text) > MEASURED_PROMPT_TOKENS]
        if not texts:
            raise ConfigError(f"no held-out chat has more than {MEASURED_PROMPT_TOKENS} tokens; ask for more --chats")
        return torch.tensor([text[:MEASURED_PROMPT_TOKENS] for text in texts[:num_prompts]])


def answered(folder: Path, prompts: Sequence[str], max_tokens: int, seed: int) -> Chats:
    """Let the model in `folder` answer each prompt with at most `max_tokens` tokens.

    Raises:
        ConfigError: the model has no chat template.
    """
    files = load_tokenizer_files(str(folder))
    if files.chat_template is None:
        raise ConfigError(f"{folder} has no chat template; choose a chat model")
    rendered = [files.chat_template.render([{"role": "user", "content": prompt}]) for prompt in prompts]
    texts = {str(index): files.tokenizer.encode(text, add_special_tokens=False) for index, text in enumerate(rendered)}
    # For all answers that run at once.
    core = load_engine(EngineConfig(ModelConfig(str(folder)), CacheConfig(memory_bytes=1 << 30)))
    for index, (name, ids) in enumerate(texts.items()):
        temperature = TEMPERATURES[index % len(TEMPERATURES)]
        sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed + index)
        core.add(GenerateRequest(name, tuple(ids), sampling))
    while core.has_work:
        for chunk in core.step():
            texts[chunk.request_id].extend(chunk.token_ids)
    core.close()
    return Chats(list(texts.values()))
