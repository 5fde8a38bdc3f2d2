"""`python -m models.training.train_heads --kind eagle3`: train, measure and describe a head of the demo target.

`outrider tune` trains a head of any model further, on its traffic.
"""

import argparse
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from engine.model.checkpoint.dtype import resolve_dtype
from models.training.architecture import load_checkpoint
from models.training.card import DEMO_FOLDER, acceptance_table, read_json
from models.training.evaluate import Acceptance, held_out_prompts
from models.training.heads import (
    eagle3_logits,
    load_heads,
    measure_head,
    medusa_lesson,
    medusa_logits,
    save_heads,
    train_eagle3,
)
from models.training.tokenizer import load_tokenizer
from models.training.tokens import WindowStream, collect, encode, mixed_batches, tokenize_corpus, write_rollouts
from models.training.train_demo_pair import machine
from tuning.student import TrainableMedusaHeads
from tuning.train import Budget, TrainingReport, schedule

logger = logging.getLogger(__name__)

WINDOW_TOKENS = 256
WINDOWS_PER_STEP = 8
MEASURED_TOKENS = 128


def parse_arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=tuple(TRAINERS), required=True)
    parser.add_argument("--target", type=Path, default=DEMO_FOLDER / "target")
    parser.add_argument("--out", type=Path, help="the head's folder; by default next to the target")
    parser.add_argument("--minutes", type=float, default=4.0, help="of training, without rollouts and measuring")
    parser.add_argument("--rollouts", type=int, default=96, help="windows that the target writes for its head")
    parser.add_argument("--prompts", type=int, default=96, help="held-out prompts to measure with")
    # 3,072 cover 98.3% of the tokens of the library, among the 4,096 of the demo.
    parser.add_argument("--draft-vocab", type=int, default=3072, help="vocabulary size of an EAGLE-3 head")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


@dataclass(frozen=True, slots=True)
class Material:
    """Texts to learn from, and prompts to measure with."""

    next_texts: Callable[[], Tensor]  # token ids [B, T] of the next batch
    held_out: Tensor  # prompts [N, S] that are never trained on
    about: str  # both, in words for the card


def material(target: LlamaForCausalLM, arguments: argparse.Namespace) -> Material:
    """Alternate windows of the corpus with windows of the target's own text, as at serving time."""
    tokenizer, corpus = load_tokenizer(arguments.target), collect()
    stream = WindowStream(tokenize_corpus(tokenizer, corpus), arguments.seed)
    rollouts = write_rollouts(
        target, stream, arguments.rollouts, num_prompt_tokens=128, num_tokens=WINDOW_TOKENS, seed=arguments.seed
    )
    batches = mixed_batches(stream, rollouts, 2, WINDOWS_PER_STEP, WINDOW_TOKENS, arguments.seed)
    documents = [document.text for document in corpus.held_out if not document.is_test]
    return Material(
        lambda: next(batches)[:, :-1],
        held_out_prompts(encode(tokenizer, documents), arguments.prompts),
        "its training corpus, held-out files of it to measure with, and text that it wrote",
    )


def train(
    head: nn.Module, loss_of: Callable[[Tensor], Tensor], next_texts: Callable[[], Tensor], minutes: float
) -> str:
    """Step until the minutes are over; return the cost, in words."""
    optimizer = torch.optim.AdamW(head.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01)
    began, step, mean_loss = time.monotonic(), 0, 0.0
    while (progress := (time.monotonic() - began) / (60.0 * minutes)) < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * schedule(progress)
        loss = loss_of(next_texts())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        mean_loss += (loss.item() - mean_loss) / min(step, 20)
        if step % 20 == 0:
            logger.info("step=%d progress=%.2f loss=%.3f", step, progress, mean_loss)
    return (
        f"{step} steps of {WINDOWS_PER_STEP * WINDOW_TOKENS:,} tokens, {minutes:g} minutes, last loss {mean_loss:.3f}"
    )


