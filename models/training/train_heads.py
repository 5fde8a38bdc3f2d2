"""`python -m models.training.train_heads --kind eagle3`: train a head of the demo target, and measure it.

The kinds are Medusa heads (arXiv:2401.10774) and an EAGLE-3 head (arXiv:2503.01840). `outrider tune` trains a head of
any model further, on its traffic.

A head is a function of a text: for the j-th draft of a round it returns the logits at every position where a round may
begin. A draft is accepted only if all earlier ones are, so a round always continues the target's own text.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from engine.model.checkpoint.dtype import resolve_dtype
from models.training.architecture import hidden_states, load_checkpoint, load_tokenizer
from models.training.evaluate import (
    DEMO_FOLDER,
    Acceptance,
    acceptance_table,
    count_rounds,
    held_out_prompts,
    summarise,
)
from models.training.tokens import (
    WindowStream,
    collect,
    encode,
    mixed_batches,
    plain_positions,
    tokenize_corpus,
    write_rollouts,
)
from tuning.run import DRAFT_WEIGHT, NUM_DRAFTS, distillation_loss
from tuning.score import choose, generate
from tuning.student import Eagle3Student, TrainableMedusaHeads
from tuning.train import Budget, PairedOptimizer, autocast, train

# Of ids [B, T] and K: for j = 0 .. K - 1 the logits [B, at least T - K - 1, V] whose row p predicts token p + 2 + j.
DraftLogits = Callable[[Tensor, int], Iterator[Tensor]]


@torch.no_grad()
def verdicts(
    head: DraftLogits, ids: Tensor, num_prompt_tokens: int, temperature: float, num_draft_tokens: int, seed: int
) -> Tensor:
    """Mark accepted drafts along ids [B, T], as [B, rounds, K]: entry [b, i, j] is draft j of the round at token i.

    Only rounds that end within the text count.
    """
    num_rounds = ids.shape[1] - num_prompt_tokens - num_draft_tokens + 1
    found = torch.zeros(len(ids), num_rounds, num_draft_tokens, dtype=torch.bool)
    for step, logits in enumerate(head(ids, num_draft_tokens)):
        for begin in range(num_rounds):
            place = num_prompt_tokens + begin + step
            chosen = choose(logits[:, place - 2 - step].float(), temperature, seed, place)
            found[:, begin, step] = chosen == ids[:, place]
    return found


def measure_head(
    target: LlamaForCausalLM,
    head: DraftLogits,
    prompts: Tensor,
    temperature: float,
    num_tokens: int = 128,
    num_draft_tokens: int = 5,
    seed: int = 0,
) -> Acceptance:
    """Measure as `evaluate.measure_acceptance` does, with a head as the draft.

    `per_token` is the acceptance of the first draft of a round, over all positions.
    """
    ids = generate(target, prompts, num_tokens, temperature, seed)
    is_accepted = verdicts(head, ids, prompts.shape[1], temperature, num_draft_tokens, seed)
    accepted = [run for row in is_accepted for run in count_rounds(row)]
    return summarise(accepted, is_accepted[..., 0], ids[:, prompts.shape[1] :], num_draft_tokens)


def medusa_lesson(heads: TrainableMedusaHeads, target: LlamaForCausalLM) -> Callable[[Tensor], Tensor]:
    """Return the mean loss of all heads on windows [B, T]: a head learns the target's distribution where it predicts.

    Each call takes one row in three, at random: the linear layer to the vocabulary takes most of the time, and
    neighbouring rows of a window teach nearly the same.
    """
    generator = torch.Generator().manual_seed(0)

    def loss(ids: Tensor) -> Tensor:
        with autocast(ids.device):
            with torch.no_grad():
                hidden = hidden_states(target, ids, plain_positions(*ids.shape))  # [B, T, hidden]
                first = int(torch.randint(0, 3, (), generator=generator))
                rows = torch.arange(first, ids.shape[1] - heads.num_heads, 3)
            losses = []
            for index, states in enumerate(heads(hidden[:, rows])):
                with torch.no_grad():
                    probs = target.lm_head(hidden[:, rows + index + 1]).float().softmax(-1)  # [B, R, V]
                logits = target.lm_head(states).float()
                losses.append(F.cross_entropy(logits.flatten(0, 1), probs.flatten(0, 1)))
            return torch.stack(losses).mean()

    return loss


def medusa_logits(heads: TrainableMedusaHeads, target: LlamaForCausalLM) -> DraftLogits:
    """Return the heads as a function of texts: head j predicts from two tokens before its j + 1 drafts."""

    def draft_logits(ids: Tensor, num_steps: int) -> Iterator[Tensor]:
        hidden = hidden_states(target, ids, plain_positions(*ids.shape))  # [B, T, hidden]
        yield from map(target.lm_head, islice(heads(hidden), num_steps))

    return draft_logits


def save_heads(heads: TrainableMedusaHeads, target: LlamaForCausalLM, folder: Path) -> None:
    """Write the heads in vLLM's format, in bfloat16, without the target's linear layer."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().bfloat16().contiguous() for name, tensor in heads.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": target.config.hidden_size,
        "vocab_size": target.config.vocab_size,
        "truncated_vocab_size": target.config.vocab_size,
        "num_heads": heads.num_heads,
        "num_hidden_layers": heads.num_blocks,
        "medusa_fc_bias": True,
        "original_lm_head": True,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_heads(folder: Path, target: LlamaForCausalLM) -> TrainableMedusaHeads:
    """Return the saved heads in float32."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads = TrainableMedusaHeads(target.config.hidden_size, config["num_heads"], config["num_hidden_layers"])
    heads.load_state_dict({name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()})
    return heads.eval()


def taps_of(target: LlamaForCausalLM) -> tuple[int, ...]:
    """Return the layers whose input is read: a low, a middle and a high one, the default for a head without ids."""
    num_layers = target.config.num_hidden_layers
    return (2, num_layers // 2, num_layers - 3)


@torch.no_grad()
def features_and_logits(target: LlamaForCausalLM, ids: Tensor, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the inputs of the tapped layers [B, T, taps * hidden] and the logits [B, T, V] for ids [B, T]."""
    found = target(ids, use_cache=False, output_hidden_states=True)
    return torch.cat([found.hidden_states[tap] for tap in taps], dim=-1), found.logits


