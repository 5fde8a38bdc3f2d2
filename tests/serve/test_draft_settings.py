"""Settings of drafts over HTTP: adaptive lengths, two drafts that work ahead, one of them with another tokenizer.

That is detected at start. Requests that name no method get the fastest by measurement.
"""

import json
import shutil
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.fixtures.checkpoints import write_checkpoint
from tests.engine.fixtures.pairs.foreign_pair import write_foreign_pair
from tests.serve.served_pair import ServedPair, SharedCluster, Stream, eventually, once, processes

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

PROMPT = [9, 12, 5, 20, 31]
NUM_TOKENS = 300


@pytest.fixture(scope="module")
def pair(cluster: SharedCluster, tmp_path_factory: pytest.TempPathFactory) -> ServedPair:
    folder = tmp_path_factory.mktemp("foreign")
    target = write_foreign_pair(folder).target
    num_tokens = json.loads((target / "config.json").read_text())["vocab_size"]
    write_checkpoint(folder / "near", seed=0, noise=0.02, vocab_size=num_tokens)
    shutil.copy(target / "tokenizer.json", folder / "near")
    served_pair = cluster.serve(
        folder,
        drafts={"near": str(folder / "near")},
        speculation={
            "adaptive": True,
            "num_tokens": 3,
            "max_num_tokens": 6,
            "mode": "async",
            "method": "auto",
            "target_itl_ms": 5000,
        },
    )
    eventually(lambda: served_pair.metric("outrider_draft_connected") == 2)
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


def test_requests_of_no_method_try_every_draft_and_have_the_targets_text(pair: ServedPair) -> None:
    def text(seed: int, **speculation: Any) -> list[int]:
        options = {"speculation": speculation}
        return pair.stream(prompt=PROMPT, temperature=1.0, seed=seed, max_tokens=60, extra_body=options).token_ids

    seeds = count()

    def has_tried(method: str) -> bool:
        seed = next(seeds)
        assert text(seed) == text(seed, enabled=False)
        return pair.metric("outrider_spec_decode_class_draft_tokens_per_pos", method=method) > 0

    for method in ("model", "near"):
        eventually(lambda method=method: has_tried(method))  # type: ignore[misc]
    assert pair.metric("outrider_spec_decode_speedup", **{"class": "near-sampled"}) > 0


def test_a_draft_that_is_killed_costs_no_token_and_the_other_goes_on(pair: ServedPair) -> None:
    plain = generate(pair, 1.0, enabled=False).token_ids
    num_connections = pair.metric("outrider_draft_num_connections")
    options = {"speculation": {"method": "near"}}
    killed = pair.stream(
        once(20, lambda: processes("DraftActor")[1].kill()),
        prompt=PROMPT,
        temperature=1.0,
        max_tokens=NUM_TOKENS,
        extra_body=options,
    )
    assert killed.token_ids == plain == generate(pair, 1.0).token_ids
    eventually(lambda: pair.metric("outrider_draft_num_connections") == num_connections + 1)
    eventually(lambda: pair.metric("outrider_draft_connected") == 2)


def test_one_of_two_drafts_is_exchanged_by_its_name(pair: ServedPair, tmp_path: Path) -> None:
    folder = Path(pair.file.deployment["applications"][0]["args"]["target"]["path"]).parent
    near, other = folder / "near", tmp_path / "other"
    shutil.copytree(near, other)

    def swap(method: str) -> httpx.Response:
        body = {"path": str(other), "wait_s": 120, "method": method}
        return httpx.post(f"{pair.url}/admin/drafts/swap", json=body, timeout=300.0)

    refused, answer = swap("far"), swap("near")
    assert refused.status_code == 400
    assert "choose from model, near" in refused.json()["error"]["message"]
    found = {each["method"]: (each["path"], each["is_deployed"]) for each in answer.json()["drafts"]}
    assert found == {"model": (str(folder / "draft"), True), "near": (str(other), False)}
    assert generate(pair, 1.0, method="near").token_ids == generate(pair, 1.0, enabled=False).token_ids
