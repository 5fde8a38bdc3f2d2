"""Acceptance: rounds, shared noise and the identity of a model with itself."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from models.training.evaluate import count_rounds, measure_acceptance, repetition, summarise, text_agreement
from tuning.score import gumbel_noise


def tiny_model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return LlamaForCausalLM(config).eval()


def test_a_rejection_ends_the_round_and_its_token_is_recovered() -> None:
    agrees = torch.tensor([True, False, True, True, True, True])
    assert count_rounds(agrees.unfold(0, 2, 1)) == [1, 2]


def test_positions_are_conditional_on_earlier_ones() -> None:
    summary = summarise([0, 1, 2, 2], torch.ones(1, 4), torch.zeros(1, 4), num_draft_tokens=2)
    assert summary.by_position == [3 / 4, 2 / 3]
    assert summary.tokens_per_pass == 5 / 4 + 1


def test_noise_is_a_function_of_seed_and_position() -> None:
    assert torch.equal(gumbel_noise(2, 8, seed=1, position=5), gumbel_noise(2, 8, seed=1, position=5))
    assert not torch.equal(gumbel_noise(2, 8, seed=1, position=5), gumbel_noise(2, 8, seed=1, position=6))


def test_a_loop_is_repetition_and_fresh_text_is_not() -> None:
    assert repetition([1, 2] * 40) > 0.9
    assert repetition(list(range(80))) == 0.0


def test_a_model_agrees_with_itself_along_any_text() -> None:
    model = tiny_model(0)
    assert text_agreement(model, model, [torch.randint(0, 32, (1, 9)), torch.randint(0, 32, (1, 4))]) == 1.0


def test_a_model_accepts_itself_at_every_temperature() -> None:
    model, prompts = tiny_model(0), torch.randint(0, 32, (3, 8))
    for temperature in (0.0, 1.0):
        measured = measure_acceptance(model, model, prompts, temperature, num_tokens=12, num_draft_tokens=3)
        assert measured.by_position == [1.0, 1.0, 1.0]
        assert measured.tokens_per_pass == 4.0
