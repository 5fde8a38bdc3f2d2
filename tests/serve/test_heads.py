"""A target that drafts with its own MTP layer, served: no draft process, prompts read elsewhere, the same tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator

import httpx
import pytest

from tests.engine.heads_world import add_mtp
from tests.serve.served_pair import MODEL, ServedPair, eventually, serving
from tests.serve.tiny_models import CHARACTERS, write_pair

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

PREFILL = {"num_replicas": 1, "min_remote_prefill_tokens": 64, "chunk_tokens": 64, "num_threads": 1}
PROMPT = "".join(random.Random(0).choices(CHARACTERS, k=500))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPair]:
    folder = tmp_path_factory.mktemp("tiny")
    write_pair(folder)
    add_mtp(folder / "target")
    with serving(folder, draft={"kind": "mtp"}, speculation={"num_tokens": 3}, prefill=PREFILL) as served_pair:
        yield served_pair


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_layer_drafts_behind_a_prompt_that_was_read_elsewhere(served: ServedPair, temperature: float) -> None:
    remote = served.metric("outrider_prefill_remote_tokens")
    salt = {"cache_salt": str(temperature)}
    drafted = served.stream(prompt=PROMPT, temperature=temperature, extra_body=salt)
    assert served.metric("outrider_prefill_remote_tokens") > remote
    assert drafted.speculation["num_accepted_draft_tokens"] > 0
    for wish in ({"enabled": False}, {"method": "hybrid", "num_tokens": 5}, {"verify": "coupled"}):
        other = served.stream(prompt=PROMPT, temperature=temperature, extra_body={**salt, "speculation": wish})
        assert other.token_ids == drafted.token_ids
    eventually(lambda: served.metric("outrider_kv_cache_used_blocks") == 0)


def test_a_method_that_is_not_there_is_refused_by_name(served: ServedPair) -> None:
    wish = {"model": MODEL, "prompt": "hello", "speculation": {"method": "model"}}
    answer = httpx.post(f"{served.url}/v1/completions", json=wish, timeout=60.0)
    assert answer.status_code == 400
    assert "mtp, hybrid, suffix, ngram, none" in answer.json()["error"]["message"]
