"""A script in another environment that runs prompts for us: one JSON line in, one JSON line out."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import IO, Any

from bench.contenders.contender import Contender, Prompts, Run
from bench.peers.process_tree import ProcessTree
from bench.peers.system import Mode


class Worker:
    """A process that answers each line with a line, the first one unasked, when it is ready.

    What it and its libraries print goes to `log`. Raises RuntimeError when it ends instead of answering.
    """

    def __init__(self, command: Seq[str], log: Path, deadline_s: float) -> None:
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self.tree = ProcessTree(self._process.pid, deadline_s)
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def call(self, request: dict[str, Any]) -> dict[str, Any]:
        pipe = self._pipe(self._process.stdin)
        try:
            pipe.write(json.dumps(request) + "\n")
            pipe.flush()
        except BrokenPipeError:
            raise self._ended() from None
        return self._read()

    def _read(self) -> dict[str, Any]:
        line = self._pipe(self._process.stdout).readline()
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ended(self) -> RuntimeError:
        reason = "at its deadline" if self.tree.is_late else f"with {self._process.wait()}"
        return RuntimeError(f"{Path(self._log).stem} ended {reason}; see {self._log}")

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None, "both streams are pipes"
        return pipe

    def close(self) -> None:
        self.tree.close()
        self._process.wait()
        self._pipe(self._process.stdin).close()
        self._pipe(self._process.stdout).close()


class WorkerContender:
    """One mode of a worker."""

    def __init__(self, name: str, worker: Worker, mode: Mode) -> None:
        self.name = name
        self._worker = worker
        self._mode = mode

    def run(self, prompts: Prompts, num_tokens: int) -> Run:
        is_drafting = self._mode is Mode.DRAFT
        answer = self._worker.call({"prompts": prompts, "num_tokens": num_tokens, "is_drafting": is_drafting})
        return Run(answer["outputs"], answer["seconds"], arrivals=answer["arrivals"])

    def close(self) -> None:
        pass


class WorkerSystem:
    """A system that is one worker."""

    def __init__(
        self, peer: str, name: str, settings: str, command: Seq[str], modes: Seq[Mode], log: Path, deadline_s: float
    ) -> None:
        self.peer = peer
        self.name = name
        self.settings = settings
        self._command, self._modes, self._log, self._deadline_s = command, modes, log, deadline_s
        self._worker: Worker | None = None

    def start(self) -> dict[Mode, Contender]:
        self._worker = Worker(self._command, self._log, self._deadline_s)
        return {mode: WorkerContender(f"{self.name}, {mode}", self._worker, mode) for mode in self._modes}

    def peak_bytes(self) -> dict[str, int]:
        return self._worker.tree.peak_bytes() if self._worker is not None else {}

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None
