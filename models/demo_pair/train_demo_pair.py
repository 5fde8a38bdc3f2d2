"""`python -m models.demo_pair.train_demo_pair`: tokenizer, target, draft, measurements, model card, in that order."""

import argparse
import dataclasses
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch

from models.demo_pair.card import DEMO_FOLDER, read_json, write_card
from models.demo_pair.draft import distil_draft
from models.demo_pair.evaluate import measure, save_measurements
from models.demo_pair.target import train_target
from models.training.checkpoint import load_checkpoint
from models.training.corpus import Corpus, collect
from models.training.rollout import write_rollouts
from models.training.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer
from models.training.tokens import WindowStream, tokenize_corpus
from tuning.train import Budget, TrainingReport

CPU_MINUTES = (50.0, 14.0)
CUDA_MINUTES = (20.0, 8.0)
ROLLOUT_PROMPT_TOKENS = 256


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
    rollouts = write_rollouts(target, stream, arguments.rollouts, ROLLOUT_PROMPT_TOKENS, num_tokens, arguments.seed)
    folder = arguments.out / "draft"
    earlier = read_json(folder / "training.json") if arguments.resume else None
    report = distil_draft(target, stream, rollouts, draft_budget, folder, arguments.seed + 1, arguments.resume)
    save_report(report, draft_budget, folder, earlier)


def save_report(report: TrainingReport, spent: Budget, folder: Path, earlier: dict[str, Any] | None = None) -> None:
    """Write the figures and conditions of all runs next to the checkpoint, for the model card."""
    figures = {
        **dataclasses.asdict(report),
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
