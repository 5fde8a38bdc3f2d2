"""Settings of the draft over HTTP: adaptive lengths, and a draft with another tokenizer, which is detected at start."""

from typing import Any

import pytest

from tests.engine.fixtures.foreign_pair import write_foreign_pair
from tests.serve.served_pair import ServedPair, SharedCluster, Stream, eventually

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

PROMPT = [9, 12, 5, 20, 31]
NUM_TOKENS = 300


@pytest.fixture(scope="module")
def pair(cluster: SharedCluster, tmp_path_factory: pytest.TempPathFactory) -> ServedPair:
    folder = tmp_path_factory.mktemp("foreign")
    write_foreign_pair(folder)
    served_pair = cluster.serve(folder, speculation={"adaptive": True, "num_tokens": 3, "max_num_tokens": 6})
    eventually(lambda: served_pair.metric("outrider_draft_connected") == 1)
    return served_pair


def generate(served: ServedPair, temperature: float, seed: int = 4, **speculation: Any) -> Stream:
    options = {"speculation": {"method": "model", **speculation}}
    return served.stream(prompt=PROMPT, temperature=temperature, seed=seed, max_tokens=NUM_TOKENS, extra_body=options)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_those_of_the_target_alone(pair: ServedPair, temperature: float) -> None:
    """Texts are generated until one has drafts: they depend on their measured gain, hence on the machine's load."""
    seeds = iter(range(4, 1000))

    def has_drafts() -> bool:
        seed = next(seeds)
        plain = generate(pair, temperature, seed, enabled=False)
        assert plain.speculation["num_draft_tokens"] == 0
        drafted = generate(pair, temperature, seed)
        assert drafted.token_ids == plain.token_ids
        assert len(plain.token_ids) == NUM_TOKENS
        return drafted.speculation["num_draft_tokens"] > 0

    eventually(has_drafts)


@pytest.mark.parametrize("verify", ["rejection", "block"])
def test_texts_verified_by_rejection_or_block_are_complete(pair: ServedPair, verify: str) -> None:
    """Drafts may be switched off for sampled requests by now: so small a target gains nothing by them."""
    assert len(generate(pair, 1.0, verify=verify).token_ids) == NUM_TOKENS


def test_lengths_adapt_and_the_speedup_is_measured_by_class(pair: ServedPair) -> None:
    num_passes = pair.metric("outrider_spec_decode_num_drafts")
    num_drafts = pair.metric("outrider_spec_decode_num_draft_tokens")
    assert 0 < num_drafts != 3 * num_passes  # not all passes had the length that requests begin with
    assert pair.metric("outrider_spec_decode_num_accepted_tokens") > 0
    assert pair.metric("outrider_spec_decode_speedup", **{"class": "model-greedy"}) > 0
    assert pair.metric("outrider_spec_decode_speedup", **{"class": "model-sampled"}) > 0


def test_untranslatable_draft_tokens_are_counted_in_the_metrics(pair: ServedPair) -> None:
    """Texts are generated until one has drafts, as above."""
    seeds = iter(range(1000))

    def has_lost_some() -> bool:
        generate(pair, 1.0, seed=next(seeds))
        return pair.metric("outrider_draft_untranslated_tokens") > 0

    eventually(has_lost_some)
    assert pair.metric("outrider_draft_untranslated_tokens") < pair.metric("outrider_draft_foreign_tokens")
    assert pair.metric("outrider_spec_decode_num_invalid_tokens") == 0
