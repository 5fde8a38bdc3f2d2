"""Two pairs and the router's index on Ray: requests follow their prefix, whoever dies meanwhile.

The tests run in order and share an application.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Thread

import grpc
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.serve.served_pair import MODEL, ServedPair, SharedCluster, eventually, once, processes
from tests.serve.tiny_models import CHARACTERS, write_pair

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

LENGTH = 320  # characters, which are tokens; blocks have 16


@pytest.fixture(scope="module")
def served(cluster: SharedCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPair]:
    folder = tmp_path_factory.mktemp("tiny")
    write_pair(folder)
    changes = {
        "draft": {"kind": "none"},
        "speculation": {"adaptive": False},
        "pair": {"num_replicas": 2},
        "router": {"index_timeout_ms": 10_000},  # a shared machine may be slow, and the claims here are others
    }
    with cluster.serving(folder, **changes) as served_pair:
        yield served_pair


def text(seed: int, length: int = LENGTH) -> str:
    return "".join(random.Random(seed).choices(CHARACTERS, k=length))


def ask(served: ServedPair, prompt: str, **options: object) -> int:
    """Serve a prompt; how many of its tokens were cached."""
    answer = served.client.completions.create(model=MODEL, prompt=prompt, max_tokens=2, seed=1, **options)  # type: ignore[call-overload]
    return answer.usage.prompt_tokens_details.cached_tokens


def knows(served: ServedPair, num_blocks: int) -> bool:
    """Whether the index answers, and knows so many blocks; asked with a request that has none."""
    num_answers = served.metric("outrider_router_decisions", basis="index")
    ask(served, "ab")
    has_answered = served.metric("outrider_router_decisions", basis="index") > num_answers
    return has_answered and served.metric("outrider_router_index_blocks") >= num_blocks


def test_requests_of_one_prefix_land_where_it_is(served: ServedPair):
    prompts = [text(seed) for seed in range(8)]
    assert [ask(served, prompt) for prompt in prompts] == [0] * 8
    eventually(lambda: knows(served, 8 * LENGTH // 16))
    for turn in range(3):
        cached = [ask(served, prompt + text(100 + turn, 16 * turn + 5)) for prompt in prompts]
        assert all(number >= LENGTH for number in cached)


def test_both_pairs_hold_their_share(served: ServedPair):
    assert len(processes("TargetActor")) == 2
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: ask(served, text(seed)), range(20, 36)))
    hits, queries = (served.metric(f"outrider_prefix_cache_{name}") for name in ("hits", "queries"))
    assert 0 < hits < queries


def test_the_choices_of_one_request_are_all_served(served: ServedPair):
    """They share Serve's id of their client request, which its router would take for one call."""
    answer = served.client.completions.create(model=MODEL, prompt=[text(0), text(1)], n=4, max_tokens=2, timeout=170.0)
    assert len(answer.choices) == 8


def test_a_cache_salt_keeps_prefixes_apart(served: ServedPair):
    assert ask(served, text(0), extra_body={"cache_salt": "mine"}) == 0
    assert ask(served, text(0)) >= LENGTH - 16


def test_the_routers_own_account_is_in_the_metrics(served: ServedPair):
    names = ("hit_blocks", "achievable_blocks", "stale_answers", "blind")
    before = [served.metric(f"outrider_router_{name}") for name in names]
    for seed in range(8):
        ask(served, text(seed))
    after = [served.metric(f"outrider_router_{name}") for name in names]
    hit, achievable, stale, blind = (new - old for new, old in zip(after, before, strict=True))
    assert hit == achievable >= 8 * (LENGTH // 16 - 1)
    assert (stale, blind) == (0, 0)


def test_requests_are_served_without_the_index_and_prefixes_found_again_after(served: ServedPair):
    prompts = [text(seed) for seed in range(8)]
    known = int(served.metric("outrider_router_index_blocks"))
    [index] = processes("IndexActor")
    index.kill()
    for prompt in prompts:
        ask(served, prompt)
    eventually(lambda: knows(served, known))
    assert processes("IndexActor") not in ([], [index])
    assert all(ask(served, prompt) >= LENGTH - 16 for prompt in prompts)


def test_a_dead_targets_blocks_vanish_and_its_prefixes_are_computed_elsewhere(served: ServedPair):
    victim = processes("TargetActor")[0]
    known = served.metric("outrider_router_index_blocks")
    victim.kill()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda seed: ask(served, text(seed)), range(8)))  # none fails
    eventually(lambda: knows(served, 1) and served.metric("outrider_router_index_blocks") < known)
    stale = served.metric("outrider_router_stale_answers")
    assert all(ask(served, text(seed)) >= LENGTH - 16 for seed in range(8))
    assert served.metric("outrider_router_stale_answers") == stale


def test_a_stream_that_no_pair_is_left_for_ends_with_an_error_and_who_watches_is_let_go(served: ServedPair):
    deleting = Thread(target=served.cluster.undeploy)
    with grpc.insecure_channel(f"127.0.0.1:{served.file.grpc_port}") as channel:
        watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=120.0)
        next(watching)  # a target may still be restarting
        with pytest.raises(openai.APIError, match="being taken down"):
            served.stream(once(100, deleting.start), temperature=1.0, max_tokens=3000)
        deleting.join(60.0)
        assert not deleting.is_alive()
