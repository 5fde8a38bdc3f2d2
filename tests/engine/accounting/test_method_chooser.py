"""A bandit over methods: it finds the best one of each class, follows a change, and spends a stated share on it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.accounting.request_limits import EXPLORED, MethodChooser
from engine.config import CacheConfig, EngineConfig, ModelConfig, SpeculationConfig
from engine.engine_core import EngineCore
from engine.engine_core.loading import load_engine
from engine.proposer.method_dispatcher import proposer_of
from protos.messages import GenerateRequest, SamplingParams, SpeculationMethod, SpeculationParams, VerifyMode
from tests.engine.fixtures.checkpoints import write_checkpoint

MODEL, SUFFIX, NGRAM = SpeculationMethod.MODEL, SpeculationMethod.SUFFIX, SpeculationMethod.NGRAM
METHODS = (SpeculationMethod.AUTO, SUFFIX, NGRAM, SpeculationMethod.NONE)


class Deployment:
    """Methods with known gains, measured with noise over recent passes."""

    def __init__(self, gains: dict[str, dict[SpeculationMethod, float]]) -> None:
        self.gains = gains
        self._seen: dict[tuple[SpeculationMethod, str], float] = {}
        self._noise = np.random.default_rng(1)
        self.chooser = MethodChooser((MODEL, SUFFIX, NGRAM), lambda method, name: self._seen.get((method, name)))

    def serve(self, name: str, num_requests: int) -> Counter[SpeculationMethod]:
        chosen: Counter[SpeculationMethod] = Counter()
        for _ in range(num_requests):
            method = self.chooser.choose(name)
            chosen[method] += 1
            gain = self.gains[name][method] * (1 + 0.05 * self._noise.normal())
            before = self._seen.get((method, name), gain)
            self._seen[method, name] = 0.7 * before + 0.3 * gain
        return chosen


def test_each_class_gets_its_best_method_and_the_others_the_stated_share() -> None:
    gains = {"greedy": {MODEL: 1.5, SUFFIX: 2.1, NGRAM: 1.2}, "sampled": {MODEL: 1.4, SUFFIX: 0.9, NGRAM: 1.0}}
    deployment = Deployment(gains)
    for name, best in (("greedy", SUFFIX), ("sampled", MODEL)):
        chosen = deployment.serve(name, 50 * EXPLORED)
        assert sum(number for method, number in chosen.items() if method is not best) <= 50 + 3
        assert min(chosen.values()) >= 20, "the others are tried in turn"


def test_a_method_that_becomes_better_is_found_and_one_that_falls_is_left() -> None:
    deployment = Deployment({"greedy": {MODEL: 1.5, SUFFIX: 1.2, NGRAM: 1.1}})
    deployment.serve("greedy", 20 * EXPLORED)
    deployment.gains["greedy"][NGRAM] = 1.9
    deployment.serve("greedy", 8 * EXPLORED)
    assert deployment.serve("greedy", 100)[NGRAM] > 90
    deployment.gains["greedy"][NGRAM] = 0.8
    deployment.serve("greedy", EXPLORED)
    assert deployment.serve("greedy", 100)[MODEL] > 85


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    write_checkpoint(folder, seed=3)
    return folder


def texts(target: Path, requests: list[GenerateRequest]) -> tuple[dict[str, list[int]], EngineCore]:
    speculation = SpeculationConfig(3, methods=METHODS, adaptive=True)
    model = ModelConfig(str(target), "float32", num_threads=1)
    config = EngineConfig(model, CacheConfig(num_blocks=256, memory_bytes=None), speculation=speculation)
    core = load_engine(config, proposer_of(METHODS))
    for request in requests:
        core.add(request)
    found: dict[str, list[int]] = {request.request_id: [] for request in requests}
    while core.has_work:
        for chunk in core.step():
            found[chunk.request_id] += chunk.token_ids
    return found, core


def test_the_choice_changes_no_token_and_all_methods_are_tried(target: Path) -> None:
    sampling = [SamplingParams(seed, temperature, max_tokens=40) for seed in range(6) for temperature in (0.0, 1.0)]
    requests = [GenerateRequest(f"r{index}", (5, 9, 5, 9, 5), each) for index, each in enumerate(sampling)]
    plain = [replace(each, speculation=SpeculationParams(enabled=False)) for each in requests]
    found, core = texts(target, requests)
    assert found == texts(target, plain)[0]
    assert {"suffix-greedy", "ngram-greedy", "suffix-sampled", "ngram-sampled"} <= set(core.stats().speedups)


def test_a_choice_follows_no_clock_where_a_seed_promises_the_text(target: Path) -> None:
    """With rejection the text depends on the drafts, and so on the method."""
    sampling = SamplingParams(7, 1.0, max_tokens=24)
    speculation = SpeculationParams(verify=VerifyMode.REJECTION)
    requests = [
        GenerateRequest(f"r{index}", (5, 9, 5, 9, 5), sampling, speculation, cache_salt=str(index), is_seeded=True)
        for index in range(4)
    ]
    found, _ = texts(target, requests)
    assert len({tuple(text) for text in found.values()}) == 1
