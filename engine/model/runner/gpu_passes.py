"""Passes on a GPU: which are recorded, a warm-up before any request, and a host at most two passes ahead."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from engine.attention.backend import is_triton
from engine.attention.base import PlanAttention
from engine.batch.span import Span, SpanStates
from engine.config import GraphConfig, GraphKind
from engine.sampling.logits_row import LogitsRow
from engine.sampling.sampler import Sampler
from engine.sequence.sequence import ZEROS
from protos.messages import SamplingParams

logger = logging.getLogger(__name__)


_SAMPLINGS = (  # each compiles another sampler kernel or variant
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, presence_penalty=1.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=0.7, top_p=0.9),
)


def warm_up(forward: Callable[[list[Span]], Tensor], block_size: int, max_model_len: int) -> None:
    """Run passes of 1, 2, 4 ... rows, and sample from the last with each of the sampler's kernels.

    Call it before the pool holds anything, since it writes to the first block.
    """
    began_s = time.monotonic()
    num_rows = 1
    while num_rows <= min(128, max_model_len):  # up to the attention kernel's highest tile
        start = min(600, max_model_len - num_rows)  # enough that one sequence is read in splits
        table = [0] * (-(-(start + num_rows) // block_size))
        logits = forward([Span([0] * num_rows, start, table, 1, states=SpanStates(ZEROS, {}))])
        num_rows *= 2
    _draw(logits)
    if logits.is_cuda:
        torch.cuda.synchronize(logits.device)
    logger.info("compiled and warmed up in %.1f s", time.monotonic() - began_s)


def _draw(logits: Tensor) -> None:
    sampler = Sampler()
    for sampling in _SAMPLINGS:
        row = LogitsRow(sampling, [0], 1)
        sampler.draw(logits, [row])
        sampler.apply_processors(logits, [row])


def has_recordings(
    graphs: GraphConfig,
    device: torch.device,
    plan_attention: PlanAttention,
    *,
    num_ranks: int,
    is_recordable: bool,
) -> bool:
    """True if small passes are to be recorded; logs why a GPU does not record them.

    `is_recordable`: the model's recurrent layers, if any, are our kernels.
    """
    is_eager = graphs.kind is GraphKind.EAGER
    if graphs.kind is GraphKind.OFF or not graphs.row_counts or not (is_eager or device.type == "cuda"):
        return False
    if graphs.kind is GraphKind.AUTO and num_ranks > 1:
        logger.info("passes are not recorded: CUDA graphs of a sharded target need cuda_graphs: on")
        return False
    if not is_recordable:
        logger.info("passes are not recorded: CUDA graphs need recurrent layers that our Triton kernels compute")
        return False
    if not is_eager and not is_triton(plan_attention):
        logger.info("passes are not recorded: CUDA graphs need the Triton attention kernel")
        return False
    return True


class _Event(Protocol):
    def record(self) -> None:
        """Mark the place after all work issued so far."""

    def synchronize(self) -> None:
        """Wait until the device has reached the place."""


class PassQueue:
    """Keeps the host at most two passes ahead of a GPU; `new_event` makes the event of an issued pass.

    Passes that only read prompts have no result that the host reads. Without a wait it would issue them until the
    driver's queue is full, so a newcomer would wait for all of them, and the time of a step would not be the time of
    its pass.
    """

    def __init__(self, new_event: Callable[[], _Event]) -> None:
        self._new_event = new_event
        self._events: deque[_Event] = deque()

    @classmethod
    def of(cls, device: torch.device) -> PassQueue | None:
        """None on a device that computes a pass while it is issued."""
        return cls(torch.cuda.Event) if device.type == "cuda" else None

    def wait(self) -> None:
        """Wait for the pass before last; call it before a pass is issued."""
        if len(self._events) == 2:  # one that the device computes, and one that it begins without waiting for the host
            self._events.popleft().synchronize()

    def issued(self) -> None:
        """Add the pass that has just been issued."""
        event = self._new_event()
        event.record()
        self._events.append(event)
