"""The cost of routing by prefix to a request: the choice alone, and an ingress replica's requests per second.

    python -m bench.routing.router_cost --workers 2 8 32 --seconds 4

**Choices**: the Serve routers themselves, `PrefixAwareRouter` with its index actor in a process of its own and Serve's
`PowerOfTwoChoicesRequestRouter`, choose among fake replicas; nothing is sent. A process beside them reports to the
index for all the workers. **Ingress**: one real ingress replica over HTTP, in front of two replicas that answer with
one token at once, with either router, rounds alternating.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import psutil
import ray
from ray import serve
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, RequestMetadata
from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve.request_router import PendingRequest, RequestRouter

from bench.routing.fake_pairs import (
    CARD,
    NUM_PROMPTS,
    PROMPT_TOKENS,
    ROUTER,
    FakePair,
    FakeReplica,
    prompt,
    start_fleet,
)
from cluster.local.local_cluster import LocalCluster
from cluster.local.ports import free_port
from protos.messages import GenerateRequest
from router.config import IngressConfig
from router.ingress import Ingress
from router.routing.prompt_keys import PromptKeys
from router.routing.routed_call import RoutedCall
from router.routing.serve_router import PrefixAwareRouter

NUM_AT_ONCE = 16
NUM_WARM_UP = 50
WARM_UP_PAUSE_S = 2.0
DEADLINE_S = 0.05  # what deploy.yaml gives the index by default; here it is waited for longer, to see how late it is
TOKENIZER = Path("models/demo/target")
ROUTERS: dict[str, type[RequestRouter]] = {"power_of_two": PowerOfTwoChoicesRequestRouter, "prefix": PrefixAwareRouter}


@dataclass(frozen=True, slots=True)
class Figures:
    """The cost of one operation.

    Its duration, the operations per second while `NUM_AT_ONCE` run at a time, and the processor time of one in the
    ingress's process, which other load on the machine does not change.
    """

    p50_s: float
    p99_s: float
    per_second: float
    processor_s: float

    def __str__(self) -> str:
        times = f"p50 {self.p50_s * 1000:7.2f} ms   p99 {self.p99_s * 1000:7.2f} ms"
        return f"{times}   {self.per_second:7.0f} per second   processor {self.processor_s * 1000:6.3f} ms"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--choices", type=int, default=500, help="measured per router and number of workers")
    parser.add_argument("--reports", type=float, default=2.0, help="reports per second of each worker meanwhile")
    parser.add_argument("--seconds", type=float, default=4.0, help="per round at the ingress")
    parser.add_argument("--rounds", type=int, default=3, help="per router at the ingress")
    options = parser.parse_args()
    print(f"block keys of {PROMPT_TOKENS} tokens: {_keys_s() * 1000:.2f} ms")
    cluster = LocalCluster()
    try:
        cluster.start(num_cpus=4)
        for num_workers in options.workers:
            asyncio.run(_print_choices(num_workers, options.choices, options.reports))
        _print_ingress(options.rounds, options.seconds)
    finally:
        cluster.stop()


def _keys_s() -> float:
    prompt_keys = PromptKeys()
    prompt_keys.learn(CARD)
    requests = [GenerateRequest(str(number), prompt(number)) for number in range(NUM_PROMPTS)]
    started_s = time.process_time()
    for request in requests:
        prompt_keys.keys_of(request)
    return (time.process_time() - started_s) / NUM_PROMPTS


async def _print_choices(num_workers: int, num_choices: int, reports_per_s: float) -> None:
    deployment = DeploymentID("Pair", f"choices-{num_workers}")
    replicas = [FakeReplica(f"worker{number}", deployment) for number in range(num_workers)]
    fleet = start_fleet(deployment.app_name, [replica.name for replica in replicas], reports_per_s)
    for name, kind in ROUTERS.items():
        router = kind(
            deployment_id=deployment, handle_source=DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True
        )
        router.initialize_state(**(asdict(ROUTER) if kind is PrefixAwareRouter else {}))
        router.update_replicas(cast(Any, replicas))
        await asyncio.sleep(WARM_UP_PAUSE_S)
        calls = _calls()
        await _figures(router, calls, NUM_WARM_UP)
        figures, chosen = await _figures(router, calls, num_choices)
        num_late = sum(call.route is not None and call.route.decision_s > DEADLINE_S for call in chosen)
        late = f"   {num_late} of {len(chosen)} later than {DEADLINE_S} s" if kind is PrefixAwareRouter else ""
        print(f"{num_workers:3} workers  {name:14}{figures}{late}", flush=True)
    ray.kill(fleet)


def _calls() -> Iterator[RoutedCall]:
    prompt_keys = PromptKeys()
    prompt_keys.learn(CARD)
    requests = [GenerateRequest("", prompt(number)) for number in range(NUM_PROMPTS)]
    keys = [prompt_keys.keys_of(request) for request in requests]
    for number in itertools.count():
        request = GenerateRequest(str(number), requests[number % NUM_PROMPTS].prompt_token_ids)
        yield RoutedCall(request, keys[number % NUM_PROMPTS])


async def _figures(router: RequestRouter, calls: Iterator[RoutedCall], number: int) -> tuple[Figures, list[RoutedCall]]:
    """`number` choices one after the other for their times, then as many `NUM_AT_ONCE` at a time for the rate."""
    chosen = list(itertools.islice(calls, 2 * number))
    began_s = time.process_time()
    times_s = [await _timed(lambda call=call: _choose(router, call)) for call in chosen[:number]]  # type: ignore[misc]
    processor_s = (time.process_time() - began_s) / number
    waiting = iter(chosen[number:])

    async def choose_next() -> None:
        for call in waiting:
            await _choose(router, call)

    seconds = await _timed(lambda: asyncio.gather(*(choose_next() for _ in range(NUM_AT_ONCE))))
    p50_s, p99_s = np.percentile(times_s, [50, 99])
    return Figures(float(p50_s), float(p99_s), number / seconds, processor_s), chosen


async def _choose(router: RequestRouter, call: RoutedCall) -> None:
    metadata = RequestMetadata(
        request_id=call.request.request_id, internal_request_id=call.request.request_id, call_method="generate"
    )
    await router._choose_replica_for_request(PendingRequest(args=[call], kwargs={}, metadata=metadata))


async def _timed(run: Callable[[], Awaitable[object]]) -> float:
    started_s = time.perf_counter()
    await run()
    return time.perf_counter() - started_s


def _print_ingress(num_rounds: int, seconds: float) -> None:
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    figures: dict[str, list[Figures]] = {name: [] for name in ROUTERS}
    for _ in range(num_rounds):
        for name in ROUTERS:
            serve.run(_application(name), name="ingress-cost", route_prefix="/")
            figures[name].append(asyncio.run(_load(f"http://127.0.0.1:{port}/v1/completions", seconds)))
            print(f"ingress      {name:14}{figures[name][-1]}", flush=True)
    for name, rounds in figures.items():
        medians = np.median([(each.p50_s, each.p99_s, each.per_second, each.processor_s) for each in rounds], axis=0)
        print(f"ingress      {name:14}{Figures(*medians)}   median of {num_rounds}")


def _application(name: str) -> serve.Application:
    is_prefix = ROUTERS[name] is PrefixAwareRouter
    options: dict[str, Any] = {"num_replicas": 2, "max_ongoing_requests": 1024, "ray_actor_options": {"num_cpus": 0.1}}
    if is_prefix:
        options["request_router_config"] = {
            "request_router_class": "router.routing.serve_router:PrefixAwareRouter",
            "request_router_kwargs": asdict(ROUTER),
        }
    pair = serve.deployment(name="Pair", **options)(FakePair)
    ingress = cast(serve.Deployment, Ingress).options(max_ongoing_requests=1024, ray_actor_options={"num_cpus": 0.1})
    return ingress.bind(pair.bind(is_prefix), IngressConfig("bench", str(TOKENIZER.resolve())))


async def _load(url: str, seconds: float) -> Figures:
    """`NUM_AT_ONCE` clients in a closed loop; the first second does not count. Times are those of a client."""
    times_s: list[float] = []
    num_requests = 0
    begins_s = time.perf_counter() + 1.0
    processor_began_s = _processor_s("Ingress")
    async with httpx.AsyncClient(timeout=30.0) as client:

        async def ask(first: int) -> None:
            nonlocal num_requests
            for number in itertools.count(first, NUM_AT_ONCE):
                started_s = time.perf_counter()
                if started_s > begins_s + seconds:
                    return
                body = {"model": "bench", "prompt": list(prompt(number % NUM_PROMPTS)), "max_tokens": 1}
                (await client.post(url, json=body)).raise_for_status()
                num_requests += 1
                if started_s > begins_s:
                    times_s.append(time.perf_counter() - started_s)

        await asyncio.gather(*(ask(first) for first in range(NUM_AT_ONCE)))
    p50_s, p99_s = np.percentile(times_s, [50, 99])
    processor_s = (_processor_s("Ingress") - processor_began_s) / num_requests
    return Figures(float(p50_s), float(p99_s), len(times_s) / seconds, processor_s)


def _processor_s(deployment: str) -> float:
    """Processor time that the replicas of a deployment have had so far."""
    processes = psutil.Process().children(recursive=True)
    times = [each.cpu_times() for each in processes if f":{deployment}" in " ".join(each.cmdline()[:1])]
    return sum(each.user + each.system for each in times)


if __name__ == "__main__":
    main()
