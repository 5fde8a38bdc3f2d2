"""Two pairs and the router's index on Ray: requests follow their prefix, also when the index or a target is killed.

The tests run in order and share an application.
"""

from __future__ import annotations

import itertools
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread

import grpc
import openai
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ray import serve

from tests.serve.bystanders import Bystanders, Habits, total
from tests.serve.served_pair import MODEL, ServedPair, SharedCluster, eventually, once, processes
from tests.serve.tiny_models import CHARACTERS

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

QUERIED = "outrider_prefix_cache_queries"
LENGTH = 320  # characters, which are tokens; blocks have 16


@pytest.fixture(scope="module")
def served(cluster: SharedCluster, tiny_pair: Path) -> ServedPair:
    changes = {
        "draft": {"kind": "none"},
        "speculation": {"adaptive": False},
        "pair": {"num_replicas": 2},
        "cache": {"num_blocks": 4096},  # no test evicts a prefix of another
        "router": {"index_timeout_ms": 10_000},  # a shared machine may be slow, and the claims here are others
    }
    return cluster.serve(tiny_pair, **changes)


def text(seed: int, length: int = LENGTH) -> str:
    return "".join(random.Random(seed).choices(CHARACTERS, k=length))


def ask(served: ServedPair, prompt: str, **options: object) -> int:
    """Serve a prompt; return how many of its tokens were cached."""
    fields = {"max_tokens": 2, "seed": 1, **options}
    answer = served.client.completions.create(model=MODEL, prompt=prompt, **fields)  # type: ignore[call-overload]
    return answer.usage.prompt_tokens_details.cached_tokens


def index_has(served: ServedPair, num_blocks: int) -> bool:
    """True if the index answers a request that has no blocks, and knows at least `num_blocks`."""
    num_answers = served.metric("outrider_router_decisions", basis="index")
    ask(served, "ab")
    has_answered = served.metric("outrider_router_decisions", basis="index") > num_answers
    return has_answered and served.metric("outrider_router_index_blocks") >= num_blocks


def test_requests_are_routed_to_the_pair_that_caches_their_prefix(served: ServedPair):
    prompts = [text(seed) for seed in range(8)]
    assert [ask(served, prompt) for prompt in prompts] == [0] * 8
    eventually(lambda: index_has(served, 8 * LENGTH // 16))
    for turn in range(3):
        cached = [ask(served, prompt + text(100 + turn, 16 * turn + 5)) for prompt in prompts]
        assert all(number >= LENGTH for number in cached)


def test_two_targets_run_and_some_queries_hit_the_prefix_cache(served: ServedPair):
    assert len(processes("TargetActor")) == 2
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: ask(served, text(seed)), range(20, 36)))
    hits, queries = (served.metric(f"outrider_prefix_cache_{name}") for name in ("hits", "queries"))
    assert 0 < hits < queries


def test_all_choices_of_one_request_are_served(served: ServedPair):
    """The choices share Serve's request id, which its router would take for one call."""
    answer = served.client.completions.create(model=MODEL, prompt=[text(0), text(1)], n=4, max_tokens=2, timeout=170.0)
    assert len(answer.choices) == 8


def test_a_cache_salt_keeps_prefixes_apart(served: ServedPair):
    assert ask(served, text(0), extra_body={"cache_salt": "mine"}) == 0
    assert ask(served, text(0)) >= LENGTH - 16


