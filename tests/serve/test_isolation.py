"""Two tenants share a pair, and neither learns of the other's prompts: not by counts, not by times."""

import random
import statistics
import time

import pytest

from tests.engine.fixtures.pairs.foreign_pair import write_foreign_pair
from tests.serve.served_pair import MODEL, ServedPair, SharedCluster

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

SECOND_KEY = "key-of-second"
PROBE_LENGTH = 440
NUM_PROBES = 21  # medians of fewer may not distinguish a cached prompt from a new one


@pytest.fixture(scope="module")
def pair(cluster: SharedCluster, tmp_path_factory: pytest.TempPathFactory) -> ServedPair:
    """Every text that repeats another is drafted from it, whether that pays or not."""
    folder = tmp_path_factory.mktemp("tenants")
    write_foreign_pair(folder)
    keys = folder / "keys"
    keys.write_text(f"none tenant=first\n{SECOND_KEY} tenant=second\n")
    changes = {"draft": {"kind": "none"}, "speculation": {"adaptive": False}}
    return cluster.serve(folder, ingress={"api_keys_file": str(keys)}, **changes)


def test_a_tenant_finds_nothing_of_another_by_counts_or_times(pair: ServedPair) -> None:
    """The first tenant sends each text twice, then the second sends it, also with the first one's salt."""
    clients = {"new": pair.client, "again": pair.client, "second": pair.client.with_options(api_key=SECOND_KEY)}
    cached, accepted, seconds = ({name: [] for name in clients} for _ in range(3))
    options = {"cache_salt": "ours", "ignore_eos": True, "speculation": {"method": "suffix"}}
    for probe in range(NUM_PROBES):
        prompt = random.Random(probe).choices(range(4, 46), k=PROBE_LENGTH)
        for name, client in clients.items():
            began_s = time.monotonic()
            answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=48, seed=1, extra_body=options)
            seconds[name].append(time.monotonic() - began_s)
            cached[name].append(answer.usage.prompt_tokens_details.cached_tokens)
            accepted[name].append(answer.metrics["speculative_decoding"]["num_accepted_draft_tokens"])
    assert not any(cached["new"])
    assert not any(cached["second"])
    assert min(cached["again"]) >= PROBE_LENGTH - 32, "the probe has power: one's own prefix is seen"
    assert min(accepted["again"]) > statistics.median(accepted["new"]), "and so is one's own text"
    for figures in (accepted, seconds):
        new, again, second = (statistics.median(figures[name]) for name in clients)
        assert abs(second - new) < abs(second - again), figures
