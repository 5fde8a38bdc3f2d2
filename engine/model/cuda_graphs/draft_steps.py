"""Steps of drafts without the host between them: it plans all of them at once, and reads all tokens after the last.

    host      plan the steps          decode, advance, decode, advance, decode, advance               read
    device    ... committed tokens | decode | advance | decode | advance | decode | advance |

The host knows a token's position, slot, context and noise before the token itself. So it copies these numbers for every
step to the device, while that computes the committed tokens. `decode` is the recording of any decode. `advance` is a
small one: it draws the tokens, feeds them to the next step, increments a counter, and takes the next step's numbers by
it. They are the numbers that a single pass would have, so the drafts are the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from engine.batch.indexing import index_tensor
from engine.batch.span import Span
from engine.model.cuda_graphs.static_batch import StaticBatch
from engine.native.library import are_finite
from engine.sampling.logits_row import LogitsRow
from engine.sampling.sampler import Sampler
from engine.sampling.step_draw import DrawKind, StepDraw
from protos.messages import SamplingParams

logger = logging.getLogger(__name__)

MAX_STEPS = 16  # laid out at a time
NUM_COMPARED = 4  # steps of a new recording
_COMPARED = (  # a draw of each kind
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9),
)

Advance = Callable[[], Tensor]  # returns the tokens, [R] int64
# Logits of one row for each span, computed from these input tokens as any other pass.
ForwardStep = Callable[[Seq[Span], Tensor], Tensor]


class HeadStates(NamedTuple):
    """States of a recurrent head at fixed addresses, [R, S] each: a step reads some and leaves the next."""

    current: Tensor
    following: Tensor

    def head(self, num_rows: int) -> HeadStates:
        """Return the first rows of both, without copying."""
        return HeadStates(self.current[:num_rows], self.following[:num_rows])


class DraftSteps:
    """The steps of one decode bucket.

    Attributes:
        num_steps: the steps that have begun.
    """

    def __init__(
        self,
        static: StaticBatch,
        decode: Callable[[], object],
        logits: Tensor,
        states: HeadStates | None = None,
        *,
        has_kernels: bool,
    ) -> None:
        """Take what computes a step.

        Args:
            static: the batch of a step.
            decode: computes it, and leaves `logits` and the next states.
            logits: [R, V] float32, of the ids that may be drawn.
            states: a head's; None for a model.
            has_kernels: Triton's kernels draw, and torch otherwise.
        """
        self._static, self._decode, self._logits, self._states = static, decode, logits, states
        num_rows, device = len(logits), logits.device
        # After the last step the numbers of one more are taken, and never used.
        num_steps = MAX_STEPS + 1
        static.reserve_steps(num_steps)
        self._draw = StepDraw(num_rows, num_steps, device, has_kernels=has_kernels)
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        self._drawn = torch.zeros(num_steps, num_rows, dtype=torch.int64, device=device)
        self._advances: dict[DrawKind, Advance] = {kind: partial(self._draw_and_take, kind) for kind in DrawKind}
        self.num_steps = self._num_sequences = 0
        self._kind = DrawKind.ALL_TOKENS

    def record(self, record: Callable[[Advance], Advance]) -> None:
        """Replace each kind of `advance` by its replay; steps of a kind that cannot be recorded do not begin."""
        recorded: dict[DrawKind, Advance] = {}
        self._step.zero_()  # each kind is computed twice before it is recorded
        for kind, advance in self._advances.items():
            try:
                recorded[kind] = record(advance)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                logger.warning("drafts by %s are drawn call by call, as they cannot be recorded: %s", kind.value, error)
        self._advances = recorded

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self._step.device

    @property
    def last_ids(self) -> Tensor:
        """The tokens of the last step, [B] int64; valid until the next one."""
        return self._static.batch.input_ids[: self._num_sequences]

    @property
    def states(self) -> Tensor:
        """A head's states after the last step, [B, S]; valid until the next one."""
        assert self._states is not None, "models have none"
        return self._states.current[: self._num_sequences]

    def begin(self, spans: Seq[Span], rows: Seq[LogitsRow], last_ids: Tensor, states: Tensor | None = None) -> bool:
        """Lay out a step for each token of `spans`, all of one length; False if they cannot be computed in steps.

        Then the attention has no room for them, or their kind of draw is not recorded.

        Args:
            spans: up to `MAX_STEPS` input tokens of each sequence.
            rows: sample the token after the first input of each; `is_drawn_in_steps` is true for them.
            last_ids: the first input of each, [B] int64, on the device.
            states: a head's before it, [B, S].
        """
        self.num_steps, self._num_sequences = len(spans[0].token_ids), len(spans)
        self._kind = self._draw.fill(rows, self.num_steps)
        if self._kind not in self._advances or not self._static.fill_steps(spans):
            return False
        self.last_ids.copy_(last_ids)
        if states is not None:
            self.states.copy_(states)
        self._step.zero_()
        self._static.take(self._step)
        return True

    def decode(self) -> Tensor:
        """Compute the present step, and return its logits [R, V]; `advance` comes before the next one."""
        self._decode()
        return self._logits

    def advance(self) -> Tensor:
        """Draw the present step's tokens, feed them to the next step, and take it; return them, [B] int64."""
        self._advances[self._kind]()
        return self.last_ids

    def drawn(self) -> Tensor:
        """Return the tokens of all steps, [S, B] int64: -1 - id for one whose logits were not finite."""
        return self._drawn[: self.num_steps, : self._num_sequences].clone()

    @torch.inference_mode()
    def _draw_and_take(self, kind: DrawKind) -> Tensor:
        token_ids = self._draw.draw(kind, self._logits, self._step)
        marked = token_ids.where(are_finite(self._logits), -1 - token_ids)
        self._drawn.index_copy_(0, self._step, marked[None])
        self._static.batch.input_ids.copy_(token_ids)
        if self._states is not None:
            self._states.current.copy_(self._states.following)
        self._step.add_(1)
        self._static.take(self._step)
        return token_ids


def steps_error(
    steps: DraftSteps, spans: Seq[Span], forward: ForwardStep, error_of: Callable[[Tensor, Tensor], float]
) -> float:
    """Return the largest `error_of` the logits of steps and of passes that the host lays out one by one.

    All `spans` are alike, since they write to one scratch block. A token that the sampler would not draw from the
    step's logits is an infinite error.
    """
    error, sampler = 0.0, Sampler()
    for sampling in _COMPARED:
        token_ids = index_tensor([5] * len(spans), steps.device)
        drafts: list[int] = []
        row = LogitsRow(sampling, [5], 1, draft_ids=drafts)
        if not steps.begin(spans, [row] * len(spans), token_ids):
            continue
        for step in range(len(spans[0].token_ids)):
            expected = forward([span.at_step(step) for span in spans], token_ids).clone()
            logits = steps.decode()
            error = max(error, error_of(logits, expected))
            wanted = sampler.draw(logits, [row] * len(spans))
            token_ids = steps.advance().clone()
            if not torch.equal(token_ids, wanted):
                return float("inf")
            drafts.append(int(token_ids[0]))
    return error
