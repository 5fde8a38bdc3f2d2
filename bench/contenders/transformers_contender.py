"""Transformers' `generate`, plain and assisted."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from bench.contenders.contender import ContenderRun, Prompts


def load(path: Path, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """Return the checkpoint at `path`, ready to generate."""
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    return loaded


class ArrivalStreamer(BaseStreamer):  # type: ignore[misc]  # mypy does not read transformers
    """The arrival times of new tokens; `generate` passes the prompt first, which is not counted."""

    def __init__(self) -> None:
        self.arrivals: list[float] = []
        self._has_prompt = False

    def put(self, value: Tensor) -> None:
        if self._has_prompt:
            self.arrivals.append(time.perf_counter())
        self._has_prompt = True

    def end(self) -> None:
        pass


class TransformersContender:
    """`model.generate` over a batch of equally long prompts; assisted generation serves one prompt at a time.

    With a K and without a draft model it looks drafts up in the prompt.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel | None = None,
        num_draft_tokens: int = 0,
    ) -> None:
        self.name = "transformers assisted" if num_draft_tokens else "transformers generate"
        self._num_draft_tokens = num_draft_tokens
        self._target = target
        self._draft = draft

    def run(self, prompts: Prompts, num_tokens: int) -> ContenderRun:
        if self._draft is not None:
            self._draft.generation_config.num_assistant_tokens = self._num_draft_tokens
            self._draft.generation_config.num_assistant_tokens_schedule = "constant"
            self._draft.generation_config.assistant_confidence_threshold = 0.0
        batches = [[prompt] for prompt in prompts] if self._num_draft_tokens else [prompts]
        began = time.perf_counter()
        outputs: list[list[int]] = []
        arrivals: list[list[float]] = []
        for batch in batches:
            streamer = ArrivalStreamer()
            outputs += self._generate(batch, num_tokens, streamer)
            arrivals += [[second - began for second in streamer.arrivals]] * len(batch)
        return ContenderRun(outputs, time.perf_counter() - began, arrivals=arrivals)

    def _generate(self, prompts: Prompts, num_tokens: int, streamer: BaseStreamer) -> list[list[int]]:
        input_ids = torch.tensor(prompts)
        generate: Any = self._target.generate
        output = generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            repetition_penalty=1.0,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            assistant_model=self._draft,
            prompt_lookup_num_tokens=None if self._draft is not None else self._num_draft_tokens or None,
            streamer=streamer,
        )
        token_ids: list[list[int]] = output[:, input_ids.shape[1] :].tolist()
        return token_ids

    def close(self) -> None:
        pass
