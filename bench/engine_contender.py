"""Outrider's engine in this process, without Ray: the ceiling of what serving can reach."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import cycle

from bench.contender import Prompts, Run
from engine.engine_core import EngineCore
from protos.messages import GenerateRequest, SamplingParams, SpeculationParams


class EngineContender:
    """An `EngineCore` stepped until all prompts are done; its requests ask for `num_drafts` per pass, if it is given.

    Several contenders may share an engine, which runs for one at a time. Requests take the `temperatures` in turn.
    """

    def __init__(
        self,
        name: str,
        engine: EngineCore,
        num_drafts: int | None = None,
        repetition_penalty: float = 1.0,
        temperatures: Seq[float] = (0.0,),
    ) -> None:
        self.name = name
        self.engine = engine
        self._speculation = SpeculationParams(num_tokens=num_drafts)
        self._samplings = [
            SamplingParams(temperature=temperature, repetition_penalty=repetition_penalty, seed=index)
            for index, temperature in enumerate(temperatures)
        ]
        self._num_runs = 0

    def run(self, prompts: Prompts, num_tokens: int) -> Run:
        self._num_runs += 1
        # A salt per run keeps the prefix cache of the run before out of the comparison.
        samplings = cycle(replace(each, max_tokens=num_tokens) for each in self._samplings)
        outputs: dict[str, list[int]] = {}
        num_passes = 0
        times_before = self.engine.stats().times
        began = time.perf_counter()
        for (index, prompt), sampling in zip(enumerate(prompts), samplings, strict=False):
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
