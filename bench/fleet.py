"""Several pairs on one machine under agent sessions: the gain of routing by prefix over Ray Serve's own router.

    python -m bench.fleet agent_text.jsonl.gz --pairs 4 --prefills 1 --sessions 8 --rounds 2

Sessions run in a closed loop: each sends its next call when the last one is answered, so a slow fleet gets fewer
calls. Every round starts the application again with one policy, so caches are cold and equal. Rounds of the policies
alternate. A call longer than `--max-prompt-tokens` ends its session: cut prompts would make unequal calls equal.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from openai import AsyncOpenAI
from tokenizers import Tokenizer

from bench.contenders.prompts import recorded_calls
from bench.padded_pair import CACHE
from bench.served.application import BASE_URL, MODEL_ID, DeployArgs, start_served

CALL_TIMEOUT_S = 300.0

Session = list[list[int]]  # the prompts of its calls, in order


@dataclass(frozen=True, slots=True)
class FleetCall:
    """One answered call, as its client saw it."""

    ttft_s: float
    num_prompt_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class FleetRow:
    """One round of one policy."""

    policy: str
    num_calls: int
    hit_rate: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    seconds: float


def main() -> None:
    """Measure every policy in turn and print the rows with their medians."""
    args = _parse_args()
    sessions = read_sessions(args.trace, args.target / "tokenizer.json", args.max_prompt_tokens)[: args.num_sessions]
    rows: list[FleetRow] = []
    for _ in range(args.rounds):
        for policy in args.policies:
            rows.append(_round(policy, sessions, args))
            _print_row(asdict(rows[-1]))
    for policy in args.policies:
        _print_row(_median(policy, rows))
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="jsonl of agent calls: input, session_id, timestamp")
    parser.add_argument("--policies", nargs="+", default=["prefix", "power_of_two"])
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--prefills", type=int, default=1, help="prefill replicas")
    parser.add_argument("--cache-blocks", type=int, default=800, help="KV blocks of 16 tokens per pair")
    parser.add_argument("--sessions", type=int, default=8, help="sessions at once")
    parser.add_argument("--num-sessions", type=int, default=None, help="use only the first so many")
    parser.add_argument("--max-prompt-tokens", type=int, default=6000)
    parser.add_argument("--tokens", type=int, default=16, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--target", type=Path, default=Path("models/demo/target"))
    parser.add_argument("--draft", type=Path, default=Path("models/demo/draft"))
    parser.add_argument("--json", type=Path, help="write the rows here too")
    return parser.parse_args()


def read_sessions(path: Path, tokenizer_file: Path, max_prompt_tokens: int) -> list[Session]:
    """Return the calls of each session as token ids, up to the first one that is too long."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    sessions: dict[str, Session] = {}
    ended: set[str] = set()
    for call in recorded_calls(path):
        name = call["session_id"]
        token_ids = tokenizer.encode(call["input"], add_special_tokens=False).ids
        if len(token_ids) > max_prompt_tokens:
            ended.add(name)
        if name not in ended:
            sessions.setdefault(name, []).append(token_ids)
    return list(sessions.values())


def _round(policy: str, sessions: Sequence[Session], args: argparse.Namespace) -> FleetRow:
    with closing(start_served(CACHE / f"fleet-{policy}.yaml", partial(_change, policy, args))) as application:
        application.wait_until_ready()
        began_s = time.perf_counter()
        calls = asyncio.run(_closed_loop(sessions, args.sessions, args.tokens))
        seconds = time.perf_counter() - began_s
    ttfts = [call.ttft_s for call in calls]
    return FleetRow(
        policy=policy,
        num_calls=len(calls),
        hit_rate=sum(call.num_cached_tokens for call in calls) / sum(call.num_prompt_tokens for call in calls),
        ttft_mean_s=statistics.fmean(ttfts),
        ttft_p50_s=float(np.percentile(ttfts, 50)),
        ttft_p95_s=float(np.percentile(ttfts, 95)),
        seconds=seconds,
    )


def _print_row(row: dict[str, Any]) -> None:
    figures = "  ".join(f"{key} {value:.3f}" for key, value in row.items() if key != "policy")
    print(f"{row['policy']:30} {figures}", flush=True)


def _median(policy: str, rows: Sequence[FleetRow]) -> dict[str, Any]:
    """Return the median of every figure of a policy's rounds."""
    of_policy = [asdict(row) for row in rows if row.policy == policy]
    figures = {key: statistics.median(row[key] for row in of_policy) for key in of_policy[0] if key != "policy"}
    return {"policy": f"{policy}, median of {len(of_policy)}", **figures}


def _change(policy: str, args: argparse.Namespace, app_args: DeployArgs) -> None:
    """Deploy more pairs with smaller caches and this policy."""
    app_args["model_id"] = MODEL_ID
    app_args["target"] |= {"path": str(args.target.resolve()), "num_threads": 1}
    app_args["draft"] |= {"path": str(args.draft.resolve()), "num_threads": 1}
    app_args["cache"] = {"num_blocks": args.cache_blocks}
    app_args["pair"] = {"num_replicas": args.pairs}
    app_args["prefill"] = {"num_replicas": args.prefills}
    app_args["router"] = {"policy": policy, "index_timeout_ms": 500}  # all pairs and the index share this machine


async def _closed_loop(sessions: Sequence[Session], num_at_once: int, num_tokens: int) -> list[FleetCall]:
    waiting = list(reversed(sessions))
    calls: list[FleetCall] = []
    async with AsyncOpenAI(base_url=BASE_URL, api_key="none", max_retries=0, timeout=CALL_TIMEOUT_S) as client:

        async def run_sessions() -> None:
            while waiting:
                for prompt in waiting.pop():
                    calls.append(await _call(client, prompt, num_tokens))

        await asyncio.gather(*(run_sessions() for _ in range(num_at_once)))
    return calls


async def _call(client: AsyncOpenAI, prompt: list[int], num_tokens: int) -> FleetCall:
    began_s = time.perf_counter()
    stream = await client.completions.create(
        model=MODEL_ID,
        prompt=prompt,
        max_tokens=num_tokens,
        temperature=0.0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    ttft_s = None
    num_cached = 0
    async for chunk in stream:
        if ttft_s is None and chunk.choices:
            ttft_s = time.perf_counter() - began_s
        if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
            num_cached = chunk.usage.prompt_tokens_details.cached_tokens or 0
    assert ttft_s is not None, "an answer has at least one token"
    return FleetCall(ttft_s, len(prompt), num_cached)


if __name__ == "__main__":
    main()
