"""`python -m models.training.train_demo_pair`: tokenizer, target, draft, measurements, model card, in that order."""

import argparse
import copy
import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from models.training.architecture import (
    REPETITION_PENALTY,
    compile_layers,
    draft_config,
    hidden_states,
    load_checkpoint,
    load_tokenizer,
    new_model,
    save_checkpoint,
    save_tokenizer,
    target_config,
    train_tokenizer,
)
from models.training.evaluate import DEMO_FOLDER, measure, read_json, save_measurements, write_card
from models.training.tokens import (
    Corpus,
    WindowStream,
    collect,
    mixed_batches,
    plain_positions,
    skipped_positions,
    tokenize_corpus,
    write_rollouts,
)
from tuning.run import distillation_loss, next_token_loss
from tuning.train import Budget, PairedOptimizer, autocast, train

CPU_MINUTES = (50.0, 14.0)
CUDA_MINUTES = (20.0, 8.0)


def draft_lesson(
    model: LlamaForCausalLM,
    target: LlamaForCausalLM,
    stream: WindowStream,
    rollouts: Tensor,
    budget: Budget,
    seed: int,
) -> Callable[[float], Tensor]:
    """Return the steps of distillation: a batch, the target's logits for it, and the draft's loss."""
    num_tokens = budget.short_window_tokens
    num_windows = budget.tokens_per_step // num_tokens
    batches = mixed_batches(stream, rollouts, 4, num_windows, num_tokens, seed)
    loss = torch.compile(distillation_loss, dynamic=False)

    def step(progress: float) -> Tensor:
        """Return the loss of the next batch; it does not depend on `progress`."""
        positions = plain_positions(num_windows, num_tokens).to(budget.device)
        ids = next(batches)[:, :-1].to(budget.device)  # [B, T]
        with autocast(budget.device):
            with torch.no_grad():
                target_logits = F.linear(hidden_states(target, ids, positions), target.lm_head.weight)
            hidden = hidden_states(model, ids, positions)
            return loss(hidden, model.lm_head.weight, target_logits, 1.0)

    return step


def distil_draft(
    target: LlamaForCausalLM,
    stream: WindowStream,
    rollouts: Tensor,
    budget: Budget,
    folder: Path,
    seed: int,
    is_resumed: bool,
) -> dict[str, float]:
    """Distil a draft into `folder`: a new one, or the existing one further.

    The target's layers are compiled; its weights do not change.
    """
    model = (
        load_checkpoint(folder, device=budget.device) if is_resumed else new_model(draft_config(), seed, budget.device)
    )
    model.train()
    compile_layers(model)
    compile_layers(target)
    optimizer = PairedOptimizer.of_llama(model, matrix_lr=0.02, embedding_lr=0.004)
    return train(
        model,
        optimizer,
        draft_lesson(model, target, stream, rollouts, budget, seed),
        budget,
        lambda: save_checkpoint(model, folder),
    )


def target_lesson(
    model: LlamaForCausalLM, stream: WindowStream, budget: Budget, seed: int
) -> Callable[[float], Tensor]:
    """Return the steps of training: a batch and its loss."""
    generator = torch.Generator().manual_seed(seed)
    loss = torch.compile(next_token_loss, dynamic=False)

    def step(progress: float) -> Tensor:
        """Return the loss of the next batch at `progress` in [0, 1]."""
        is_long = progress >= 0.75
        num_tokens = budget.long_window_tokens if is_long else budget.short_window_tokens
        num_windows = budget.tokens_per_step // num_tokens
        ids = stream.windows(num_windows, num_tokens).to(budget.device)  # [B, T + 1]
        positions = plain_positions(num_windows, num_tokens)
        if is_long:
            positions = skipped_positions(num_windows, num_tokens, generator)
        with autocast(budget.device):
            hidden = hidden_states(model, ids[:, :-1], positions.to(budget.device))
            return loss(hidden, model.lm_head.weight, ids[:, 1:].contiguous())

    return step


def train_target(stream: WindowStream, budget: Budget, folder: Path, seed: int, is_resumed: bool) -> dict[str, float]:
    """Train a target into `folder`: a new one, or the existing one further.

    Two runs on one small corpus fit it differently. A resumed run writes the mean of its first and last weights: its
    held-out loss is lower than either's (arXiv:1803.05407).
    """
    model = (
        load_checkpoint(folder, device=budget.device) if is_resumed else new_model(target_config(), seed, budget.device)
    )
    earlier = copy.deepcopy(model) if is_resumed else None
    model.train()
    compile_layers(model)
    optimizer = PairedOptimizer.of_llama(model, matrix_lr=0.012, embedding_lr=0.002)
    lesson = target_lesson(model, stream, budget, seed)
    report = train(model, optimizer, lesson, budget, lambda: save_checkpoint(model, folder, REPETITION_PENALTY))
    if earlier is not None:
        average(model, earlier)
        save_checkpoint(model, folder, REPETITION_PENALTY)
    return report


