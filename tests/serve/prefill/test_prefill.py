"""A target with a draft head and a prefill replica: the same text as without, also when the replica is killed.

The head keeps KV of its own, which a prefill replica computes too. The tests run in order: the last one puts another
model in the place of the replica's.
"""

from __future__ import annotations

import random
import shutil
import threading
from pathlib import Path

import httpx
import pytest

from engine.accounting.engine_stats import FetchFailure
from engine.model.loader import model_version
from tests.engine.fixtures.heads.eagle3_fixtures import head_tensors, write_original
from tests.engine.fixtures.heads.heads_fixtures import write_llama_with_mtp
from tests.serve.served_pair import MODEL, ServedPair, SharedCluster, Stream, eventually
from tests.serve.tiny_models import NUM_POSITIONS, VOCAB_SIZE

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

PROMPT_TOKENS = 2000
TAPS = (1, 2)
PREFILL = {"num_replicas": 1, "min_remote_prefill_tokens": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("head")
    write_llama_with_mtp(folder / "target", num_positions=NUM_POSITIONS)
    tensors = head_tensors(folder / "target", len(TAPS))
    write_original(folder / "eagle3", tensors, TAPS, max_position_embeddings=NUM_POSITIONS)
    return folder


@pytest.fixture(scope="module")
def served(cluster: SharedCluster, folder: Path) -> ServedPair:
    draft = {"kind": "eagle3", "path": str(folder / "eagle3")}
    speculation = {"num_tokens": 3, "adaptive": False}
    cache = {"num_blocks": 2048}
    return cluster.serve(folder, draft=draft, speculation=speculation, prefill=PREFILL, cache=cache)


def prompt(seed: int, length: int = PROMPT_TOKENS) -> list[int]:
    return random.Random(seed).choices(range(1, VOCAB_SIZE), k=length)


def texts(served: ServedPair, salt: str, num: int = 4, **options: object) -> list[list[int]]:
    """Return greedy and sampled answers to concurrent long prompts; with a new `salt` no cache has any of them."""
    answers: dict[int, list[int]] = {}

    def ask(index: int) -> None:
        stream = served.stream(
            prompt=prompt(index), temperature=float(index % 2), extra_body={"cache_salt": salt, **options}
        )
        answers[index] = stream.token_ids

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answers[index] for index in range(num)]


def failures(served: ServedPair) -> dict[str, float]:
    """Return the failed transfers by cause, without time-outs, which a machine under load may cause."""
    causes = [cause for cause in FetchFailure if cause is not FetchFailure.TIMEOUT]
    return {cause: served.metric("outrider_prefill_transfers_failed", cause=cause) for cause in causes}


def test_long_prompts_are_prefilled_remotely_with_the_same_text(served: ServedPair) -> None:
    first = texts(served, "first")
    remote, local = (served.metric(f"outrider_prefill_{where}_tokens") for where in ("remote", "local"))
    assert remote + local == 4 * PROMPT_TOKENS
    assert remote >= PROMPT_TOKENS - 16, "the first prompt is prefilled remotely except its last block"
    assert not any(failures(served).values())
    assert served.metric("outrider_prefill_transfer_seconds") > 0
    assert served.metric("outrider_prefill_replica_computed_tokens") >= remote
    assert texts(served, "first", num=2) == first[:2]
    assert served.metric("outrider_prefill_remote_tokens") == remote, "the pair holds these blocks now"
    eventually(lambda: served.metric("outrider_kv_cache_used_blocks") == 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_heads_draft_after_remote_prefill_and_change_no_token(served: ServedPair, temperature: float) -> None:
    answers: dict[str, Stream] = {}
    remote = served.metric("outrider_prefill_remote_tokens")

    def replica_reads_it() -> bool:  # the pair reads it where it takes itself to be faster
        salt = f"{temperature} {len(answers)}"
        answers[salt] = served.stream(prompt=prompt(0), temperature=temperature, extra_body={"cache_salt": salt})
        return served.metric("outrider_prefill_remote_tokens") > remote

    eventually(replica_reads_it)
    salt, drafted = answers.popitem()
    assert drafted.speculation["num_accepted_draft_tokens"] > 0
    for wish in ({"enabled": False}, {"method": "hybrid", "num_tokens": 5}, {"verify": "coupled"}):
        options = {"cache_salt": salt, "speculation": wish}
        other = served.stream(prompt=prompt(0), temperature=temperature, extra_body=options)
        assert other.token_ids == drafted.token_ids
    eventually(lambda: served.metric("outrider_kv_cache_used_blocks") == 0)


def test_an_unavailable_method_is_refused_with_the_available_ones(served: ServedPair) -> None:
    wish = {"model": MODEL, "prompt": prompt(0), "speculation": {"method": "model"}}
    answer = httpx.post(f"{served.url}/v1/completions", json=wish, timeout=60.0)
    assert answer.status_code == 400
    assert "eagle3, hybrid, suffix, ngram, none" in answer.json()["error"]["message"]


def test_a_prompt_below_the_limit_is_prefilled_locally(served: ServedPair) -> None:
    before = served.metric("outrider_prefill_transfers")
    served.stream(prompt=prompt(9, 60))
    assert served.metric("outrider_prefill_transfers") == before


def test_a_killed_prefill_replica_costs_no_request_and_comes_back(served: ServedPair) -> None:
    expected = texts(served, "expected", num=8)
    answers: list[list[int]] = []
    asking = threading.Thread(target=lambda: answers.extend(texts(served, "killed", num=8)))
    asking.start()
    eventually(lambda: served.metric("outrider_prefill_num_requests_fetching") > 0 or not asking.is_alive())
    served.kill("ServeReplica:outrider:Prefill")
    asking.join()
    assert answers == expected
    assert texts(served, "without", num=8) == expected
    before = served.metric("outrider_prefill_remote_tokens")

    def is_back() -> bool:
        served.stream(prompt=prompt(random.randrange(1 << 30)), max_tokens=1)
        return served.metric("outrider_prefill_remote_tokens") > before

    eventually(is_back)
    assert texts(served, "back", num=8) == expected


def test_a_replica_with_another_model_is_refused_and_prompts_are_prefilled_locally(
    served: ServedPair, folder: Path
) -> None:
    expected = texts(served, "expected")
    ours = served_version(folder / "target")
    write_llama_with_mtp(folder / "other", seed=1, num_positions=NUM_POSITIONS)
    replace_file(folder / "target" / "model.safetensors", folder / "other" / "model.safetensors")
    theirs = served_version(folder / "target")
    served.kill("ServeReplica:outrider:Prefill")  # its successor loads the replaced file

    def is_refused() -> bool:
        served.stream(prompt=prompt(random.randrange(1 << 30)), max_tokens=1)
        return served.metric("outrider_prefill_transfers_failed", cause="mismatch") > 0

    eventually(is_refused)
    remote = served.metric("outrider_prefill_remote_tokens")
    assert texts(served, "refused") == expected
    assert served.metric("outrider_prefill_remote_tokens") == remote
    assert f"model_version is {theirs} here and {ours} there" in served.logs()


def served_version(folder: Path) -> str:
    return model_version(str(folder), "none", "torch.float32", "torch.float32")


def replace_file(file: Path, other: Path) -> None:
    """Replace a file; processes that have the old one open keep it."""
    copy = file.with_suffix(".new")
    shutil.copyfile(other, copy)
    copy.rename(file)
