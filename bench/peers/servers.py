"""The systems that are driven over HTTP: Outrider with its whole application, and llama.cpp's server."""

from __future__ import annotations

import subprocess
import time
import urllib.request
from pathlib import Path

from bench.contenders.contender import Contender, ContenderRun, Prompts
from bench.contenders.event_streams import Body, run_streams
from bench.contenders.http_contender import HttpContender
from bench.peers.system import DraftingMode, ModelPair, Precision, SystemLimits
from bench.served.application import BASE_URL, MODEL_ID, ServedApplication, ServedPairSettings, start_served

PORT = 8130
START_TIMEOUT_S = 120.0


class OutriderSystem:
    """One deployment serves both modes."""

    def __init__(
        self, pair: ModelPair, precision: Precision, limits: SystemLimits, logs: Path, *, is_deterministic: bool = False
    ) -> None:
        self.name = f"outrider {precision}{', deterministic' if is_deterministic else ''}"
        quantization = str(precision) if precision.is_quantized else "none"
        self._pair = ServedPairSettings(
            pair.target,
            pair.draft,
            {Precision.F32: "float32", Precision.BF16: "bfloat16"}.get(precision, "auto"),
            limits.num_threads,
            limits.num_draft_tokens,
            is_deterministic,
            quantization=quantization,
            max_stall_passes=None,
            kv_dtype="int8" if precision.is_quantized else "auto",
        )
        self.settings = (
            f"the root deploy.yaml with dtype {self._pair.dtype}, target.quantization {quantization}, cache.dtype "
            f"{self._pair.kv_dtype}, draft {self._pair.draft_kind}, target.num_threads {limits.num_threads}, "
            f"target.deterministic {str(is_deterministic).lower()}, speculation.num_tokens {limits.num_draft_tokens}"
            f"{'' if pair.draft else ' at most (adaptive)'}; a cache_salt per run, so that no prefix is cached; "
            "scheduler.max_stall_passes null, as all prompts arrive together"
        )
        self._path = logs / f"{self.name.replace(', ', '-').replace(' ', '-')}.yaml"
        self._application: ServedApplication | None = None

    def start(self) -> dict[DraftingMode, Contender]:
        self._application = start_served(self._path, self._pair.change)
        self._application.wait_until_ready()
        return {
            mode: HttpContender(BASE_URL, MODEL_ID, is_speculating=mode is DraftingMode.DRAFT) for mode in DraftingMode
        }

    def close(self) -> None:
        if self._application is not None:
            self._application.close()
            self._application = None


class LlamaServerContender:
    """Streams from a running llama-server."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self.name = name
        self._timeout_s = timeout_s

    def run(self, prompts: Prompts, num_tokens: int) -> ContenderRun:
        bodies = [_body(prompt, num_tokens) for prompt in prompts]
        streams = run_streams(f"http://127.0.0.1:{PORT}/completion", bodies, self._timeout_s)
        return ContenderRun.of_streams(streams, lambda event: event.data.get("tokens") or [])

    def close(self) -> None:
        pass


class LlamaServerSystem:
    """A llama-server with or without the draft model: requests cannot choose."""

    def __init__(
        self,
        server: Path,
        pair: ModelPair,
        mode: DraftingMode,
        limits: SystemLimits,
        logs: Path,
        *,
        weights: str = "bf16",
    ) -> None:
        self.name = f"llama-server {weights}"
        self._command = [str(server), *_options(pair, mode, limits)]
        self._mode, self._limits = mode, limits
        self._log = logs / f"llama-server-{weights}-{mode.name.lower()}.log"
        options = _options(ModelPair(Path(pair.target.name), pair.draft and Path(pair.draft.name)), mode, limits)
        self.settings = f"{mode}: `{' '.join(options)}`; requests with cache_prompt false; keys and values in float16"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> dict[DraftingMode, Contender]:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=2):
                    return {self._mode: LlamaServerContender(f"{self.name}, {self._mode}", self._limits.deadline_s)}
            except OSError:  # not there yet, or 503 while it loads
                time.sleep(0.2)
        raise RuntimeError(f"llama-server was not ready within {START_TIMEOUT_S:.0f} s; see {self._log}")

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def _body(prompt: list[int], num_tokens: int) -> Body:
    """Return a request; each event of its answer carries one token, also of tokens that were accepted together."""
    return {
        "prompt": prompt,
        "n_predict": num_tokens,
        "temperature": 0.0,
        "samplers": ["temperature"],
        "ignore_eos": True,
        "cache_prompt": False,
        "return_tokens": True,
        "stream": True,
    }


def _options(pair: ModelPair, mode: DraftingMode, limits: SystemLimits) -> list[str]:
    """Keys and values stay float16, the default and its fastest; flash attention is `auto` by default."""
    threads = str(limits.num_threads)
    options = ["--model", str(pair.target), "--host", "127.0.0.1", "--port", str(PORT), "--no-webui"]
    options += ["--threads", threads, "--threads-batch", threads, "--parallel", str(limits.max_streams)]
    options += ["--ctx-size", str(limits.max_streams * limits.max_context), "--ubatch-size", "512"]
    options += ["--cache-ram", "0", "--slot-prompt-similarity", "0"]
    if mode is DraftingMode.DRAFT:
        options += ["--spec-type", "draft-simple", "--model-draft", str(pair.draft)]
        options += ["--spec-draft-n-max", str(limits.num_draft_tokens)]
        options += ["--spec-draft-threads", threads, "--spec-draft-threads-batch", threads]
    return options