@torch.no_grad()
def average(model: LlamaForCausalLM, earlier: LlamaForCausalLM) -> None:
    """Set every weight of `model` to its mean with `earlier`."""
    for weight, other in zip(model.parameters(), earlier.parameters(), strict=True):
        weight.lerp_(other, 0.5)


def parse_arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=DEMO_FOLDER, help="folder of the pair")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, nargs=2, metavar=("TARGET", "DRAFT"), help="wall-clock budgets")
    parser.add_argument("--tokens", type=int, help="most tokens of each training, within its minutes")
    parser.add_argument("--rollouts", type=int, default=512, help="windows that the target writes for its draft")
    parser.add_argument(
        "--resume", action="store_true", help="train the pair in the folder further, on the same schedule"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("tokenizer", "target", "draft", "card"), help="run only this stage")
    return parser.parse_args()


def budget(arguments: argparse.Namespace, stage: int) -> Budget:
    """Return the budget of stage 0 (target) or 1 (draft); a GPU takes batches eight times as large."""
    device = torch.device(arguments.device)
    minutes = arguments.minutes or (CUDA_MINUTES if device.type == "cuda" else CPU_MINUTES)
    tokens_per_step = (6144, 4096)[stage] * (8 if device.type == "cuda" else 1)
    return Budget(minutes[stage], device, tokens_per_step, max_tokens=arguments.tokens)


def make_tokenizer(arguments: argparse.Namespace, corpus: Corpus) -> None:
    """Train the shared tokenizer on the library without its tests, and write it into both folders."""
    tokenizer = train_tokenizer(document.text for document in corpus.training if not document.is_test)
    for half in ("target", "draft"):
        save_tokenizer(tokenizer, arguments.out / half)


def window_stream(arguments: argparse.Namespace, corpus: Corpus, seed: int) -> WindowStream:
    """Training windows under the tokenizer of the pair."""
    return WindowStream(tokenize_corpus(load_tokenizer(arguments.out / "target"), corpus), seed)


def make_target(arguments: argparse.Namespace, corpus: Corpus) -> None:
    """Train the target."""
    stream = window_stream(arguments, corpus, arguments.seed)
    target_budget = budget(arguments, 0)
    folder = arguments.out / "target"
    earlier = read_json(folder / "training.json") if arguments.resume else None
    report = train_target(stream, target_budget, folder, arguments.seed, arguments.resume)
    save_report(report, target_budget, folder, earlier)


def make_draft(arguments: argparse.Namespace, corpus: Corpus) -> None:
    """Let the target write, then distil the draft."""
    draft_budget = budget(arguments, 1)
    stream = window_stream(arguments, corpus, arguments.seed + 1)
    target = load_checkpoint(arguments.out / "target", torch.bfloat16, draft_budget.device)
    num_tokens = draft_budget.short_window_tokens
    rollouts = write_rollouts(
        target, stream, arguments.rollouts, num_prompt_tokens=256, num_tokens=num_tokens, seed=arguments.seed
    )
    folder = arguments.out / "draft"
    earlier = read_json(folder / "training.json") if arguments.resume else None
    report = distil_draft(target, stream, rollouts, draft_budget, folder, arguments.seed + 1, arguments.resume)
    save_report(report, draft_budget, folder, earlier)


def save_report(report: dict[str, float], spent: Budget, folder: Path, earlier: dict[str, Any] | None = None) -> None:
    """Write the figures and conditions of all runs next to the checkpoint, for the model card."""
    figures = {
        **report,
        "short_window_tokens": spent.short_window_tokens,
        "long_window_tokens": spent.long_window_tokens,
        "tokens_per_step": spent.tokens_per_step,
        "machine": machine(spent.device),
        "arguments": " ".join(sys.argv[1:]),
    }
    if earlier is not None:
        figures |= {name: earlier[name] + figures[name] for name in ("num_steps", "num_tokens", "seconds")}
        figures["arguments"] = f"{earlier['arguments']}` and `{figures['arguments']}"
    (folder / "training.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def machine(device: torch.device) -> str:
    """Describe the machine that trained."""
    cpu = f"{torch.get_num_threads()} thread(s) on {os.cpu_count()} CPU cores"
    return f"{torch.cuda.get_device_name() if device.type == 'cuda' else cpu}, torch {torch.__version__}"


def describe(arguments: argparse.Namespace, corpus: Corpus) -> None:
    """Measure the pair and write its card."""
    save_measurements(measure(arguments.out, corpus), arguments.out)
    write_card(arguments.out)


def main() -> None:
    """Run the stages."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    arguments = parse_arguments()
    corpus = collect()
    stages = {"tokenizer": make_tokenizer, "target": make_target, "draft": make_draft, "card": describe}
    for name, stage in stages.items():
        if arguments.only in (None, name):
            stage(arguments, corpus)


if __name__ == "__main__":
    main()
