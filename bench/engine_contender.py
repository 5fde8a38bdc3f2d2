"""Outrider's engine in this process, without Ray: the ceiling of what serving can reach."""

from __future__ import annotations

import time

from bench.contender import Prompts, Run
from engine.engine_core import EngineCore
from protos.messages import GenerateRequest, SamplingParams, SpeculationParams


class EngineContender:
    """An `EngineCore` stepped until all prompts are done; its requests ask for `num_drafts` per pass, if it is given.

    Several contenders may share an engine, which runs for one at a time.
    """

    def __init__(
        self, name: str, engine: EngineCore, num_drafts: int | None = None, repetition_penalty: float = 1.0
    ) -> None:
        self.name = name
        self.engine = engine
        self._speculation = SpeculationParams(num_tokens=num_drafts)
        self._repetition_penalty = repetition_penalty
        self._num_runs = 0

    def run(self, prompts: Prompts, num_tokens: int) -> Run:
        self._num_runs += 1
        # Greedy; a salt per run keeps the prefix cache of the run before out of the comparison.
        sampling = SamplingParams(temperature=0.0, repetition_penalty=self._repetition_penalty, max_tokens=num_tokens)
        outputs: dict[str, list[int]] = {}
        num_passes = 0
        times_before = self.engine.stats().times
        began = time.perf_counter()
        for index, prompt in enumerate(prompts):
            salt = f"{self.name}, run {self._num_runs}"
            request = GenerateRequest(str(index), tuple(prompt), sampling, self._speculation, cache_salt=salt)
            outputs[request.request_id] = []
            self.engine.add(request)
        while self.engine.has_work:
            for chunk in self.engine.step():
                outputs[chunk.request_id].extend(chunk.token_ids)
                num_passes += 1
        seconds = time.perf_counter() - began
        num_generated = sum(map(len, outputs.values()))
        step_times = self.engine.stats().times - times_before
        return Run(list(outputs.values()), seconds, num_generated / num_passes, step_times)

    def close(self) -> None:
        self.engine.close()