def new_student(target: LlamaForCausalLM, draft_vocab_size: int) -> Eagle3Student:
    """Return a head as wide as its target's layers."""
    return Eagle3Student(target.config, len(taps_of(target)), draft_vocab_size)


def frequent_ids(windows: Tensor, vocab_size: int, num_ids: int) -> Tensor:
    """Return the most frequent ids of texts [B, T], in ascending order, [num_ids]."""
    counts = torch.bincount(windows.flatten(), minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:num_ids].sort().values


def eagle3_lesson(
    student: Eagle3Student, target: LlamaForCausalLM, target_ids: Tensor, next_texts: Callable[[], Tensor]
) -> Callable[[float], Tensor]:
    """Return the steps of training: a batch, the target's logits for it, and the loss of a round of drafts."""
    loss = torch.compile(distillation_loss, dynamic=False)

    def step_loss(progress: float) -> Tensor:
        """Return the loss of the next batch: at first of the first draft, later of whole rounds."""
        ids = next_texts()  # [B, T]
        num_steps = NUM_DRAFTS if progress >= 0.4 else 1  # the first draft alone takes a third of the time
        num_rounds = ids.shape[1] - num_steps
        with autocast(ids.device):
            features, logits = features_and_logits(target, ids, taps_of(target))
            embedded = target.model.embed_tokens(ids)
            wanted = logits.index_select(-1, target_ids)  # [B, T, draft vocabulary]
            losses = [
                loss(states, student.lm_head.weight, wanted[:, 1 + step :][:, :num_rounds], 1.0) * DRAFT_WEIGHT**step
                for step, states in enumerate(student.steps(features, embedded, num_steps))
            ]
        return torch.stack(losses).sum() / sum(DRAFT_WEIGHT**step for step in range(num_steps))

    return step_loss


def train_eagle3(
    target: LlamaForCausalLM,
    next_texts: Callable[[], Tensor],
    budget: Budget,
    folder: Path,
    draft_vocab_size: int,
) -> None:
    """Train a head on batches of texts [B, T] into `folder`, in the original format."""
    texts = torch.cat([next_texts() for _ in range(256)])  # 256 batches of texts choose the vocabulary
    target_ids = frequent_ids(texts, target.config.vocab_size, draft_vocab_size)
    student = new_student(target, draft_vocab_size).to(budget.device)
    student.begin_as(target, target_ids)
    layer = [*student.fc.parameters(), *student.midlayer.parameters()]
    others = [*student.norm.parameters(), *student.lm_head.parameters(), *(p for p in layer if p.ndim == 1)]
    optimizer = PairedOptimizer([p for p in layer if p.ndim == 2], others, matrix_lr=0.02, other_lr=0.002)
    lesson = eagle3_lesson(student, target, target_ids, next_texts)
    train(student, optimizer, lesson, budget, lambda: save_head(student, target, target_ids, folder))


