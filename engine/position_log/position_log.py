"""The engine's side of the log: copies rows of logits and passes them to the writer, without waiting."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from engine.accounting.counters import class_name
from engine.accounting.engine_stats import PositionLogStats
from engine.accounting.record import PassRecord
from engine.config import PositionLogConfig
from engine.position_log.log_writer import EndedRequest, LogWriter, TopRows, VerifiedRows
from engine.position_log.shard import LogFolder, LoggedModel
from engine.sequence.sequence import Sequence
from engine.verifier.verify_task import VerifyTask


@dataclass(frozen=True, slots=True)
class _CopiedRows:
    """Rows of a pass that is not verified yet. The rows of sampled sequence `chosen[i]` start at `first_rows[i]`.

    It has `num_tokens[i]` committed tokens.
    """

    rows: TopRows
    chosen: Seq[int]
    first_rows: Seq[int]
    num_tokens: Seq[int]


class PositionLog:
    """Logs the target's likeliest tokens at verified positions, for requests that are to be logged.

    Only `stats` may be used outside the engine's thread. A log that stops or is late loses positions and has no
    other effect.
    """

    def __init__(self, config: PositionLogConfig, model: LoggedModel) -> None:
        self._model = model
        self._writer = LogWriter(LogFolder(Path(config.folder), config.max_bytes), model)
        self._sequences: dict[str, Sequence] = {}
        self._copied: _CopiedRows | None = None  # of the pass that is verified next
        self._num_put_bytes = 0
        self._num_dropped = 0

    @property
    def stats(self) -> PositionLogStats:
        writer = self._writer
        return PositionLogStats(writer.num_positions, self._num_dropped, writer.num_bytes, writer.is_stopped)

    def copy(self, logits: Tensor, tasks: Seq[VerifyTask], num_drafts: Seq[int]) -> None:
        """Copy the rows of logged tasks, unless the writer is late.

        Call it before verification: a next pass that is issued meanwhile overwrites `logits` [R, V].
        """
        chosen = [index for index, task in enumerate(tasks) if self._is_logged(task.sequence)]
        if not chosen:
            return
        rows: list[int] = []
        first_rows = []
        for index in chosen:
            first_rows.append(len(rows))
            rows += range(tasks[index].first_row, tasks[index].first_row + num_drafts[index] + 1)
        num_bytes = len(rows) * logits.shape[1] * logits.element_size()
        # The writer lags; further rows are dropped.
        if self._num_put_bytes - self._writer.num_taken_bytes + num_bytes > 32 << 20:
            self._num_dropped += len(chosen)  # at least the sampled position of each
            return
        num_tokens = [len(tasks[index].sequence.token_ids) for index in chosen]
        self._copied = _CopiedRows(TopRows(logits, rows, self._model.top_k), chosen, first_rows, num_tokens)

    def on_pass(self, record: PassRecord) -> None:
        """Pass the copied rows of verified tokens to the writer."""
        copied, self._copied = self._copied, None
        if copied is None:
            return
        kept: list[int] = []
        request_ids: list[str] = []
        positions: list[int] = []
        for index, first_row, start in zip(copied.chosen, copied.first_rows, copied.num_tokens, strict=True):
            sequence, outcome = record.passes[index].sequence, record.passes[index].outcome
            if not (outcome.is_exact and outcome.is_finite):
                continue
            self._sequences[sequence.request_id] = sequence
            num_tokens = len(outcome.token_ids)
            kept += [first_row + outcome.row_of(number) for number in range(num_tokens)]
            request_ids += [sequence.request_id] * num_tokens
            positions += range(start, start + num_tokens)
        self._num_put_bytes += copied.rows.num_bytes
        self._writer.put(VerifiedRows(copied.rows, kept, request_ids, positions))

    def end(self, request_id: str) -> None:
        """Pass the tokens of an ended request to the writer. Requests that are not logged are ignored."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return
        sampling = sequence.sampling
        self._writer.put(
            EndedRequest(
                request_id=request_id,
                traffic_class=class_name(sequence),
                temperature=sampling.temperature,
                repetition_penalty=sampling.repetition_penalty,
                token_ids=list(sequence.token_ids),
            )
        )

    def close(self) -> None:
        """Write the remaining positions. A second call does nothing."""
        self._writer.close()

    def _is_logged(self, sequence: Sequence) -> bool:
        has_room = not self._writer.is_stopped and sequence.num_output_tokens < 4096
        return sequence.request.is_logged and has_room
