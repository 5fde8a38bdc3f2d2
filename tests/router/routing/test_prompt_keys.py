"""Block names in the ingress: those of the engine, or none."""

import logging
from dataclasses import replace

import pytest

from engine.kv_cache.block_manager import BlockManager
from engine.sequence.token_blocks import TokenBlocks
from protos.block_keys import PROBE_SALT, probe_token_ids, split_keys
from protos.messages import GenerateRequest, ModelCard
from router.routing.prompt_keys import PromptKeys


def engine_keys(card: ModelCard, request: GenerateRequest) -> tuple[bytes, ...]:
    """What an engine's cache calls the request's blocks."""
    blocks = BlockManager(4, card.block_size, card.model_version)
    return blocks.prefix_keys(TokenBlocks([*request.prompt_token_ids, *request.output_token_ids], request.cache_salt))


def make_card(version: str = "v1", block_size: int = 16) -> ModelCard:
    card = ModelCard(300, 4096, (0,), version, block_size)
    probe = engine_keys(card, GenerateRequest("p", probe_token_ids(block_size), cache_salt=PROBE_SALT))[-1]
    return replace(card, probe_key=probe)


REQUEST = GenerateRequest("r", tuple(range(40)), cache_salt="s", output_token_ids=tuple(range(20)))


@pytest.mark.parametrize("block_size", [1, 16, 1000])
def test_the_engines_names_are_given_generated_tokens_included(block_size: int):
    names, card = PromptKeys(), make_card(block_size=block_size)
    names.learn(card)
    assert not names.is_refuted
    assert split_keys(names.keys_of(REQUEST)) == engine_keys(card, REQUEST)


def test_salt_and_model_version_change_every_name():
    names = PromptKeys()
    names.learn(make_card())
    keys = set(split_keys(names.keys_of(REQUEST)))
    assert keys.isdisjoint(split_keys(names.keys_of(replace(REQUEST, cache_salt="t"))))
    names.learn(make_card("v2"))
    assert keys.isdisjoint(split_keys(names.keys_of(REQUEST)))


def test_samples_of_one_prompt_are_named_once(monkeypatch: pytest.MonkeyPatch):
    names = PromptKeys()
    names.learn(make_card())
    first = names.keys_of(REQUEST)
    monkeypatch.setattr("router.routing.prompt_keys.block_keys", lambda *_: pytest.fail("named again"))
    assert names.keys_of(replace(REQUEST, request_id="r-1", sample_index=1)) == first


def test_without_a_card_nothing_is_named_and_nothing_is_wrong():
    assert PromptKeys().keys_of(REQUEST) == b""
    assert not PromptKeys().is_refuted


@pytest.mark.parametrize("probe_key", [b"", b"x" * 16])
def test_an_engine_that_names_otherwise_is_found_out_once_and_gets_no_keys(
    probe_key: bytes, caplog: pytest.LogCaptureFixture
):
    names, card = PromptKeys(), replace(make_card(), probe_key=probe_key)
    with caplog.at_level(logging.ERROR):
        names.learn(card)
        names.learn(card)
    assert names.is_refuted
    assert names.keys_of(REQUEST) == b""
    [record] = caplog.records
    assert "routed by load alone" in record.message
