"""Several pairs on one machine under agent sessions: what routing by prefix is worth against Ray Serve's own router.

    python -m bench.routing.fleet agent_text.jsonl.gz --pairs 4 --prefills 1 --sessions 8 --rounds 2

Sessions run in a closed loop: each sends its next call when the last one is answered, so a fleet that is slow is also
asked less. Every round starts the application afresh with one policy, so caches are cold and equal; rounds of the
policies alternate. Calls longer than `--max-prompt-tokens` end their session: prompts are never cut inside, which would
make unequal calls equal.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from openai import AsyncOpenAI
from tokenizers import Tokenizer

from bench.served.application import ServedApplication
from bench.simulator.trace_file import read_lines

HTTP_PORT = 8110
GRPC_PORT = 9110
FOLDER = Path(".cache/bench")
CALL_TIMEOUT_S = 300.0

Session = list[list[int]]  # the prompts of its calls, in order


@dataclass(frozen=True, slots=True)
class Call:
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
    calls = sorted(read_lines(path), key=lambda call: call["timestamp"])
    sessions: dict[str, Session] = {}
    ended: set[str] = set()
    for call in calls:
        name = call["session_id"]
        token_ids = tokenizer.encode(call["input"], add_special_tokens=False).ids
        if len(token_ids) > max_prompt_tokens:
            ended.add(name)
        if name not in ended:
            sessions.setdefault(name, []).append(token_ids)
    return list(sessions.values())


def _round(policy: str, sessions: Sequence[Session], args: argparse.Namespace) -> FleetRow:
    application = ServedApplication(_deploy_yaml(policy, args), f"http://127.0.0.1:{HTTP_PORT}")
    try:
        application.wait_until_ready()
        began_s = time.perf_counter()
        calls = asyncio.run(_closed_loop(sessions, args.sessions, args.tokens))
        seconds = time.perf_counter() - began_s
    finally:
        application.close()
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


def _deploy_yaml(policy: str, args: argparse.Namespace) -> Path:
    """Return the root deploy.yaml with more pairs, smaller caches and this policy, on ports of its own."""
    deploy = yaml.safe_load(Path("deploy.yaml").read_text(encoding="utf-8"))
    deploy["http_options"]["port"] = HTTP_PORT
    deploy["grpc_options"]["port"] = GRPC_PORT
    app_args = deploy["applications"][0]["args"]
    app_args["target"] = {**app_args["target"], "path": str(args.target.resolve()), "num_threads": 1}
    app_args["draft"] = {**app_args["draft"], "path": str(args.draft.resolve()), "num_threads": 1}
    app_args["cache"] = {"num_blocks": args.cache_blocks}
    app_args["pair"] = {"num_replicas": args.pairs}
    app_args["prefill"] = {"num_replicas": args.prefills}
    app_args["router"] = {"policy": policy, "index_timeout_ms": 500}  # all pairs and the index share this machine
    path = FOLDER / f"fleet-{policy}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(deploy, sort_keys=False), encoding="utf-8")
    return path


async def _closed_loop(sessions: Sequence[Session], num_at_once: int, num_tokens: int) -> list[Call]:
    waiting = list(reversed(sessions))
    calls: list[Call] = []
    base_url = f"http://127.0.0.1:{HTTP_PORT}/v1"
    async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=CALL_TIMEOUT_S) as client:

        async def run_sessions() -> None:
            while waiting:
                for prompt in waiting.pop():
                    calls.append(await _call(client, prompt, num_tokens))

        await asyncio.gather(*(run_sessions() for _ in range(num_at_once)))
    return calls


async def _call(client: AsyncOpenAI, prompt: list[int], num_tokens: int) -> Call:
    began_s = time.perf_counter()
    stream = await client.completions.create(
        model="outrider-demo",
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
    return Call(ttft_s, len(prompt), num_cached)


if __name__ == "__main__":
    main()
