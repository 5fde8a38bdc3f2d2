"""Losses, acceptance and samples of a pair on held-out files, and the model card that they fill.

The draft's acceptance is measured on the target's own continuations. A position is accepted only if all earlier ones
are, so the draft always continues the target's own tokens. Therefore one teacher-forced pass over the finished text
gives every decision of every round.
"""

import itertools
import json
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

from models.training.architecture import (
    REPETITION_PENALTY,
    load_checkpoint,
    load_tokenizer,
    num_parameters,
    render_chat,
)
from models.training.tokens import Corpus, Document, encode, measuring_windows
from tuning.score import choose, generate, penalise

DEMO_FOLDER = Path(__file__).parents[1] / "demo"
TEMPLATE = Path(__file__).parent / "card.template.md"
SAMPLE_TOKENS = 96
SAMPLE_PROMPTS = (
    'def read_config(path):\n    """Read a configuration file and return a dictionary."""\n',
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "import os\nimport sys\n\ndef main():\n",
    "for i in range(",
)
SAMPLE_REQUEST = "Write a Python function `is_empty`. Return True if the queue is empty."


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance over all rounds.

    `by_position[j]` is the acceptance of draft token j, given acceptance of the earlier ones. `per_token` is plain
    agreement over all positions. `repetition` is the repeated fraction of the continuations.
    """

    num_rounds: int
    by_position: list[float]
    tokens_per_pass: float
    per_token: float
    repetition: float


@torch.no_grad()
def agreement(
    draft: LlamaForCausalLM,
    ids: Tensor,
    num_prompt_tokens: int,
    temperature: float,
    seed: int,
    repetition_penalty: float = 1.0,
) -> Tensor:
    """Mark where the draft chooses the target's token, [B, generated], along ids [B, S + generated]."""
    logits = draft(ids[:, :-1], use_cache=False).logits[:, num_prompt_tokens - 1 :].float()  # [B, generated, V]
    chosen = []
    for step, position in enumerate(range(num_prompt_tokens, ids.shape[1])):
        penalised = penalise(logits[:, step], ids[:, :position], repetition_penalty)
        chosen.append(choose(penalised, temperature, seed, position))
    return torch.stack(chosen, dim=1) == ids[:, num_prompt_tokens:]


def count_rounds(is_accepted: Tensor) -> list[int]:
    """Return the accepted tokens of each round of a decoder along `is_accepted` [rounds, K].

    Row i has the drafts of a round that begins at token i. A round that the end of the text cuts has no row.
    """
    runs: list[int] = is_accepted.long().cumprod(dim=1).sum(dim=1).tolist()
    accepted, cursor = [], 0
    while cursor < len(runs):
        accepted.append(runs[cursor])
        cursor += runs[cursor] + 1
    return accepted


def repetition(row: list[int]) -> float:
    """Return the share of repeated 8-grams of `row`: near 1 for a loop, near 0 for fresh text."""
    grams = [tuple(row[start : start + 8]) for start in range(len(row) - 7)]
    return 1.0 - len(set(grams)) / max(1, len(grams))


@torch.no_grad()
def text_agreement(target: LlamaForCausalLM, draft: LlamaForCausalLM, windows: Iterable[Tensor]) -> float:
    """Return how often both models' likeliest next token is the same along given text, windows of [1, T]."""
    num_equal, num_tokens = 0, 0
    for ids in windows:
        chosen = [model(ids, use_cache=False).logits.argmax(-1) for model in (target, draft)]  # two of [1, T]
        num_equal += int((chosen[0] == chosen[1]).sum())
        num_tokens += ids.numel()
    return num_equal / max(1, num_tokens)


def summarise(accepted: list[int], agrees: Tensor, written: Tensor, num_draft_tokens: int) -> Acceptance:
    """Return the figures of the rounds over the continuations `written` [B, generated], accepted where `agrees`."""
    reached = [sum(run >= position for run in accepted) for position in range(num_draft_tokens + 1)]
    return Acceptance(
        num_rounds=len(accepted),
        by_position=[reached[j + 1] / max(1, reached[j]) for j in range(num_draft_tokens)],
        tokens_per_pass=sum(accepted) / max(1, len(accepted)) + 1.0,
        per_token=agrees.float().mean().item(),
        repetition=sum(repetition(row) for row in written.tolist()) / len(written),
    )