def test_the_audit_of_routing_is_in_the_metrics(served: ServedPair):
    names = ("hit_blocks", "achievable_blocks", "stale_answers", "blind")
    before = [served.metric(f"outrider_router_{name}") for name in names]
    for seed in range(8):
        ask(served, text(seed))
    after = [served.metric(f"outrider_router_{name}") for name in names]
    hit, achievable, stale, blind = (new - old for new, old in zip(after, before, strict=True))
    assert hit == achievable >= 8 * (LENGTH // 16 - 1)
    assert (stale, blind) == (0, 0)


def test_two_pairs_that_hold_a_hot_prefix_share_its_requests(served: ServedPair):
    """Requests with long ends copy the prefix to both: waiting for one costs more than reading the prefix again."""
    prefix = text(50)
    ends = (text(seed) for seed in itertools.count(60))

    def ask_all(prompts: list[str], num_tokens: int) -> list[float]:
        """Ask 16 at a time. Returns how many tokens of prompts each pair got."""
        before = served.by_replica(QUERIED)
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda prompt: ask(served, prompt, max_tokens=num_tokens), prompts))
        return [number - before[name] for name, number in served.by_replica(QUERIED).items()]

    # A fast machine may read the long ends one after another without a wait: then more come.
    eventually(lambda: min(ask_all([prefix + next(ends) for _ in range(8)], 96)) > 0)
    shares = ask_all([prefix] * 64, 32)
    assert sum(shares) >= 64 * LENGTH
    assert min(shares) > sum(shares) / 4


def test_a_killed_index_costs_no_request_and_knows_the_prefixes_again(served: ServedPair):
    prompts = [text(seed) for seed in range(8)]
    known = int(served.metric("outrider_router_index_blocks"))
    [index] = processes("IndexActor")
    index.kill()
    for prompt in prompts:
        ask(served, prompt)
    eventually(lambda: index_has(served, known))
    assert processes("IndexActor") not in ([], [index])
    assert all(ask(served, prompt) >= LENGTH - 16 for prompt in prompts)


def test_a_killed_target_loses_its_blocks_in_the_index_and_prefixes_move(served: ServedPair):
    victim = processes("TargetActor")[0]
    known = served.metric("outrider_router_index_blocks")
    victim.kill()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda seed: ask(served, text(seed)), range(8)))  # none fails
    eventually(lambda: index_has(served, 1) and served.metric("outrider_router_index_blocks") < known)
    stale = served.metric("outrider_router_stale_answers")
    assert all(ask(served, text(seed)) >= LENGTH - 16 for seed in range(8))
    assert served.metric("outrider_router_stale_answers") == stale


@pytest.mark.parametrize(
    ("name", "number"),
    [("TargetActor", signal.SIGSTOP), ("ServeReplica:outrider:Pair", signal.SIGKILL)],
)
def test_streams_do_not_change_while_a_process_is_stopped_or_killed(
    served: ServedPair, name: str, number: signal.Signals
):
    eventually(lambda: len(processes(name)) == 2)
    with Bystanders(served.url, MODEL, Habits(num_tokens=150)) as bystanders:
        victim = processes(name)[0]
        victim.send_signal(number)
        stays = [bystanders.report()]
        eventually(lambda: stays.append(bystanders.report()) or total(stays).num_streams >= 3)  # type: ignore[func-returns-value]
        if number is signal.SIGSTOP:
            with suppress(psutil.NoSuchProcess):  # one that is silent for too long is replaced
                victim.resume()
            stays.append(bystanders.report())
        eventually(lambda: stays.append(bystanders.report()) or total(stays).num_streams >= 6)  # type: ignore[func-returns-value]
    stay = total(stays)
    assert (stay.num_changed, stay.num_tokens_off, stay.failures) == (0, 0, ())


def test_a_file_without_applications_ends_streams_after_their_grace_and_health_watches(served: ServedPair):
    def stop() -> None:
        """Follow docs/deploy.md."""
        served.cluster.deploy(replace(served.file, deployment={**served.file.deployment, "applications": []}))
        eventually(lambda: not serve.status().applications)

    deleting = Thread(target=stop)
    with grpc.insecure_channel(f"127.0.0.1:{served.file.grpc_port}") as channel:
        watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=120.0)
        next(watching)  # a target may still be restarting
        with pytest.raises(openai.APIError, match="being taken down"):
            served.stream(once(100, deleting.start), temperature=1.0, n=8, max_tokens=3000)  # outlasts the grace
        deleting.join(60.0)
        assert not deleting.is_alive()
