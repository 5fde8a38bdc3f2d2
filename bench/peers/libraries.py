"""The peers that are Python libraries: OpenVINO GenAI in a worker of its own environment, Transformers in ours.

A worker is a process that answers each JSON line with a JSON line.
"""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import IO, Any

import torch

from bench.contenders.contender import Contender, ContenderRun, Prompts
from bench.contenders.transformers_contender import TransformersContender, load
from bench.peers.system import DraftingMode, ModelPair, Precision, SystemLimits

OPENVINO_WORKER = Path(__file__).parent / "openvino_worker.py"


class Worker:
    """A process that prints a line when it is ready, and then answers each line with a line.

    Its standard error goes to `log`. It is killed after `deadline_s`. Raises RuntimeError if it ends without an answer.
    """

    def __init__(self, command: Seq[str], log: Path, deadline_s: float) -> None:
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self._timer = threading.Timer(deadline_s, self._process.kill)
        self._timer.daemon = True
        self._timer.start()
        try:
            self._receive()
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
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        line = self._pipe(self._process.stdout).readline()
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ended(self) -> RuntimeError:
        status = self._process.wait()
        reason = "at its deadline" if status == -signal.SIGKILL else f"with {status}"
        return RuntimeError(f"{self._log.stem} ended {reason}; see {self._log}")

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None, "both streams are pipes"
        return pipe

    def close(self) -> None:
        self._timer.cancel()
        self._process.kill()
        self._process.wait()
        self._pipe(self._process.stdin).close()
        self._pipe(self._process.stdout).close()


class WorkerContender:
    """A worker with one setting of its generation."""

    def __init__(self, name: str, worker: Worker, setting: Mapping[str, int]) -> None:
        self.name = name
        self._worker = worker
        self._setting = setting

    def run(self, prompts: Prompts, num_tokens: int) -> ContenderRun:
        answer = self._worker.call({"prompts": prompts, "num_tokens": num_tokens, "setting": self._setting})
        return ContenderRun(answer["outputs"], answer["seconds"], arrivals=answer["arrivals"])

    def close(self) -> None:
        pass


class WorkerSystem:
    """A system that is one worker; `modes` has the settings to search in each mode."""

    def __init__(
        self,
        name: str,
        settings: str,
        command: Seq[str],
        modes: Mapping[DraftingMode, Seq[Mapping[str, int]]],
        log: Path,
        deadline_s: float,
    ) -> None:
        self.name = name
        self.settings = settings
        self._command, self._modes, self._log, self._deadline_s = command, modes, log, deadline_s
        self._worker: Worker | None = None

    def start(self) -> dict[DraftingMode, dict[str, Contender]]:
        worker = self._worker = Worker(self._command, self._log, self._deadline_s)
        return {
            mode: {
                json.dumps(setting): WorkerContender(f"{self.name}, {mode}", worker, setting) for setting in settings
            }
            for mode, settings in self._modes.items()
        }

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def openvino_system(
    python: Path, pair: ModelPair, precision: Precision, mode: DraftingMode, limits: SystemLimits, logs: Path
) -> WorkerSystem:
    """Return a pipeline with weights in the precision of the exported `pair`.

    With integer weights keys and values are in u8, OpenVINO's default on processors.
    """
    hint = Precision.BF16 if precision.is_quantized else precision
    kv = "u8" if precision.is_quantized else precision
    command = [str(python), str(OPENVINO_WORKER), str(pair.target), "--threads", str(limits.num_threads)]
    command += ["--max-streams", str(limits.max_streams), "--precision", hint, "--kv-precision", kv]
    searched: list[dict[str, int]] = [{"num_assistant_tokens": length} for length in limits.draft_lengths]
    if mode is DraftingMode.PLAIN:
        searched = [{}]
    if mode is DraftingMode.LOOKUP:
        command += ["--prompt-lookup"]
        searched = [{**each, "max_ngram_size": size} for each in searched for size in (1, 3)]
    if mode is DraftingMode.DRAFT:
        command += ["--draft", str(pair.draft)]
    settings = (
        f"ContinuousBatchingPipeline stepped by its own loop; INFERENCE_NUM_THREADS {limits.num_threads}, "
        f"INFERENCE_PRECISION_HINT {hint} and KV_CACHE_PRECISION {kv} for all models, prefix caching off, "
        f"max_num_seqs {limits.max_streams}, dynamic split-fuse by default"
    )
    log = logs / f"openvino-{precision}-{mode.name.lower()}.log"
    return WorkerSystem(f"openvino {precision}", settings, command, {mode: searched}, log, limits.deadline_s)


class TransformersSystem:
    """`generate` and, with a draft model, assisted generation over the same target."""

    name = "transformers bf16"

    def __init__(self, pair: ModelPair, limits: SystemLimits) -> None:
        self._pair, self._limits = pair, limits
        self.settings = (
            "`generate` over one static batch, and assisted generation of one prompt at a time, as it takes no more; "
            f"torch threads {limits.num_threads}, num_assistant_tokens constant, no confidence threshold, keys and "
            "values in bf16"
        )

    def start(self) -> dict[DraftingMode, dict[str, Contender]]:
        torch.set_num_threads(self._limits.num_threads)
        target = load(self._pair.target)
        modes: dict[DraftingMode, dict[str, Contender]] = {DraftingMode.PLAIN: {"": TransformersContender(target)}}
        for mode in self._pair.modes[1:]:
            draft = load(self._pair.draft) if self._pair.draft and mode is DraftingMode.DRAFT else None
            modes[mode] = {
                f"num_assistant_tokens {length}": TransformersContender(target, draft, length)
                for length in self._limits.draft_lengths
            }
        return modes

    def close(self) -> None:
        pass