def measure_acceptance(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    prompts: Tensor,
    temperature: float,
    num_tokens: int = 128,
    num_draft_tokens: int = 5,
    seed: int = 0,
    repetition_penalty: float = 1.0,
) -> Acceptance:
    """Acceptance over continuations of prompts [B, S] by `num_tokens` tokens each, with K = `num_draft_tokens`."""
    ids = generate(target, prompts, num_tokens, temperature, seed, repetition_penalty)
    agrees = agreement(draft, ids, prompts.shape[1], temperature, seed, repetition_penalty)
    accepted = [run for row in agrees for run in count_rounds(row.unfold(0, num_draft_tokens, 1))]
    return summarise(accepted, agrees, ids[:, prompts.shape[1] :], num_draft_tokens)


@torch.no_grad()
def mean_loss(model: LlamaForCausalLM, documents: list[np.ndarray]) -> float:
    """Mean cross entropy over whole documents, in windows of at most 1,024 tokens."""
    total, count = 0.0, 0
    for ids in measuring_windows(documents):
        logits = model(ids[:, :-1], use_cache=False).logits[0].float()  # [T, V]
        total += F.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
        count += ids.shape[1] - 1
    return total / max(1, count)


@torch.no_grad()
def loss_by_context(model: LlamaForCausalLM, documents: list[np.ndarray], borders: tuple[int, ...]) -> dict[str, float]:
    """Return the mean cross entropy at positions [a, b) of packed files, to show the cost of long contexts."""
    stream = np.concatenate(documents)
    num_windows = min(4, (len(stream) - 1) // borders[-1])
    losses = []
    for index in range(num_windows):
        ids = torch.from_numpy(stream[index * borders[-1] : (index + 1) * borders[-1] + 1])
        logits = model(ids[None, :-1], use_cache=False).logits[0].float()  # [T, V]
        losses.append(F.cross_entropy(logits, ids[1:], reduction="none"))
    by_position = torch.stack(losses).mean(0)  # [T]
    return {f"{a}-{b}": by_position[a:b].mean().item() for a, b in itertools.pairwise(borders)}


def held_out_prompts(documents: list[np.ndarray], num_prompts: int, seed: int = 0) -> Tensor:
    """Return prompts [B, S] from random places of the documents; a document's chance is proportional to its length."""
    rng = np.random.default_rng(seed)
    length = 128
    long_enough = [ids for ids in documents if len(ids) > length]
    weights = np.array([len(ids) for ids in long_enough], dtype=float)
    chosen = rng.choice(len(long_enough), size=num_prompts, p=weights / weights.sum())
    starts = [rng.integers(0, len(long_enough[index]) - length) for index in chosen]
    prompts = [long_enough[index][start:][:length] for index, start in zip(chosen, starts, strict=True)]
    return torch.from_numpy(np.stack(prompts))


def sample(model: LlamaForCausalLM, tokenizer: Tokenizer, prompt: str) -> dict[str, str]:
    """Return a text, and the target's greedy continuation under the shipped penalty, up to the end of text or turn."""
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    written = generate(model, ids, SAMPLE_TOKENS, 0.0, 0, REPETITION_PENALTY)[0, ids.shape[1] :].tolist()
    text = tokenizer.decode(written, skip_special_tokens=False)
    return {"prompt": prompt, "completion": text.split("<|end")[0]}


def measure(folder: Path, corpus: Corpus) -> dict[str, Any]:
    """Measure the pair in `folder` on the corpus's held-out files, and return the model card's figures.

    Losses are nats per token in float32.
    """
    tokenizer = load_tokenizer(folder / "target")
    target, draft = load_checkpoint(folder / "target"), load_checkpoint(folder / "draft")
    library = encode(tokenizer, _texts(corpus.held_out, is_test=False))
    tests = encode(tokenizer, _texts(corpus.held_out, is_test=True))
    prompts = held_out_prompts(library, num_prompts=96)
    chat = render_chat([{"role": "user", "content": SAMPLE_REQUEST}], add_generation_prompt=True)
    acceptance = {
        f"{temperature:g}, penalty {penalty:g}": measure_acceptance(
            target, draft, prompts, temperature, repetition_penalty=penalty
        )
        for temperature, penalty in itertools.product((0.0, 1.0), (REPETITION_PENALTY, 1.0))
    }
    return {
        "target_parameters": num_parameters(target),
        "draft_parameters": num_parameters(draft),
        "losses": {
            "target, library": mean_loss(target, library),
            "target, tests": mean_loss(target, tests),
            "draft, library": mean_loss(draft, library),
            "draft, tests": mean_loss(draft, tests),
        },
        "loss_by_context": loss_by_context(target, library, (0, 512, 1024, 2048, 4096, 8192)),
        "acceptance": {sampling: asdict(found) for sampling, found in acceptance.items()},
        "text_agreement": text_agreement(target, draft, measuring_windows(library)),
        "samples": [sample(target, tokenizer, prompt) for prompt in (*SAMPLE_PROMPTS, chat)],
        "num_held_out_files": len(corpus.held_out),
        "num_training_files": len(corpus.training),
        "num_prompts": len(prompts),
        "sample_tokens": SAMPLE_TOKENS,
        "python": platform.python_version(),
    }


def _texts(documents: list[Document], is_test: bool) -> list[str]:
    return [document.text for document in documents if document.is_test == is_test]


def save_measurements(measurements: dict[str, Any], folder: Path) -> None:
    """Write measurements.json into the pair's folder."""
    (folder / "measurements.json").write_text(json.dumps(measurements, indent=2) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object from a file."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def acceptance_table(acceptance: dict[str, dict[str, Any]]) -> str:
    """Return one row per way to sample: the chance at each position, tokens per pass, plain agreement."""
    num_positions = len(next(iter(acceptance.values()))["by_position"])
    columns = [
        "temperature",
        *(str(position + 1) for position in range(num_positions)),
        f"tokens per pass (K = {num_positions})",
        "plain agreement",
        "repetition",
        "rounds",
    ]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for sampling, measured in acceptance.items():
        chances = " | ".join(f"{chance:.3f}" for chance in measured["by_position"])
        quality = f"{measured['tokens_per_pass']:.2f} | {measured['per_token']:.3f} | {measured['repetition']:.2f}"
        lines.append(f"| {sampling} | {chances} | {quality} | {measured['num_rounds']} |")
    return "\n".join(lines)


def context_table(losses: dict[str, float]) -> str:
    """Return one column per range of positions."""
    header, values = " | ".join(losses), " | ".join(f"{loss:.3f}" for loss in losses.values())
    return f"| position | {header} |\n{'|---' * (len(losses) + 1)}|\n| loss | {values} |"


def sample_blocks(samples: list[dict[str, str]]) -> str:
    """Return each prompt and its completion as one fenced block, a rule between the two."""
    return "\n\n".join(f"````text\n{sample['prompt']}⟦{sample['completion']}⟧\n````" for sample in samples)


def half_fields(folder: Path, half: str) -> dict[str, Any]:
    """Return the template's fields that describe the target or the draft."""
    config, training = read_json(folder / half / "config.json"), read_json(folder / half / "training.json")
    return {
        f"{half}_layers": config["num_hidden_layers"],
        f"{half}_width": config["hidden_size"],
        f"{half}_heads": config["num_attention_heads"],
        f"{half}_kv_heads": config["num_key_value_heads"],
        f"{half}_megabytes": (folder / half / "model.safetensors").stat().st_size / 1e6,
        f"{half}_tokens": training["num_tokens"] / 1e6,
        f"{half}_steps": training["num_steps"],
        f"{half}_minutes": training["seconds"] / 60,
    }


def condition_line(folder: Path, half: str) -> str:
    """Return the command and the machine that made one half."""
    training = read_json(folder / half / "training.json")
    rate = training["num_tokens"] / training["seconds"]
    command = f"python -m models.training.train_demo_pair {training['arguments']}".strip()
    return f"- {half}: `{command}`, {training['machine']}, {rate:,.0f} tokens per second"


def render_card(folder: Path) -> str:
    """Return the model card of the pair in `folder`; needs training.json in both halves and measurements.json."""
    measured, training = read_json(folder / "measurements.json"), read_json(folder / "target" / "training.json")
    losses = measured["losses"]
    return TEMPLATE.read_text(encoding="utf-8").format(
        **half_fields(folder, "target"),
        **half_fields(folder, "draft"),
        target_parameters=measured["target_parameters"] / 1e6,
        draft_parameters=measured["draft_parameters"] / 1e6,
        target_loss=losses["target, library"],
        draft_loss=losses["draft, library"],
        target_test_loss=losses["target, tests"],
        draft_test_loss=losses["draft, tests"],
        num_prompts=measured["num_prompts"],
        text_agreement=measured["text_agreement"],
        acceptance=acceptance_table(measured["acceptance"]),
        penalty=REPETITION_PENALTY,
        contexts=context_table(measured["loss_by_context"]),
        num_training=measured["num_training_files"],
        num_held_out=measured["num_held_out_files"],
        python=measured["python"],
        long_window=training["long_window_tokens"],
        conditions="\n".join(condition_line(folder, half) for half in ("target", "draft")),
        sample_tokens=measured["sample_tokens"],
        samples=sample_blocks(measured["samples"]),
    )


def write_card(folder: Path) -> None:
    """Write README.md into the pair's folder."""
    (folder / "README.md").write_text(render_card(folder), encoding="utf-8")
