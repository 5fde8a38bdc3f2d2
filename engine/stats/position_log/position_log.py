"""The engine's side of the log: it copies rows of logits and hands them over, and never waits."""

from __future__ import annotations

import zlib
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from engine.config import PositionLogConfig
from engine.sequence.sequence import Sequence
from engine.stats.class_acceptance import class_key
from engine.stats.engine_stats import PositionLogStats
from engine.stats.position_log.folder import LogFolder
from engine.stats.position_log.log_writer import EndedRequest, LogWriter, VerifiedRows
from engine.stats.position_log.shard import LoggedModel
from engine.stats.position_log.top_rows import TopRows
from engine.verifier.verify_result import VerifyResult
from engine.verifier.verify_task import VerifyTask

_MAX_WAITING_BYTES = 32 << 20  # of rows that the writer has not taken; what comes then is dropped
_MAX_POSITIONS = 4096  # of one request; later ones are not logged


@dataclass(frozen=True, slots=True)
class CopiedRows:
    """Rows of a pass whose verdict is not known: those of task `tasks[i]` begin with row `first_rows[i]` of them."""

    rows: TopRows
    tasks: Seq[int]
    first_rows: Seq[int]


class PositionLog:
    """Logs what the target found likely at verified positions of requests that allow it, a share of them.

    All but `stats` belongs to the engine's thread. A log that stops, or is late, costs positions and nothing else.
    """

    def __init__(self, config: PositionLogConfig, model: LoggedModel) -> None:
        self._share = config.share
        self._model = model
        self._writer = LogWriter(LogFolder(Path(config.folder), config.max_bytes), model)
        self._sequences: dict[str, Sequence] = {}
        self._num_put_bytes = 0
        self._num_dropped = 0

    @property
    def stats(self) -> PositionLogStats:
        writer = self._writer
        return PositionLogStats(writer.num_positions, self._num_dropped, writer.num_bytes, writer.is_stopped)

    def copy(self, logits: Tensor, tasks: Seq[VerifyTask], num_drafts: Seq[int]) -> CopiedRows | None:
        """Copy the rows of tasks that are logged; None if there are none, or no room.

        Called before their verdict, since a next pass that is issued meanwhile overwrites `logits` [R, V].
        """
        chosen = [index for index, task in enumerate(tasks) if self._is_logged(task.sequence)]
        if not chosen:
            return None
        rows: list[int] = []
        first_rows = []
        for index in chosen:
            first_rows.append(len(rows))
            rows += range(tasks[index].first_row, tasks[index].first_row + num_drafts[index] + 1)
        num_bytes = len(rows) * logits.shape[1] * logits.element_size()
        if self._num_put_bytes - self._writer.num_taken_bytes + num_bytes > _MAX_WAITING_BYTES:
            self._num_dropped += len(chosen)  # of each at least the one that is sampled
            return None
        return CopiedRows(TopRows(logits, rows, self._model.top_k), chosen, first_rows)

    def record(self, copied: CopiedRows, tasks: Seq[VerifyTask], verified: Seq[VerifyResult]) -> None:
        """Hand over the copied rows of tokens that verification keeps; called before they are committed."""
        kept: list[int] = []
        request_ids: list[str] = []
        positions: list[int] = []
        for index, first_row in zip(copied.tasks, copied.first_rows, strict=True):
            sequence, outcome = tasks[index].sequence, verified[index]
            if not (outcome.is_exact and outcome.is_finite):
                continue
            self._sequences[sequence.request_id] = sequence
            num_tokens = len(outcome.token_ids)
            kept += [first_row + outcome.row_of(number) for number in range(num_tokens)]
            request_ids += [sequence.request_id] * num_tokens
            positions += range(len(sequence.token_ids), len(sequence.token_ids) + num_tokens)
        self._num_put_bytes += copied.rows.num_bytes
        self._writer.put(VerifiedRows(copied.rows, kept, request_ids, positions))

    def end(self, request_id: str) -> None:
        """Hand over the tokens of a request that has ended; nothing of one that is not logged."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return
        sampling = sequence.sampling
        self._writer.put(
            EndedRequest(
                request_id=request_id,
                traffic_class=class_key("", sequence).name,
                temperature=sampling.temperature,
                repetition_penalty=sampling.repetition_penalty,
                token_ids=list(sequence.token_ids),
            )
        )

    def close(self) -> None:
        """Write what is left; a second call does nothing."""
        self._writer.close()

    def _is_logged(self, sequence: Sequence) -> bool:
        request = sequence.request
        return (
            request.is_logged
            and not self._writer.is_stopped
            and sequence.num_output_tokens < _MAX_POSITIONS
            and zlib.crc32(request.request_id.encode()) < self._share * (1 << 32)
        )
