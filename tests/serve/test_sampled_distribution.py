"""An anytime-valid test of the served distribution: requests over HTTP against the target's exact probabilities.

The tiny pair has a vocabulary of 16, and its draft is right about two times in three. All classes of parameters are
sent at once, so that every batch is mixed. The joint distribution of the first three tokens is compared, because a
stale penalty or a wrong recovered token shows only after the first. A correct server fails one run in a million.
"""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from protos.messages import SamplingParams
from tests.serve.reference_probs import probs_of_first_tokens
from tests.serve.sequential_test import SequentialTest
from tests.serve.served_pair import MODEL, ServedPair
from tests.serve.tiny_models import VOCAB_SIZE

PROMPT = [3, 5, 7, 9]
NUM_TOKENS = 3
NUM_CHOICES = 10  # times 21 classes: what one pair takes at a time
NUM_REQUESTS = 25  # per class: 250 samples
NUM_COUPLED_REQUESTS = 5  # whose tokens equal the tokens of the same seeds without drafts
ALPHA = 1e-6

SAMPLINGS: dict[str, dict[str, Any]] = {
    "T=1": {},
    "T=0.7, top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "top-k 5": {"top_k": 5},
    "min-p 0.1": {"temperature": 1.5, "min_p": 0.1},
    "presence 2": {"presence_penalty": 2.0, "temperature": 0.7},
    "repetition 2, frequency 1": {"repetition_penalty": 2.0, "frequency_penalty": 1.0},
    "logit bias": {"logit_bias": ((2, 3.0), (4, -3.0))},
}
COUPLED = {"verify": "coupled", "num_tokens": 3}
SPECULATIONS: dict[str, dict[str, Any]] = {
    "rejection": {"verify": "rejection", "num_tokens": 3},
    "block": {"verify": "block", "num_tokens": 3},
    "off": {"enabled": False},
}


@pytest.fixture(scope="module")
def exact_probs(tiny_pair: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(tiny_pair / "target", dtype=torch.float32)
    return {
        name: probs_of_first_tokens(model, PROMPT, SamplingParams(**options), NUM_TOKENS)
        for name, options in SAMPLINGS.items()
    }


async def sample(
    client: httpx.AsyncClient, options: dict[str, Any], speculation: dict[str, Any], seed: int
) -> list[int]:
    """Return the cells of one request's choices."""
    return [cell_of(token_ids) for token_ids in await choices(client, options, speculation, seed)]


async def choices(
    client: httpx.AsyncClient, options: dict[str, Any], speculation: dict[str, Any], seed: int
) -> list[list[int]]:
    body = {
        "model": MODEL,
        "prompt": PROMPT,
        "n": NUM_CHOICES,
        "max_tokens": NUM_TOKENS + 2,
        "seed": seed,
        "ignore_eos": True,
        "return_token_ids": True,
        "temperature": 1.0,
        "speculation": speculation,
        **options,
    }
    body["logit_bias"] = {str(token_id): bias for token_id, bias in options.get("logit_bias", ())}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return [choice["token_ids"] for choice in answer.json()["choices"]]


def cell_of(token_ids: list[int]) -> int:
    cell = 0
    for token_id in token_ids[:NUM_TOKENS]:
        cell = cell * VOCAB_SIZE + token_id
    return cell


@pytest.mark.timeout(600)
async def test_every_parameter_under_every_verification_has_the_targets_distribution(
    served: ServedPair, exact_probs: dict[str, torch.Tensor]
) -> None:
    tests = {(sampling, mode): SequentialTest(exact_probs[sampling]) for sampling in SAMPLINGS for mode in SPECULATIONS}
    limit = math.log(len(tests) / ALPHA)
    async with httpx.AsyncClient(base_url=served.url, timeout=120.0) as client:
        for round_index in range(NUM_REQUESTS):
            seeds = {key: 1000 * round_index + index for index, key in enumerate(tests)}
            requests = [
                sample(client, SAMPLINGS[sampling], SPECULATIONS[mode], seed)
                for (sampling, mode), seed in seeds.items()
            ]
            for (key, test), cells in zip(tests.items(), await asyncio.gather(*requests), strict=True):
                test.add(cells)
                assert test.log_evidence < limit, f"{key} after {test.num_samples} samples"
    assert served.metric("outrider_spec_decode_num_accepted_tokens") > 1000


async def test_coupled_verification_gives_the_tokens_that_a_seed_has_without_drafts(served: ServedPair) -> None:
    """Its distribution equals the distribution without drafts, which is tested above."""
    num_accepted = served.metric("outrider_spec_decode_num_accepted_tokens")
    async with httpx.AsyncClient(base_url=served.url, timeout=120.0) as client:
        for seed in range(NUM_COUPLED_REQUESTS):
            drafted, plain = [
                await asyncio.gather(*(choices(client, options, mode, seed) for options in SAMPLINGS.values()))
                for mode in (COUPLED, SPECULATIONS["off"])
            ]
            assert drafted == plain
    assert served.metric("outrider_spec_decode_num_accepted_tokens") > num_accepted + 150


@pytest.mark.parametrize("name", ["presence 2", "repetition 2, frequency 1"])
def test_the_samples_suffice_to_refute_stale_penalties(name: str, tiny_pair: Path) -> None:
    """In 20 of 20 draws they refute a verifier that scores each draft without the draft before it."""
    model = AutoModelForCausalLM.from_pretrained(tiny_pair / "target", dtype=torch.float32)
    sampling = SamplingParams(**SAMPLINGS[name])
    claimed = probs_of_first_tokens(model, PROMPT, sampling, NUM_TOKENS)
    stale = probs_of_first_tokens(model, PROMPT, sampling, NUM_TOKENS, num_stale=1)
    limit = math.log(len(SAMPLINGS) * len(SPECULATIONS) / ALPHA)
    for draw in range(20):
        test, generator = SequentialTest(claimed), torch.Generator().manual_seed(draw)
        cells = torch.multinomial(stale, NUM_REQUESTS * NUM_CHOICES, replacement=True, generator=generator)
        assert any(test.add(batch.tolist()) or test.log_evidence > limit for batch in cells.split(NUM_CHOICES))
