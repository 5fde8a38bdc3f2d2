"""A pair with a prefill replica: the same text as without, also when the replica is killed or has another model."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.model.loader import model_version
from engine.remote_prefill.fetch_failure import FetchFailure
from tests.serve.served_pair import ServedPair, SharedCluster, eventually
from tests.serve.tiny_models import CHARACTERS, write_pair

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

PROMPT_TOKENS = 2000
PREFILL = {"num_replicas": 1, "min_remote_prefill_tokens": 64, "chunk_tokens": 64, "num_threads": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_pair(folder)
    return folder


@pytest.fixture(scope="module")
def served(cluster: SharedCluster, folder: Path) -> Iterator[ServedPair]:
    with cluster.serving(folder, prefill=PREFILL, cache={"num_blocks": 2048}) as served_pair:
        yield served_pair


def prompt(seed: int, length: int = PROMPT_TOKENS) -> str:
    return "".join(random.Random(seed).choices(CHARACTERS, k=length))


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
    assert remote >= PROMPT_TOKENS - 16, "the first prompt is prefilled remotely but for its last block"
    assert not any(failures(served).values())
    assert served.metric("outrider_prefill_transfer_seconds") > 0
    assert served.metric("outrider_prefill_replica_computed_tokens") >= remote
    assert texts(served, "first", num=2) == first[:2]
    assert served.metric("outrider_prefill_remote_tokens") == remote, "the pair holds these blocks now"
    eventually(lambda: served.metric("outrider_kv_cache_used_blocks") == 0)


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
    ours = model_version(str(folder / "target"))
    replace_file(folder / "target" / "model.safetensors", folder / "draft" / "model.safetensors")
    theirs = model_version(str(folder / "target"))
    served.kill("ServeReplica:outrider:Prefill")  # its successor loads the replaced file

    def is_refused() -> bool:
        served.stream(prompt=prompt(random.randrange(1 << 30)), max_tokens=1)
        return served.metric("outrider_prefill_transfers_failed", cause="mismatch") > 0

    eventually(is_refused)
    remote = served.metric("outrider_prefill_remote_tokens")
    assert texts(served, "refused") == expected
    assert served.metric("outrider_prefill_remote_tokens") == remote
    assert f"model_version is {theirs} here and {ours} there" in served.logs()


def replace_file(file: Path, other: Path) -> None:
    """Replace a file; processes that have the old one open keep it."""
    copy = file.with_suffix(".new")
    shutil.copyfile(other, copy)
    copy.rename(file)
