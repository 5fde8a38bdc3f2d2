"""Outrider's engine in this process, without Ray: the ceiling of what serving can reach."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import cycle

from bench.contenders.contender import Prompts, Run
from engine.engine_core import EngineCore
from protos.messages import GenerateRequest, SamplingParams, SpeculationParams


class EngineContender:
    """An `EngineCore` stepped until all prompts are done; its requests ask for `num_drafts` per pass, if it is given.

    Several contenders may share an engine, which runs for one at a time. Requests take the `temperatures` in turn.

    With several `waves` every prompt comes so many times, the next request as soon as one ends, and what is timed is a
    steady load: as many streams as there are prompts, all at different places of their texts. So the first wave's
    requests are of all lengths up to the full one, the clock starts when the first of them ends, and it stops when one
    ends and there is none left to begin. What is begun in that time is then as much as what is brought to an end.
    """

    def __init__(
        self,
        name: str,
        engine: EngineCore,
        num_drafts: int | None = None,
        repetition_penalty: float = 1.0,
        temperatures: Seq[float] = (0.0,),
        waves: int = 1,
    ) -> None:
        self.name = name
        self.engine = engine
        self._speculation = SpeculationParams(num_tokens=num_drafts)
        self._samplings = [
            SamplingParams(temperature=temperature, repetition_penalty=repetition_penalty, seed=index)
            for index, temperature in enumerate(temperatures)
        ]
        self._waves = waves
        self._num_runs = 0

    def run(self, prompts: Prompts, num_tokens: int) -> Run:
        self._num_runs += 1
        waiting = self._requests(prompts, num_tokens)
        outputs: dict[str, list[int]] = {request.request_id: [] for request in waiting}
        arrivals: dict[str, list[float]] = {request.request_id: [] for request in waiting}
        num_passes = num_running = 0
        is_steady = self._waves > 1
        seconds = num_timed_tokens = None
        num_tokens_before = 0
        times_before = self.engine.stats().times
        started = began = time.perf_counter()
        while waiting or self.engine.has_work:
            while waiting and num_running < len(prompts):
                self.engine.add(waiting.popleft())
                num_running += 1
            for chunk in self.engine.step():
                outputs[chunk.request_id].extend(chunk.token_ids)
                arrivals[chunk.request_id].append(time.perf_counter() - started)
                num_passes += 1
                num_running -= chunk.finish_reason is not None
            if is_steady and seconds is None and num_running < len(prompts):
                if num_tokens_before == 0:
                    began, num_tokens_before = time.perf_counter(), sum(map(len, outputs.values()))
                elif not waiting:
                    seconds = time.perf_counter() - began
                    num_timed_tokens = sum(map(len, outputs.values())) - num_tokens_before
        seconds = seconds or time.perf_counter() - began
        num_generated = sum(map(len, outputs.values()))
        step_times = self.engine.stats().times - times_before
        return Run(
            list(outputs.values()),
            seconds,
            num_generated / num_passes,
            step_times,
            arrivals=list(arrivals.values()),
            num_timed_tokens=num_timed_tokens,
        )

    def _requests(self, prompts: Prompts, num_tokens: int) -> deque[GenerateRequest]:
        """Return a salt per run and wave keeps the prefix cache of those before out of the comparison."""
        samplings = cycle(self._samplings)
        requests: deque[GenerateRequest] = deque()
        for wave in range(self._waves):
            salt = f"{self.name}, run {self._num_runs}, wave {wave}"
            for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=False), start=1):
                is_short = self._waves > 1 and wave == 0
                max_tokens = -(-num_tokens * index // len(prompts)) if is_short else num_tokens
                requests.append(
                    GenerateRequest(
                        str(len(requests)),
                        tuple(prompt),
                        replace(sampling, max_tokens=max_tokens),
                        self._speculation,
                        cache_salt=salt,
                    )
                )
        return requests

    def close(self) -> None:
        self.engine.close()
