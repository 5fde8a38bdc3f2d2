"""The head of a pair on Ray is exchanged over HTTP, and outlives its target only if it has served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.local.test_head_exchange import DEMO, other, write_head
from tests.serve.served_pair import ServedPair, SharedCluster, Stream, eventually, once

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
NUM_TOKENS = 400


def running(pair: ServedPair) -> dict[str, Any]:
    [found] = httpx.get(f"{pair.url}/admin/drafts", timeout=60.0).json()["drafts"]
    return dict(found)


def swap(pair: ServedPair, path: Path) -> None:
    answer = httpx.post(f"{pair.url}/admin/drafts/swap", json={"path": str(path), "wait_s": 120}, timeout=300.0)
    assert answer.status_code == 200, answer.text


def test_a_head_outlives_a_killed_target_once_it_has_served(cluster: SharedCluster, tmp_path: Path) -> None:
    deployed, new = DEMO / "eagle3", write_head(tmp_path / "new", other)
    pair = cluster.serve(DEMO, draft={"kind": "eagle3", "path": str(deployed)})

    def text(on_tokens: Any = lambda _: None, **options: Any) -> Stream:
        return pair.stream(on_tokens, prompt="def add(items, value):\n", max_tokens=NUM_TOKENS, **options)

    plain = text(extra_body={"speculation": {"enabled": False}}).token_ids
    swap(pair, new)
    assert text(once(20, lambda: pair.kill("TargetActor"))).token_ids == plain, "the stream goes on"
    eventually(lambda: running(pair)["path"] == str(deployed))
    assert running(pair)["canary"]["reason"] == "the target ended before it had served"
    swap(pair, new)
    assert text().token_ids == plain
    assert text(once(20, lambda: pair.kill("TargetActor"))).token_ids == plain
    pair.metric("outrider_draft_info")  # it reads the new target's numbers
    found = running(pair)
    assert (found["path"], found.get("canary")) == (str(new), None)
