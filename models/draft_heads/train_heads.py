"""`python -m models.draft_heads.train_heads --kind eagle3`: train, measure and describe a head for the demo target."""

import argparse
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from models.demo_pair.acceptance import Acceptance
from models.demo_pair.card import DEMO_FOLDER, acceptance_table, read_json
from models.demo_pair.evaluate import NUM_PROMPTS, held_out_prompts
from models.demo_pair.train_demo_pair import machine
from models.draft_heads.eagle3_head import DRAFT_VOCAB_SIZE, eagle3_logits, train_eagle3
from models.draft_heads.head_acceptance import measure_head
from models.draft_heads.medusa_heads import MedusaHeads, MedusaLesson, load_heads, measure_heads, save_heads
from models.training.checkpoint import load_checkpoint
from models.training.corpus import collect
from models.training.optimizer import schedule
from models.training.rollout import mixed_sources, write_rollouts
from models.training.tokenizer import load_tokenizer
from models.training.tokens import WindowStream, encode, tokenize_corpus
from models.training.train import Budget, TrainingReport

logger = logging.getLogger(__name__)

WINDOW_TOKENS = 256
WINDOWS_PER_STEP = 8
ROLLOUT_PROMPT_TOKENS = 128
ROLLOUT_EVERY_BATCHES = 2
MEASURED_TOKENS = 128
LOG_EVERY_STEPS = 20


def parse_arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=tuple(TRAINERS), required=True)
    parser.add_argument("--target", type=Path, default=DEMO_FOLDER / "target")
    parser.add_argument("--out", type=Path, help="the head's folder; beside the target if left out")
    parser.add_argument("--minutes", type=float, default=4.0, help="of training; rollouts and measuring come on top")
    parser.add_argument("--rollouts", type=int, default=96, help="windows that the target writes for its head")
    parser.add_argument("--prompts", type=int, default=NUM_PROMPTS, help="held-out prompts to measure with")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


class Batches:
    """Windows of the corpus, and every second time of text that the target wrote, as at serving time."""

    def __init__(self, target: LlamaForCausalLM, arguments: argparse.Namespace) -> None:
        tokenizer = load_tokenizer(arguments.target)
        self._stream = WindowStream(tokenize_corpus(tokenizer, collect()), arguments.seed)
        rollouts = write_rollouts(
            target, self._stream, arguments.rollouts, ROLLOUT_PROMPT_TOKENS, WINDOW_TOKENS, arguments.seed
        )
        self._sources = mixed_sources(self._stream, rollouts, ROLLOUT_EVERY_BATCHES)

    def next(self) -> Tensor:
        """Token ids [B, T]."""
        return next(self._sources).windows(WINDOWS_PER_STEP, WINDOW_TOKENS)[:, :-1]


def train(head: nn.Module, loss_of: Callable[[Tensor], Tensor], batches: Batches, minutes: float) -> str:
    """Step until the minutes are over; return the cost, in words."""
    optimizer = torch.optim.AdamW(head.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01)
    began, step, mean_loss = time.monotonic(), 0, 0.0
    while (progress := (time.monotonic() - began) / (60.0 * minutes)) < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * schedule(progress)
        loss = loss_of(batches.next())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        mean_loss += (loss.item() - mean_loss) / min(step, LOG_EVERY_STEPS)
        if step % LOG_EVERY_STEPS == 0:
            logger.info("step=%d progress=%.2f loss=%.3f", step, progress, mean_loss)
    return (
        f"{step} steps of {WINDOWS_PER_STEP * WINDOW_TOKENS:,} tokens, {minutes:g} minutes, last loss {mean_loss:.3f}"
    )


def held_out(arguments: argparse.Namespace) -> Tensor:
    """Return the prompts with which the pair itself is measured."""
    documents = [document.text for document in collect().held_out if not document.is_test]
    return held_out_prompts(encode(load_tokenizer(arguments.target), documents), arguments.prompts)


