"""A served target with draft heads: no draft process, remote prefill, the same tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.engine.fixtures.checkpoints import VOCAB_SIZE
from tests.engine.fixtures.eagle3_fixtures import head_tensors, write_original
from tests.engine.fixtures.heads_fixtures import fit_medusa, write_llama_with_mtp
from tests.serve.served_pair import MODEL, ServedPair, SharedCluster, eventually

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

PREFILL = {"num_replicas": 1, "min_remote_prefill_tokens": 64, "chunk_tokens": 64, "num_threads": 1}
PROMPT = random.Random(0).choices(range(1, VOCAB_SIZE), k=300)
TAPS = (1, 2)


@dataclass(frozen=True, slots=True)
class Served:
    pair: ServedPair
    kind: str


@pytest.fixture(scope="module", params=["mtp", "medusa", "eagle3"])
def served(
    request: pytest.FixtureRequest, cluster: SharedCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder, kind = tmp_path_factory.mktemp("heads"), request.param
    write_llama_with_mtp(folder / "target")
    draft = {"kind": kind, **write_head(folder, kind)}
    speculation = {"num_tokens": 3, "adaptive": False}
    with cluster.serving(folder, draft=draft, speculation=speculation, prefill=PREFILL) as pair:
        yield Served(pair, kind)


def write_head(folder: Path, kind: str) -> dict[str, str]:
    """Write the head's checkpoint unless it is part of the target's; return its keys in deploy.yaml."""
    if kind == "medusa":
        fit_medusa(folder / kind, folder / "target")
    elif kind == "eagle3":
        write_original(folder / kind, head_tensors(folder / "target", len(TAPS)), TAPS)
    return {} if kind == "mtp" else {"path": str(folder / kind)}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_heads_draft_after_remote_prefill_and_change_no_token(served: Served, temperature: float) -> None:
    pair, salt = served.pair, {"cache_salt": str(temperature)}
    remote = pair.metric("outrider_prefill_remote_tokens")
    drafted = pair.stream(prompt=PROMPT, temperature=temperature, extra_body=salt)
    assert pair.metric("outrider_prefill_remote_tokens") > remote
    assert drafted.speculation["num_accepted_draft_tokens"] > 0
    for wish in ({"enabled": False}, {"method": "hybrid", "num_tokens": 5}, {"verify": "coupled"}):
        other = pair.stream(prompt=PROMPT, temperature=temperature, extra_body={**salt, "speculation": wish})
        assert other.token_ids == drafted.token_ids
    eventually(lambda: pair.metric("outrider_kv_cache_used_blocks") == 0)


def test_an_unavailable_method_is_refused_with_the_available_ones(served: Served) -> None:
    wish = {"model": MODEL, "prompt": PROMPT, "speculation": {"method": "model"}}
    answer = httpx.post(f"{served.pair.url}/v1/completions", json=wish, timeout=60.0)
    assert answer.status_code == 400
    assert f"{served.kind}, hybrid, suffix, ngram, none" in answer.json()["error"]["message"]