def save_head(student: Eagle3Student, target: LlamaForCausalLM, target_ids: Tensor, folder: Path) -> None:
    """Write the original EAGLE-3 format: config.json, and bfloat16 weights with `d2t` and `t2d`."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().bfloat16().contiguous() for name, tensor in student.state_dict().items()}
    tensors["d2t"] = target_ids - torch.arange(len(target_ids))
    tensors["t2d"] = torch.zeros(target.config.vocab_size, dtype=torch.bool).index_fill_(0, target_ids, True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.dumps(head_config(target, len(target_ids)), indent=2)
    (folder / "config.json").write_text(config + "\n", encoding="utf-8")


def head_config(target: LlamaForCausalLM, draft_vocab_size: int) -> dict[str, object]:
    """Return config.json of the original format; its layer ids count outputs of layers."""
    config: Any = target.config
    kept: tuple[str, ...] = (
        "hidden_act",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )
    kept += ("rms_norm_eps", "max_position_embeddings", "vocab_size", "bos_token_id", "eos_token_id")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{name: getattr(config, name) for name in kept},
        "rope_theta": config.rope_parameters["rope_theta"],
        "num_hidden_layers": 1,
        "draft_vocab_size": draft_vocab_size,
        "tie_word_embeddings": False,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in taps_of(target)],
        },
        "dtype": "bfloat16",
    }


def eagle3_logits(folder: Path, target: LlamaForCausalLM) -> DraftLogits:
    """Return the head in `folder` as a function of texts, in float32."""
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("t2d")
    offsets = tensors.pop("d2t")
    target_ids = torch.arange(len(offsets)) + offsets
    student = new_student(target, len(offsets))
    student.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})

    def draft_logits(ids: Tensor, num_steps: int) -> Iterator[Tensor]:
        features, _ = features_and_logits(target, ids, taps_of(target))
        for states in student.steps(features, target.model.embed_tokens(ids), num_steps):
            drafted = F.linear(states, student.lm_head.weight)
            logits = drafted.new_full((*drafted.shape[:-1], target.config.vocab_size), float("-inf"))
            yield logits.index_copy_(-1, target_ids, drafted)

    return draft_logits


logger = logging.getLogger(__name__)

WINDOW_TOKENS = 256
WINDOWS_PER_STEP = 8


def parse_arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("medusa", "eagle3"), required=True)
    parser.add_argument("--target", type=Path, default=DEMO_FOLDER / "target")
    parser.add_argument("--out", type=Path, help="the head's folder; by default next to the target")
    parser.add_argument("--minutes", type=float, default=4.0, help="of training, without rollouts and measuring")
    parser.add_argument("--rollouts", type=int, default=96, help="windows that the target writes for its head")
    parser.add_argument("--prompts", type=int, default=96, help="held-out prompts to measure with")
    # 3,072 cover 98.3% of the tokens of the library, among the 4,096 of the demo.
    parser.add_argument("--draft-vocab", type=int, default=3072, help="vocabulary size of an EAGLE-3 head")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def texts_of(target: LlamaForCausalLM, arguments: argparse.Namespace) -> tuple[Callable[[], Tensor], Tensor]:
    """Return a function for the next batch of texts [B, T], and prompts [N, S] that are never trained on.

    Windows of the corpus alternate with windows of the target's own text, as at serving time.
    """
    tokenizer, corpus = load_tokenizer(arguments.target), collect()
    stream = WindowStream(tokenize_corpus(tokenizer, corpus), arguments.seed)
    rollouts = write_rollouts(
        target, stream, arguments.rollouts, num_prompt_tokens=128, num_tokens=WINDOW_TOKENS, seed=arguments.seed
    )
    batches = mixed_batches(stream, rollouts, 2, WINDOWS_PER_STEP, WINDOW_TOKENS, arguments.seed)
    documents = [document.text for document in corpus.held_out if not document.is_test]
    return lambda: next(batches)[:, :-1], held_out_prompts(encode(tokenizer, documents), arguments.prompts)


def make_head(
    target: LlamaForCausalLM, arguments: argparse.Namespace, next_texts: Callable[[], Tensor], folder: Path
) -> DraftLogits:
    """Train a head into `folder`, and return it as it was saved."""
    budget = Budget(arguments.minutes, target.device, WINDOWS_PER_STEP * WINDOW_TOKENS)
    if arguments.kind == "eagle3":
        train_eagle3(target, next_texts, budget, folder, arguments.draft_vocab)
        return eagle3_logits(folder, target)
    teacher = load_checkpoint(arguments.target, resolve_dtype("auto", target.device)).requires_grad_(False)
    heads = TrainableMedusaHeads(target.config.hidden_size, NUM_DRAFTS)
    lesson = medusa_lesson(heads, teacher)
    optimizer = PairedOptimizer([], heads.parameters(), matrix_lr=0.002, other_lr=0.002)
    train(heads, optimizer, lambda _: lesson(next_texts()), budget, lambda: save_heads(heads, target, folder))
    return medusa_logits(load_heads(folder, target), target)


def main() -> None:
    """Train, and log the acceptance by position."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    target = load_checkpoint(arguments.target).requires_grad_(False)
    folder = arguments.out or arguments.target.parent / arguments.kind
    next_texts, prompts = texts_of(target, arguments)
    head = make_head(target, arguments, next_texts, folder)
    measured = {f"{t:g}": asdict(measure_head(target, head, prompts, t, num_draft_tokens=NUM_DRAFTS)) for t in (0, 1)}
    logger.info("the head is in %s\n%s", folder, acceptance_table(measured))


if __name__ == "__main__":
    main()
