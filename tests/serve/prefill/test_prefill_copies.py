"""Blocks of one prompt from two prefill replicas: blocks that one has computed before, and the blocks after them."""

from __future__ import annotations

import time
from itertools import count
from pathlib import Path

import pytest

from tests.serve.prefill.test_prefill import PREFILL, PROMPT_TOKENS, failures, prompt
from tests.serve.served_pair import ServedPair, SharedCluster
from tests.serve.test_served_pair import plain_tokens

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

OWN_TOKENS = 400


@pytest.fixture(scope="module")
def served(cluster: SharedCluster, tiny_pair: Path) -> ServedPair:
    """Orders go to either replica by chance. Pair and replicas have room for one prompt, which the next one evicts."""
    prefill = {**PREFILL, "num_replicas": 2}
    return cluster.serve(tiny_pair, prefill=prefill, cache={"num_blocks": 160}, router={"policy": "random"})


def test_a_prompts_blocks_come_from_two_replicas_and_its_text_is_the_same(served: ServedPair, tiny_pair: Path) -> None:
    seeds, own = count(1), prompt(0, OWN_TOKENS)

    def has_copied() -> bool:
        prefix, other = prompt(next(seeds)), prompt(-next(seeds))
        for each in (prefix, other):
            served.stream(prompt=each, max_tokens=1)
        before = copied(served)
        answer = served.stream(prompt=prefix + own, temperature=0.0, max_tokens=16)
        assert answer.token_ids == plain_tokens(tiny_pair / "target", 0.0, 16, prefix + own)
        return copied(served) - before == PROMPT_TOKENS - 16  # the pair computed the prefix's last block

    # One try in thirty goes to both replicas, so the next one begins at once.
    deadline_s = time.monotonic() + 240.0
    while not has_copied():
        assert time.monotonic() < deadline_s, "no try went to both replicas"
    assert not any(failures(served).values())


def copied(served: ServedPair) -> float:
    return served.metric("outrider_prefill_replica_copied_tokens")
