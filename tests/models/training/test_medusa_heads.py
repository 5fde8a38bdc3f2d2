"""The heads that are trained are the heads that are served, and their rounds are counted as the engine makes them."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.config import HeadConfig, HeadKind
from engine.model.draft_heads.loader import load_head
from engine.model.draft_heads.medusa import MedusaHeads as ServedHeads
from models.training.train_heads import (
    TrainableMedusaHeads,
    load_heads,
    measure_head,
    medusa_lesson,
    medusa_logits,
    save_heads,
    verdicts,
)


def tiny_target() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=48,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        initializer_range=0.4,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def random_heads() -> TrainableMedusaHeads:
    heads = TrainableMedusaHeads(16, num_heads=3, num_blocks=2)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return heads


@torch.no_grad()
def test_the_engine_reads_what_is_saved(tmp_path: Path) -> None:
    target, heads = tiny_target(), random_heads()
    save_heads(heads, target, tmp_path)
    saved = load_heads(tmp_path, target)
    served = load_head(HeadConfig(HeadKind.MEDUSA, str(tmp_path)), target, target.device)
    assert isinstance(served, ServedHeads)
    served.lm_head = target.lm_head
    hidden = torch.randn(5, 16)
    expected = torch.stack([target.lm_head(states) for states in saved(hidden)], dim=1)
    torch.testing.assert_close(served.logits(hidden, 3), expected)


def test_a_medusa_lesson_lowers_the_loss() -> None:
    target, heads = tiny_target(), TrainableMedusaHeads(16, num_heads=2, num_blocks=1)
    lesson, ids = medusa_lesson(heads, target), torch.randint(0, 48, (2, 12))
    optimizer = torch.optim.AdamW(heads.parameters(), lr=3e-2)
    losses = []
    for _ in range(60):
        loss = lesson(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10]), "each is of other rows"


@torch.no_grad()
def test_a_head_drafts_the_token_two_places_on() -> None:
    target, heads = tiny_target(), random_heads()
    ids = torch.randint(0, 48, (2, 10))
    for place in range(4, 10):  # a text that the first head foresees
        states = next(iter(heads(target.model(ids).last_hidden_state)))
        ids[:, place] = target.lm_head(states[:, place - 2]).argmax(-1)
    is_accepted = verdicts(medusa_logits(heads, target), ids, 4, 0.0, 3, seed=0)
    assert is_accepted.shape == (2, 4, 3)
    assert is_accepted[..., 0].all()
    hidden = target.model(ids).last_hidden_state
    for head, states in enumerate(heads(hidden)):
        chosen = target.lm_head(states).argmax(-1)
        for begin in range(4):
            place = 4 + begin + head
            assert torch.equal(is_accepted[:, begin, head], chosen[:, place - head - 2] == ids[:, place])
    measured = measure_head(target, medusa_logits(heads, target), ids, 1.0, num_tokens=12, num_draft_tokens=3)
    assert 1.0 <= measured.tokens_per_pass <= 4.0
