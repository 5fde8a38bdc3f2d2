"""Block keys in the ingress equal the engine's, or are left out."""

import logging
from dataclasses import replace

import pytest

from engine.kv_cache.block_manager import BlockManager
from engine.sequence.sequence import TokenBlocks
from protos.block_keys import PROBE_SALT, probe_token_ids, split_keys
from protos.messages import GenerateRequest
from protos.served_model import ModelCard
from router.routing.request_routing import PromptKeys


def engine_keys(card: ModelCard, request: GenerateRequest) -> tuple[bytes, ...]:
    """Return the keys of the request's blocks in an engine's cache."""
    blocks = BlockManager(4, card.block_size, card.model_version)
    return blocks.prefix_keys(TokenBlocks([*request.prompt_token_ids, *request.output_token_ids], request.cache_salt))


def make_card(version: str = "v1", block_size: int = 16) -> ModelCard:
    card = ModelCard(300, 4096, (0,), version, block_size)
    probe = engine_keys(card, GenerateRequest("p", probe_token_ids(block_size), cache_salt=PROBE_SALT))[-1]
    return replace(card, probe_key=probe)


REQUEST = GenerateRequest("r", tuple(range(40)), cache_salt="s", output_token_ids=tuple(range(20)))


@pytest.mark.parametrize("block_size", [1, 16, 1000])
def test_keys_are_the_engines_with_generated_tokens_included(block_size: int):
    prompt_keys, card = PromptKeys(), make_card(block_size=block_size)
    prompt_keys.learn(card)
    assert not prompt_keys.is_refuted
    assert split_keys(prompt_keys.keys_of(REQUEST)) == engine_keys(card, REQUEST)


def test_salt_and_model_version_change_every_key():
    prompt_keys = PromptKeys()
    prompt_keys.learn(make_card())
    keys = set(split_keys(prompt_keys.keys_of(REQUEST)))
    assert keys.isdisjoint(split_keys(prompt_keys.keys_of(replace(REQUEST, cache_salt="t"))))
    prompt_keys.learn(make_card("v2"))
    assert keys.isdisjoint(split_keys(prompt_keys.keys_of(REQUEST)))


def test_keys_of_one_prompts_samples_are_computed_once(monkeypatch: pytest.MonkeyPatch):
    prompt_keys = PromptKeys()
    prompt_keys.learn(make_card())
    first = prompt_keys.keys_of(REQUEST)
    monkeypatch.setattr("router.routing.request_routing.block_keys", lambda *_: pytest.fail("computed again"))
    assert prompt_keys.keys_of(replace(REQUEST, request_id="r-1", sample_index=1)) == first


def test_without_a_card_there_are_no_keys_and_no_alarm():
    assert PromptKeys().keys_of(REQUEST) == b""
    assert not PromptKeys().is_refuted


@pytest.mark.parametrize("probe_key", [b"", b"x" * 16])
def test_an_engine_with_other_keys_is_logged_once_and_routed_by_load(
    probe_key: bytes, caplog: pytest.LogCaptureFixture
):
    prompt_keys, card = PromptKeys(), replace(make_card(), probe_key=probe_key)
    with caplog.at_level(logging.ERROR):
        prompt_keys.learn(card)
        prompt_keys.learn(card)
    assert prompt_keys.is_refuted
    assert prompt_keys.keys_of(REQUEST) == b""
    [record] = caplog.records
    assert "routed by load alone" in record.message
