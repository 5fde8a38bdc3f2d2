"""The peers that run as workers: OpenVINO GenAI in its own environment, Transformers in ours."""

from __future__ import annotations

import sys
from pathlib import Path

from bench.peers.system import Limits, Mode, Pair, Precision
from bench.peers.worker import WorkerSystem

OPENVINO_WORKER = Path(__file__).parent / "openvino_worker.py"


def openvino_system(
    python: Path, pair: Pair, precision: Precision, mode: Mode, limits: Limits, logs: Path
) -> WorkerSystem:
    """Return a pipeline with a draft model or without, whose weights are in the precision that `pair` was exported in.

    Beside weights of integers keys and values are in u8, OpenVINO's default on processors.
    """
    hint = Precision.BF16 if precision.is_quantized else precision
    kv = "u8" if precision.is_quantized else precision
    command = [str(python), str(OPENVINO_WORKER), str(pair.target), *_common(limits)]
    command += ["--precision", hint, "--kv-precision", kv, "--max-streams", str(limits.max_streams)]
    if mode is Mode.DRAFT:
        command += ["--draft", str(pair.draft)]
    settings = (
        f"ContinuousBatchingPipeline stepped by its own loop; INFERENCE_NUM_THREADS {limits.num_threads}, "
        f"INFERENCE_PRECISION_HINT {hint} and KV_CACHE_PRECISION {kv} for all models, prefix caching off, "
        f"max_num_seqs {limits.max_streams}, dynamic split-fuse as by default, num_assistant_tokens "
        f"{limits.num_draft_tokens}"
    )
    log = logs / f"openvino-{precision}-{mode.name.lower()}.log"
    return WorkerSystem("openvino", f"openvino {precision}", settings, command, [mode], log, limits.deadline_s)


def transformers_system(pair: Pair, limits: Limits, logs: Path) -> WorkerSystem:
    """Return `generate` and, with a draft model, assisted generation over the same target."""
    command = [sys.executable, "-m", "bench.peers.transformers_worker", str(pair.target), *_common(limits)]
    if pair.draft is not None:
        command += ["--draft", str(pair.draft)]
    settings = (
        f"`generate` over one static batch, and assisted generation prompt after prompt, since it takes one at a time; "
        f"torch threads {limits.num_threads}, num_assistant_tokens {limits.num_draft_tokens} (constant, no confidence "
        "threshold), keys and values in bf16"
    )
    log = logs / "transformers.log"
    return WorkerSystem("transformers", "transformers bf16", settings, command, pair.modes, log, limits.deadline_s)


def _common(limits: Limits) -> list[str]:
    return ["--threads", str(limits.num_threads), "--num-draft-tokens", str(limits.num_draft_tokens)]
