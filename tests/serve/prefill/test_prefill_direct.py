"""Blocks that a pair reads from the replica's memory by NIXL: the text of local prefill, with a killed replica too."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from cluster.replica_settings import PREFILL_CHUNK_TOKENS
from tests.serve.prefill.test_prefill import PREFILL, PROMPT_TOKENS, failures, prompt, texts
from tests.serve.served_pair import ServedPair, SharedCluster, eventually
from tests.serve.test_served_pair import plain_tokens

pytest.importorskip("nixl", reason="pip install 'outrider[direct]'")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def served(cluster: SharedCluster, tiny_pair: Path) -> ServedPair:
    return cluster.serve(tiny_pair, prefill={**PREFILL, "kv_transport": "nixl"}, cache={"num_blocks": 2048})


def test_texts_are_those_of_local_prefill_and_the_memory_is_freed(served: ServedPair, tiny_pair: Path) -> None:
    answers = texts(served, "first", num=2)
    for index, answer in enumerate(answers):
        assert answer == plain_tokens(tiny_pair / "target", float(index % 2), 64, prompt(index))
    assert served.metric("outrider_prefill_remote_tokens") >= PROMPT_TOKENS - 16
    assert not any(failures(served).values())
    assert served.metric("outrider_prefill_replica_direct_chunks") >= PROMPT_TOKENS // PREFILL_CHUNK_TOKENS
    eventually(lambda: served.metric("outrider_prefill_replica_direct_bytes") == 0)


def test_a_replica_that_dies_while_its_memory_is_read_costs_no_token(served: ServedPair) -> None:
    expected = texts(served, "expected")
    answers: list[list[int]] = []
    asking = threading.Thread(target=lambda: answers.extend(texts(served, "killed")))
    asking.start()
    eventually(lambda: served.metric("outrider_prefill_num_requests_fetching") > 0 or not asking.is_alive())
    served.kill("ServeReplica:outrider:Prefill")
    asking.join()
    assert answers == expected
    assert texts(served, "without") == expected