def make_medusa(target: LlamaForCausalLM, arguments: argparse.Namespace, folder: Path) -> str:
    """Train and save a set of Medusa heads, and return its card."""
    teacher = load_checkpoint(arguments.target, torch.bfloat16).requires_grad_(False)
    heads = MedusaHeads(target.config.hidden_size)
    spent = train(heads, MedusaLesson(heads, teacher), Batches(teacher, arguments), arguments.minutes)
    save_heads(heads, target, folder)
    saved, prompts = load_heads(folder, target), held_out(arguments)
    measured = {f"{t:g}": measure_heads(target, saved, prompts, t, MEASURED_TOKENS) for t in (0.0, 1.0)}
    size = (folder / "model.safetensors").stat().st_size / 1e6
    about = (
        f"{saved.num_heads} heads of {saved.num_blocks} residual blocks each on the target's last hidden "
        f"state, {size:.1f} MB in bfloat16, in vLLM's format; all share the target's linear layer to the vocabulary."
    )
    return card("Medusa heads", "medusa", about, measured, spent, len(prompts))


def make_eagle3(target: LlamaForCausalLM, arguments: argparse.Namespace, folder: Path) -> str:
    """Train and save an EAGLE-3 head, and return its card, with the pair's draft to compare."""
    budget = Budget(arguments.minutes, target.device, WINDOWS_PER_STEP * WINDOW_TOKENS, WINDOW_TOKENS)
    report = train_eagle3(target, Batches(target, arguments).next, budget, folder)
    return eagle3_card(target, arguments, folder, report)


def eagle3_card(target: LlamaForCausalLM, arguments: argparse.Namespace, folder: Path, report: TrainingReport) -> str:
    """Measure the head in `folder` and describe its making."""
    head, prompts = eagle3_logits(folder, target), held_out(arguments)
    measured = {f"{t:g}": measure_head(target, head, prompts, t, MEASURED_TOKENS) for t in (0.0, 1.0)}
    size = (folder / "model.safetensors").stat().st_size / 1e6
    about = (
        f"One layer on the target's states of three layers (arXiv:2503.01840), {size:.1f} MB in bfloat16, in the "
        f"original format; it drafts the {DRAFT_VOCAB_SIZE:,} most frequent of the {target.config.vocab_size:,} tokens."
    )
    spent = f"{report.num_steps} steps, {report.num_tokens:,} tokens in {report.seconds / 60:.0f} minutes"
    text = card("EAGLE-3 head", "eagle3", about, measured, f"{spent}, last loss {report.last_loss:.3f}", len(prompts))
    draft = acceptance_table(read_json(arguments.target.parent / "measurements.json")["acceptance"])
    return f"{text}\n## The pair's own draft\n\nMeasured in the same way, on the same prompts:\n\n{draft}\n"


TRAINERS: dict[str, Callable[[LlamaForCausalLM, argparse.Namespace, Path], str]] = {
    "medusa": make_medusa,
    "eagle3": make_eagle3,
}


def card(title: str, kind: str, about: str, measured: dict[str, Acceptance], spent: str, num_prompts: int) -> str:
    """Return a head's README: its kind, the acceptance of its drafts by position, its making."""
    num_drafts = len(next(iter(measured.values())).by_position)
    columns = ["temperature", *map(str, range(1, num_drafts + 1)), "tokens per pass", "repetition", "rounds"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for temperature, found in measured.items():
        chances = " | ".join(f"{chance:.3f}" for chance in found.by_position)
        rest = f"{found.tokens_per_pass:.2f} | {found.repetition:.2f} | {found.num_rounds}"
        lines.append(f"| {temperature} | {chances} | {rest} |")
    table = "\n".join(lines)
    return f"""# {title} for the demo target

{about}

`draft: {{kind: {kind}, path: models/demo/{kind}}}` in deploy.yaml serves with it.

## Acceptance by position

The target continues {num_prompts} prompts of 128 tokens from held-out library files by {MEASURED_TOKENS} tokens each.
A draft is accepted when it is the token that the target chose; temperature 1 is coupled. The chance at a position is
given that all before it were accepted. Greedy text of so small a target falls into loops, as its repetition says.

{table}

## How it was made

`python -m models.draft_heads.train_heads {" ".join(sys.argv[1:])}`: {spent}; {machine(torch.device("cpu"))}.
Distilled from the target's own distribution over its training corpus and over text that it wrote.
It must be trained again with the target.
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