def make_medusa(target: LlamaForCausalLM, arguments: argparse.Namespace, folder: Path) -> str:
    """Train and save a set of Medusa heads, and return its card."""
    teacher = load_checkpoint(arguments.target, resolve_dtype("auto", target.device)).requires_grad_(False)
    heads, texts = TrainableMedusaHeads(target.config.hidden_size), material(teacher, arguments)
    spent = train(heads, medusa_lesson(heads, teacher), texts.next_texts, arguments.minutes)
    save_heads(heads, target, folder)
    saved = load_heads(folder, target)
    measured = {
        f"{t:g}": measure_head(
            target, medusa_logits(saved, target), texts.held_out, t, MEASURED_TOKENS, saved.num_heads
        )
        for t in (0.0, 1.0)
    }
    about = (
        f"{saved.num_heads} heads of {saved.num_blocks} residual blocks each on the target's last hidden "
        f"state, {megabytes(folder):.1f} MB in bfloat16, in vLLM's format; all share the target's linear layer to the "
        "vocabulary."
    )
    return card(HeadCard("Medusa heads", "medusa", about, spent), arguments, folder, texts, measured)


def make_eagle3(target: LlamaForCausalLM, arguments: argparse.Namespace, folder: Path) -> str:
    """Train and save an EAGLE-3 head, and return its card."""
    budget = Budget(arguments.minutes, target.device, WINDOWS_PER_STEP * WINDOW_TOKENS, WINDOW_TOKENS)
    texts = material(target, arguments)
    report = train_eagle3(target, texts.next_texts, budget, folder, arguments.draft_vocab)
    return eagle3_card(target, arguments, folder, texts, report)


def eagle3_card(
    target: LlamaForCausalLM, arguments: argparse.Namespace, folder: Path, texts: Material, report: TrainingReport
) -> str:
    """Measure the head in `folder`, and a pair's draft on the same prompts, and describe the training."""
    head = eagle3_logits(folder, target)
    measured = {f"{t:g}": measure_head(target, head, texts.held_out, t, MEASURED_TOKENS) for t in (0.0, 1.0)}
    about = (
        f"One layer on the target's states of three layers (arXiv:2503.01840), {megabytes(folder):.1f} MB in bfloat16, "
        f"in the original format; it drafts the {arguments.draft_vocab:,} most frequent of the "
        f"{target.config.vocab_size:,} tokens."
    )
    spent = f"{report.num_steps} steps, {report.num_tokens:,} tokens in {report.seconds / 60:.0f} minutes"
    made = HeadCard("EAGLE-3 head", "eagle3", about, f"{spent}, last loss {report.last_loss:.3f}")
    text = card(made, arguments, folder, texts, measured)
    measurements = arguments.target.parent / "measurements.json"
    if not measurements.exists():
        return text
    draft = acceptance_table(read_json(measurements)["acceptance"])
    return f"{text}\n## The pair's own draft\n\nMeasured in the same way, on the same prompts:\n\n{draft}\n"


def megabytes(folder: Path) -> float:
    """Return the size of the head in `folder`."""
    return (folder / "model.safetensors").stat().st_size / 1e6


TRAINERS: dict[str, Callable[[LlamaForCausalLM, argparse.Namespace, Path], str]] = {
    "medusa": make_medusa,
    "eagle3": make_eagle3,
}


@dataclass(frozen=True, slots=True)
class HeadCard:
    """A head and its cost, in words."""

    title: str
    kind: str
    about: str
    spent: str


def card(
    made: HeadCard, arguments: argparse.Namespace, folder: Path, texts: Material, measured: dict[str, Acceptance]
) -> str:
    """Return a head's README: its kind, the acceptance of its drafts by position, its making."""
    table = acceptance_table({temperature: asdict(found) for temperature, found in measured.items()})
    num_prompts, num_prompt_tokens = texts.held_out.shape
    return f"""# {made.title} for {arguments.target}

{made.about}

`draft: {{kind: {made.kind}, path: {folder}}}` in deploy.yaml serves with it.

## Acceptance by position

The target continues {num_prompts} held-out prompts of {num_prompt_tokens} tokens by {MEASURED_TOKENS} tokens each. A
draft is accepted when it is the token that the target chose; temperature 1 is coupled. The chance at a position is
given that all before it were accepted. Greedy text of a small target falls into loops; the repetition measures them.

{table}

## How it was made

`python -m models.training.train_heads {" ".join(sys.argv[1:])}`: {made.spent}; {machine(torch.device("cpu"))}.
Distilled from the target's own distribution over {texts.about}. It must be trained again with the target.
"""


def main() -> None:
    """Train, measure and write."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    target = load_checkpoint(arguments.target).requires_grad_(False)
    folder = arguments.out or arguments.target.parent / arguments.kind
    text = TRAINERS[arguments.kind](target, arguments, folder)
    (folder / "README.md").write_text(text, encoding="utf-8")
    logger.info("wrote %s\n%s", folder, text)


if __name__ == "__main__":
    main()
