"""Dynamo's KV indexer, the part of its router that knows caches, reads a server's events and finds its prefixes."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

URL = os.environ["OUTRIDER_URL"]
EVENTS = os.environ.get("KV_EVENTS", "tcp://127.0.0.1:5557")  # pair.kv_events.endpoint
REPLAY = os.environ.get("KV_REPLAY", "tcp://127.0.0.1:5657")  # a hundred ports above
BLOCK = int(os.environ.get("BLOCK_TOKENS", "16"))
PORT = int(os.environ.get("INDEXER_PORT", "8798"))
DEADLINE_S = 30.0


def post(url: str, body: dict[str, Any]) -> Any:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def complete() -> list[int]:
    """Have the server read a new prompt; return its tokens."""
    words = " ".join(f"word{random.randrange(10**6)}" for _ in range(40))
    answer = post(f"{URL}/v1/completions", {"prompt": words, "max_tokens": 4, "return_token_ids": True})
    return list(answer["choices"][0]["prompt_token_ids"])


def matched(token_ids: list[int]) -> int:
    """Return the number of leading tokens that the indexer knows as cached."""
    found = post(f"http://127.0.0.1:{PORT}/query", {"model_name": "outrider", "token_ids": token_ids})
    return int(found["scores"].get("1", {}).get("0", 0))


def wait_for(condition: Any, what: str) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < end_s:
        try:
            if condition():
                return
        except (urllib.error.URLError, ConnectionError):
            pass
        time.sleep(0.2)
    raise SystemExit(f"{what}: not within {DEADLINE_S:.0f} s")


def main() -> None:
    missed_ids = complete()  # before anybody listens
    worker = {"instance_id": 1, "endpoint": EVENTS, "replay_endpoint": REPLAY, "block_size": BLOCK}
    indexer = subprocess.Popen([sys.executable, "-m", "dynamo.indexer", "--port", str(PORT)])
    try:
        url = f"http://127.0.0.1:{PORT}/register"
        wait_for(lambda: post(url, {**worker, "model_name": "outrider"})["status"] == "ok", "the indexer's start")
        token_ids = complete()
        whole = (len(token_ids) - 1) // BLOCK * BLOCK
        # Each further prompt shows the indexer the events it missed while it connected.
        wait_for(lambda: complete() and matched(token_ids) >= whole, "the prompt's blocks")
        wait_for(lambda: matched(missed_ids) >= (len(missed_ids) - 1) // BLOCK * BLOCK, "the blocks from before")
        half = token_ids[: whole // 2]
        assert matched([*half, *([1] * BLOCK)]) == len(half) // BLOCK * BLOCK
        assert matched(token_ids[1:]) == 0
        print(f"{matched(token_ids)} of {len(token_ids)} tokens found; {matched(half)} of {len(half)}; 0 of others")
    finally:
        indexer.terminate()
        indexer.wait(10)


if __name__ == "__main__":
    main()
